"""The roofline bound of a convolution's GEMMs against sums done by hand."""

import time

import pytest
import torch

import fst
from fst import backends
from fst.backends import registry
from fst.backends.timing import Samples
from fst.ops.geometry import Geometry
from fst.studies import benchmark
from fst.studies.benchmark import roofline
from fst.studies.benchmark.roofline import Rates, gemm_bound

GEMMS = ("output", "grad_input", "grad_weight")


def test_bound_of_a_dense_convolution():
    """Against the sums of products, done by hand, of 8 -> 6 channels on 4 images of 10x12."""
    shape = benchmark.LayerShape(8, 6, (3, 3), Geometry((1, 1), (1, 1), (1, 1), 2), 4, 10, 12)
    assert shape.output_size == (10, 12)
    flops = 2 * 4 * (10 * 12) * 6 * (8 // 2) * 9
    moved = 2 * (4 * 8 * 120 + 4 * 6 * 120 + 6 * 4 * 9)
    for gemm in GEMMS:
        fast, slow = Rates(flops / 1e-3, moved / 2e-3), Rates(flops / 5e-3, moved / 2e-3)
        bound = gemm_bound(shape, gemm, torch.bfloat16, fast)
        assert (bound.flops, bound.bytes, bound.limit) == (flops, moved, "memory")
        assert bound.milliseconds == pytest.approx(2)
        bound = gemm_bound(shape, gemm, torch.bfloat16, slow)
        assert (bound.milliseconds, bound.limit) == (pytest.approx(5), "compute")


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("width", [8, 7])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("pairing", ["row", "flat"])
def test_alternating_needs_the_kept_positions_alone(kernel, width, stride, pairing):
    geometry = Geometry((stride, stride), (kernel // 2,) * 2, (1, 1), 1)
    shape = benchmark.LayerShape(4, 4, (kernel, kernel), geometry, 1, 9, width)
    strategy = fst.get_strategy("fst", pairing=pairing)
    height, width_out = shape.output_size
    dense = gemm_bound(shape, "grad_weight", torch.float32, Rates(1, 1))
    pruned = gemm_bound(shape, "grad_weight", torch.float32, Rates(1, 1), strategy)
    positions = torch.arange(height * width_out).view(height, width_out)
    kept = positions.flatten()[::2] if pairing == "flat" else positions[:, ::2].flatten()
    assert pruned.flops / dense.flops == pytest.approx(len(kept) / positions.numel())
    assert pruned.bytes <= dense.bytes
    if kernel == 1:
        read = 4 * 4 * len(kept)
        dense_read = 4 * 4 * (9 * width / stride**2)
        assert dense.bytes - pruned.bytes == pytest.approx(dense_read - read, abs=4 * 4 * 6)
    for gemm in ("output", "grad_input"):
        simulated = gemm_bound(shape, gemm, torch.float32, Rates(1, 1), strategy)
        assert simulated == gemm_bound(shape, gemm, torch.float32, Rates(1, 1))


@pytest.mark.parametrize(
    ("options", "share"),
    [
        (dict(split=True), 1 / 2),
        (dict(axis="samples"), 1 / 2),
        (dict(keep=4), 1 / 4),
        (dict(min_size=9), 1),
    ],
    ids=str,
)
def test_sampled_computes_what_it_keeps(options, share):
    shape = benchmark.LayerShape(4, 4, (1, 1), Geometry((1, 1), (0, 0), (1, 1), 1), 8, 8, 8)
    dense = gemm_bound(shape, "grad_weight", torch.float32, Rates(1, 1))
    strategy = fst.get_strategy("sampled", **options)
    pruned = gemm_bound(shape, "grad_weight", torch.float32, Rates(1, 1), strategy)
    assert pruned.flops == share * dense.flops
    read = 4 * 4 * 8 * 64
    assert dense.bytes - pruned.bytes == pytest.approx((1 - share) * read)


def test_bands_read_the_whole_input():
    shape = benchmark.LayerShape(4, 4, (1, 1), Geometry((1, 1), (0, 0), (1, 1), 1), 8, 8, 8)
    dense = gemm_bound(shape, "grad_weight", torch.float32, Rates(1, 1))
    bands = fst.get_strategy("bands")
    pruned = gemm_bound(shape, "grad_weight", torch.float32, Rates(1, 1), bands)
    assert (pruned.flops, pruned.bytes) == (dense.flops / 2, dense.bytes)


def test_an_accelerated_backend_has_half_the_weight_to_move_and_the_sparse_rate():
    shape = benchmark.LayerShape(8, 4, (1, 1), Geometry((1, 1), (0, 0), (1, 1), 1), 1, 2, 2)
    strategy = fst.get_strategy("fst")
    options = ("output", torch.bfloat16, Rates(1e3, 1e12, 2e3), strategy)
    simulated = gemm_bound(shape, *options)
    accelerated = gemm_bound(shape, *options, accelerated=True)
    assert simulated.bytes - accelerated.bytes == 32 * 2 - (32 + 32 / 8)  # 2 bits for each kept
    assert accelerated.milliseconds == simulated.milliseconds / 2
    without = gemm_bound(shape, "output", torch.bfloat16, Rates(1e3, 1e12), strategy)
    assert without.milliseconds == simulated.milliseconds


def test_bounds_of_a_layer_know_which_backend_is_accelerated(monkeypatch):
    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))
    fast = backends.Backend("grad_input", "fast", "", True, lambda: "", accelerated=True)
    backends.register_backend(fast)
    shape = benchmark.LayerShape(8, 4, (1, 1), Geometry((1, 1), (0, 0), (1, 1), 1), 1, 2, 2)
    decision = backends.Decision("grad_input", "", "fast", "forced", {})
    chosen = {"grad_input": {"wg": {"grad_input": decision}}}
    layer = benchmark.LayerTimes(shape, 1, {}, chosen)
    strategies = {"wg": fst.get_strategy("wg")}
    bounds = roofline.layer_bounds(layer, strategies, torch.float32, Rates(1.0, 1e12, 4.0))
    of_wg = {gemm: bounds[gemm]["wg"].milliseconds for gemm in GEMMS}
    dense = bounds["output"]["torch"].milliseconds
    assert of_wg == {"output": dense, "grad_input": dense / 4, "grad_weight": dense}


def test_measured_rates_are_those_of_a_product_and_a_copy(monkeypatch):
    monkeypatch.setattr(roofline, "COPY_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(roofline, "MATMUL_SIZE", {"cpu": 256})
    begin = time.perf_counter()
    rates = roofline.measure_rates(torch.device("cpu"), torch.float32, repeats=3)
    took = time.perf_counter() - begin
    assert rates.dense > 3 * 2 * 256**3 / took
    assert rates.bandwidth > 3 * 2 * 2**20 / took
    assert rates.sparse is None


def test_rates_by_hand(monkeypatch):
    """The best of two times: a multiply-add is two operations, a byte is read and written."""
    monkeypatch.setattr(roofline, "COPY_BYTES", {"cpu": 1000})
    monkeypatch.setattr(roofline, "MATMUL_SIZE", {"cpu": 10})
    taken = {"matmul": Samples([4.0, 2.0], []), "copy": Samples([1.0, 3.0], [])}
    monkeypatch.setattr(roofline, "sample", lambda *_: taken)
    rates = roofline.measure_rates(torch.device("cpu"), torch.float32)
    assert rates.dense == pytest.approx(2 * 10**3 / 2e-3)
    assert rates.bandwidth == pytest.approx(2 * 1000 / 1e-3)


def test_the_whole_input_gradient_is_written():
    """Of a 1x1 kernel with a stride of 2 most of it are zeros; of the input a quarter is read."""
    shape = benchmark.LayerShape(4, 4, (1, 1), Geometry((2, 2), (0, 0), (1, 1), 1), 1, 8, 8)
    moved = {gemm: gemm_bound(shape, gemm, torch.float32, Rates(1, 1)).bytes for gemm in GEMMS}
    rest = 4 * (4 * 4 + 4 * 16)
    whole = 4 * 4 * 64
    assert moved["grad_input"] == whole + rest
    assert moved["output"] == moved["grad_weight"] == whole / 4 + rest
