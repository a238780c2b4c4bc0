"""Convolutions on 2:4 tensor cores: on a GPU, or the same source run by threads of the CPU."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fst.backends import sources
from fst.ops import sparse24
from fst.ops.geometry import Geometry, input_gradient
from fst.rules.nm import NM
from fst.rules.strategy import GEMMS

from . import emulation

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
plan = sources.load("sparse24.plan")
RULE = NM("weight", 2, 4)

# sizes of input, kernel, and what else a convolution is made of
SIDES = (1, 7, 14, 15, 28, 56, 57)
KERNELS = ((1, 1), (3, 3), (5, 5), (1, 7))
CHANNELS = (8, 24, 40, 64, 72, 128, 256)
EVERYTHING = {
    "samples": (1, 3, 256),
    "inputs": CHANNELS,
    "outputs": (8, 56, 64, 104, 128, 512),
    "kernel": KERNELS,
    "height": SIDES,
    "width": SIDES,
    "stride": ((1, 1), (2, 2), (1, 2), (3, 2)),
    "padding": ((0, 0), (1, 1), (2, 2), (0, 3)),
    "dilation": ((1, 1), (2, 2), (1, 2)),
    "groups": (1, 2),
    "dtype": (torch.bfloat16, torch.float16),
}
CASES = {"cpu": 48, "cuda": 300}
MOST_WORK = {"cpu": 1e7, "cuda": 2e10}  # multiply-adds of one case


def some_cases(device: torch.device) -> list[dict]:
    """Drawn at random, so that all pairs of values come up, and small enough."""
    draw = random.Random(0)
    cases = []
    while len(cases) < CASES[device.type]:
        case = {name: draw.choice(values) for name, values in EVERYTHING.items()}
        if device.type == "cpu":
            case["samples"] = draw.choice((1, 2, 3))
        inputs, outputs = case["inputs"] * case["groups"], case["outputs"] * case["groups"]
        sizes = [
            (case[side] + 2 * case["padding"][i] - case["dilation"][i] * (case["kernel"][i] - 1))
            for i, side in enumerate(("height", "width"))
        ]
        work = case["samples"] * inputs * outputs / case["groups"] * case["height"]
        work *= case["width"] * case["kernel"][0] * case["kernel"][1]
        if min(sizes) > 0 and work <= MOST_WORK[device.type]:
            cases.append(case)
    return cases


def integers(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """-2 ... 2: sums of products are exact in float32."""
    return torch.randint(-2, 3, shape, device=device).to(dtype)


def masked(weight: Tensor, groups: int, gemm: str) -> Tensor:
    return weight * RULE.weight_mask(weight, gemm, groups)


def operands(case: dict, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Geometry]:
    groups = case["groups"]
    inputs, outputs = case["inputs"] * groups, case["outputs"] * groups
    geometry = Geometry(case["stride"], case["padding"], case["dilation"], groups)
    x = integers((case["samples"], inputs, case["height"], case["width"]), case["dtype"], device)
    weight = integers((outputs, inputs // groups, *case["kernel"]), torch.float32, device)
    bias = integers((outputs,), case["dtype"], device)
    output = F.conv2d(x[:1].float(), weight, None, *geometry)
    grad_output = integers((case["samples"], *output.shape[1:]), case["dtype"], device)
    return x, weight, bias, grad_output, geometry


def embedded(x: Tensor) -> Tensor:
    """The same values, in channels_last, with NaN before and after them in memory."""
    around = torch.full((x.numel() + 2 * 4096,), torch.nan, dtype=x.dtype, device=x.device)
    inner = around[4096:-4096].view(x.shape[0], *x.shape[2:], x.shape[1]).permute(0, 3, 1, 2)
    return inner.copy_(x)


def close(actual: Tensor, expected: Tensor) -> bool:
    """Equal, as far as the result is exact in its dtype; infinite where that overflows."""
    return torch.equal(actual, expected.to(actual.dtype))


def test_integers_are_exact(engine):
    """The matrix of sizes: bit for bit the dense convolution with masked weights."""
    torch.manual_seed(0)
    for case in some_cases(engine):
        x, weight, bias, grad_output, geometry = operands(case, engine)
        groups, kernel = case["groups"], case["kernel"]
        (packed,) = sparse24.pack([weight], [groups], case["dtype"])
        expected = F.conv2d(
            x.double(), masked(weight, groups, "output").double(), bias.double(), *geometry
        )
        transposed = masked(weight, groups, "grad_input").double()
        expected_gradient = input_gradient(grad_output.double(), transposed, geometry, x.shape)
        y = sparse24.convolve(embedded(x), packed[:2], bias, grad_output.shape, kernel, geometry)
        assert close(y, expected), case
        gradient = sparse24.input_gradient(
            embedded(grad_output), packed[2:], x.shape, kernel, geometry
        )
        assert close(gradient, expected_gradient), case


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_error_is_at_most_twice_that_of_the_dense_convolution(dtype, engine):
    torch.manual_seed(0)
    for case in some_cases(engine)[:8]:
        case = {**case, "dtype": dtype}
        *_, grad_output, geometry = operands(case, engine)
        groups, kernel = case["groups"], case["kernel"]
        x = torch.randn(
            case["samples"], case["inputs"] * groups, case["height"], case["width"], device=engine
        ).to(dtype)
        weight = torch.randn(case["outputs"] * groups, case["inputs"], *kernel, device=engine)
        grad_output = torch.randn(grad_output.shape, device=engine).to(dtype)
        (packed,) = sparse24.pack([weight], [groups], dtype)
        kept = masked(weight, groups, "output").to(dtype)
        transposed = masked(weight, groups, "grad_input").to(dtype)
        exact = F.conv2d(x.double(), kept.double(), None, *geometry)
        exact_gradient = input_gradient(
            grad_output.double(), transposed.double(), geometry, x.shape
        )
        y = sparse24.convolve(x, packed[:2], None, grad_output.shape, kernel, geometry)
        gradient = sparse24.input_gradient(grad_output, packed[2:], x.shape, kernel, geometry)
        for actual, same, exactly in (
            (y, F.conv2d(x, kept, None, *geometry), exact),
            (gradient, input_gradient(grad_output, transposed, geometry, x.shape), exact_gradient),
        ):
            scale = exactly.abs().max() * torch.finfo(dtype).eps
            error = (actual.double() - exactly).abs().max()
            assert error <= 2 * (same.double() - exactly).abs().max() + 1e-3 * scale, case


def test_every_weight_meets_its_own_channel(engine):
    """A 1x1 convolution of one-hot images reads the weight out: all rows and k of a block."""
    codes = torch.randperm(64 * 32, generator=torch.Generator().manual_seed(0)) + 1
    weight = torch.zeros(64, 16, 4)
    pairs = list(itertools.combinations(range(4), 2))
    for i, (row, group) in enumerate(itertools.product(range(64), range(16))):
        weight[row, group, list(pairs[(i * 7 + row) % 6])] = codes[2 * i : 2 * i + 2].float()
    weight = weight.view(64, 64, 1, 1).to(engine)
    images = torch.eye(64, device=engine).half().view(64, 64, 1, 1)
    (packed,) = sparse24.pack([weight], [1], torch.float16)
    geometry = Geometry((1, 1), (0, 0), (1, 1), 1)
    y = sparse24.convolve(images, packed[:2], None, (64, 64, 1, 1), (1, 1), geometry)
    assert torch.equal(y[:, :, 0, 0].T, weight[:, :, 0, 0].half())


def test_repeats_are_identical(engine):
    """In emulation, also in whatever order the threads run."""
    torch.manual_seed(0)
    x = torch.randn(2, 72, 9, 9, device=engine).bfloat16()
    weight = torch.randn(136, 72, 3, 3, device=engine)
    geometry = Geometry((2, 2), (1, 1), (1, 1), 1)
    size = (2, 136, 5, 5)
    packed = [sparse24.pack([weight], [1], torch.bfloat16)[0] for _ in range(3)]
    assert all(torch.equal(a, b) for p in packed for a, b in zip(p, packed[0], strict=True))
    results = {
        sparse24.convolve(x, packed[0][:2], None, size, (3, 3), geometry)
        .view(torch.int16)
        .cpu()
        .numpy()
        .tobytes()
        for _ in range(1000 if engine.type == "cuda" else 20)
    }
    assert len(results) == 1


@pytest.mark.gpu
def test_in_a_cuda_graph_and_on_another_stream():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    torch.manual_seed(0)
    x = torch.randn(3, 64, 14, 14, device="cuda").bfloat16()
    weight = torch.randn(128, 64, 3, 3, device="cuda")
    geometry = Geometry((1, 1), (1, 1), (1, 1), 1)

    def compute() -> tuple[Tensor, Tensor]:
        (packed,) = sparse24.pack([weight], [1], torch.bfloat16)
        y = sparse24.convolve(x, packed[:2], None, (3, 128, 14, 14), (3, 3), geometry)
        return y, sparse24.input_gradient(y, packed[2:], x.shape, (3, 3), geometry)

    expected = compute()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside = compute()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compute()
    graph.replay()
    torch.cuda.synchronize()
    for a, b, c in zip(expected, beside, captured, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    if not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("no GPU with 24 GiB of free memory")
    x = torch.zeros(200, 256, 208, 208, device="cuda", dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last)
    x[-1] = integers(x[-1].shape, x.dtype, x.device)
    weight = integers((8, 256, 1, 1), torch.float32, x.device)
    geometry = Geometry((1, 1), (0, 0), (1, 1), 1)
    (packed,) = sparse24.pack([weight], [1], x.dtype)
    y = sparse24.convolve(x, packed[:2], None, (200, 8, 208, 208), (1, 1), geometry)
    expected = F.conv2d(x[-1:].float(), masked(weight, 1, "output"))
    assert close(y[-1:], expected) and not y[:-1].any()


def test_empty_batches(engine):
    geometry = Geometry((1, 1), (1, 1), (1, 1), 1)
    (packed,) = sparse24.pack([torch.randn(8, 8, 3, 3, device=engine)], [1], torch.float16)
    x = torch.zeros(0, 8, 5, 5, device=engine, dtype=torch.float16)
    assert sparse24.convolve(x, packed[:2], None, x.shape, (3, 3), geometry).shape == x.shape


def a_shape(**changes) -> plan.Shape:
    shape = plan.Shape(2, 64, 64, (8, 8), (8, 8), (3, 3), (1, 1), (1, 1), (1, 1), 1)
    return shape._replace(**changes)


def test_what_cannot_be_computed_is_said():
    assert plan.unsupported(a_shape()) == ""
    for changes, reason in (
        ({"in_channels": 12}, "12 input channels"),
        ({"out_channels": 100}, "100 output channels"),
        ({"groups": 16}, "4 input channels of a group"),
        ({"kernel": (9, 9)}, "81|taps"),
        ({"stride": (5, 5)}, "stride"),
        ({"input": (9000, 8)}, "8191"),
        ({"samples": 2**25}, r"2\*\*31"),
    ):
        assert plan.unsupported(a_shape(**changes)), reason
        with pytest.raises(ValueError, match=reason):
            plan.numbers(a_shape(**changes), transposed=False)


def test_every_tap_of_grad_input_is_read_once_where_no_dilation_interferes():
    for stride in ((1, 1), (2, 2), (1, 2), (3, 3)):
        lattices = plan.grad_input_lattices(a_shape(stride=stride, kernel=(5, 3)))
        taps = sorted(tap.packed for lattice in lattices for tap in lattice.taps)
        assert taps == list(range(15))
        assert sum(lattice.rows * lattice.columns for lattice in lattices) == 64


def test_operands_that_do_not_fit_are_refused_by_name(engine):
    """A bias of another dtype would be read as 16-bit numbers."""
    case = dict.fromkeys(("inputs", "outputs", "samples", "groups"), 8) | {"groups": 1}
    case |= dict(height=4, width=4, kernel=(3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1))
    x, weight, bias, _, geometry = operands({**case, "dtype": torch.bfloat16}, engine)
    (packed,) = sparse24.pack([weight], [1], torch.bfloat16)
    shape = (8, 8, 4, 4), (3, 3), geometry

    def refused(packed=packed[:2], bias=bias):
        return sparse24.convolve(x, packed, bias, *shape)

    assert refused().shape == (8, 8, 4, 4)
    wrong = {
        "bias has .*float32": {"bias": bias.float()},
        r"bias has shape \(7,\)": {"bias": bias[:7]},
        "bias with strides": {"bias": bias.repeat(2)[::2]},
        "metadata has .*int64": {"packed": (packed[0], packed[1].long())},
        "metadata has shape": {"packed": (packed[0], packed[1].flatten())},
        "values has .*float16": {"packed": (packed[0].half(), packed[1])},
    }
    for message, operand in wrong.items():
        with pytest.raises(ValueError, match=message):
            refused(**operand)


def test_a_gpu_with_too_little_shared_memory_leaves_no_error(engine):
    if engine.type != "cpu":
        pytest.skip("the limit is that of the emulation")
    library, x = emulation.library(), torch.ones(1, 8, 4, 4, dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last)
    (packed,) = sparse24.pack([torch.randn(8, 8, 1, 1)], [1], torch.bfloat16)
    call = (x, packed[:2], None, (1, 8, 4, 4), (1, 1), Geometry((1, 1), (0, 0), (1, 1), 1))
    library.limit_shared(library.sizes(3) - 1)
    try:
        with pytest.raises(RuntimeError, match=r"\(1\)"):
            sparse24.convolve(*call)
        assert library.unread_error() == 0
    finally:
        library.limit_shared(2**31 - 1)
    assert sparse24.convolve(*call).isfinite().all()


def test_the_measuring_script_runs(engine, tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.gpu import sparse24 as script

    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 8, 1))
    monkeypatch.setattr(script, "a_model", lambda name: (model, 8))
    monkeypatch.setattr(script, "LEAST_CHANNELS", 16)
    out = tmp_path / "sparse24.json"
    arguments = f"--batch 2 --repeats 1 --models small --least-channels 8 --out {out}"
    script.main([*arguments.split(), "--device", engine.type])
    result = json.loads(out.read_text())
    assert {r["layer"] for r in result["rows"]} == {"16->16 3x3 s1 6x6", "16->8 1x1 s1 4x4"}
    contestants = {(r["gemm"], r["contestant"]) for r in result["rows"]}
    assert contestants >= set(itertools.product(GEMMS[:2], (script.CUDNN, sparse24.BACKEND)))
    assert result["packing"][0]["weights"] == 2
    assert "go" in capsys.readouterr().out
