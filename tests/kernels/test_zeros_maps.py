"""The C++ kernels that leave out zeros of the maps, against the slow float64 reference."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fst import Strategy
from fst.ops import cpp
from fst.ops.backends import zeros_maps
from fst.ops.zeros import nonzeros
from tests.cases import without_onednn
from tests.kernels.values import with_threads
from tests.oracle.conv import reference_conv2d

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = (torch.contiguous_format, torch.channels_last)
PLAIN = ((1, 1), (1, 1), (1, 1))  # stride, padding, dilation
OPERANDS = ("input", "grad_output")

pytestmark = pytest.mark.skipif(bool(cpp.missing()), reason=f"the C++ kernels: {cpp.missing()}")

pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


def maps(shape: tuple[int, ...], zeros: float, dtype: torch.dtype, memory) -> Tensor:
    """Numbers around 0.5, a share of them zero."""
    values = (torch.randn(shape) + 0.5).masked_fill(torch.rand(shape) < zeros, 0)
    return values.to(dtype).contiguous(memory_format=memory)


def operands(
    samples: int,
    inside: int,
    out: int,
    size: tuple[int, int],
    kernel: tuple[int, int],
    geometry: tuple,
    groups: int = 1,
    dtype: torch.dtype = torch.float32,
    memory=(torch.channels_last,) * 3,
    zeros: float = 0.5,
) -> dict:
    """Of a convolution with an output map; ``inside`` and ``out`` are channels of a group."""
    stride, padding, dilation = geometry
    span = [dilation[i] * (kernel[i] - 1) + 1 for i in range(2)]
    size = tuple(max(size[i], span[i] - 2 * padding[i]) for i in range(2))
    rows, columns = ((size[i] + 2 * padding[i] - span[i]) // stride[i] + 1 for i in range(2))
    return {
        "input": maps((samples, inside * groups, *size), zeros, dtype, memory[0]),
        "grad_output": maps((samples, out * groups, rows, columns), zeros, dtype, memory[1]),
        "weight": torch.randn(out * groups, inside, *kernel)
        .to(dtype)
        .contiguous(memory_format=memory[2]),
        "geometry": geometry,
        "groups": groups,
    }


@st.composite
def convolutions(draw) -> dict:
    """Operands in any dtype and memory format."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    padding = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    dilation = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    return operands(
        samples=draw(st.sampled_from([1, 2, 3])),
        inside=draw(st.sampled_from([4, 5, 8, 13, 32, 37])),
        out=draw(st.sampled_from([4, 7, 16, 33, 65, 72])),
        size=draw(st.tuples(st.integers(1, 13), st.integers(1, 13))),
        kernel=draw(st.sampled_from([(1, 1), (2, 2), (3, 3), (1, 3), (5, 2), (7, 7)])),
        geometry=(draw(pairs), padding, dilation),
        groups=draw(st.sampled_from([1, 1, 2, 3])),
        dtype=draw(st.sampled_from(DTYPES)),
        memory=[draw(st.sampled_from(FORMATS)) for _ in range(3)],
        zeros=draw(st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0])),
    )


def narrow(c: dict) -> bool:
    return c["input"].shape[-1] < c["geometry"][0][1]


def torchs(c: dict, mask: list[bool]) -> Tensor:
    """Torch's own gradient in the dtype of the operands."""
    with without_onednn(narrow(c)):
        found = torch.ops.aten.convolution_backward(
            *(c["grad_output"], c["input"], c["weight"], None, *c["geometry"], False, [0, 0]),
            *(c["groups"], mask),
        )
    return found[mask.index(True)]


def exact(c: dict, bias: Tensor | None = None):
    """The slow float64 reference of a dense convolution."""
    stride, padding, dilation = c["geometry"]
    return reference_conv2d(
        *(c["input"], c["weight"], c["grad_output"]),
        bias=bias,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=c["groups"],
        strategy=Strategy("dense"),
    )


def grad_weight(c: dict, zeros_of: str, index=None, weight=None, mean=None, sums=None, last=True):
    return zeros_maps.maps_grad_weight(
        *(c["grad_output"], c["input"], index, weight, mean, sums, c["weight"].shape),
        *(*c["geometry"], c["groups"], last, zeros_of),
    )


def assert_close(found: Tensor, wanted: Tensor, same: Tensor) -> None:
    """Error at most twice that of torch's result, and one rounding of the largest number."""
    assert found.shape == wanted.shape and found.dtype == same.dtype
    allowed = 2 * (same.double() - wanted).norm() + torch.finfo(same.dtype).eps * wanted.norm()
    assert (found.double() - wanted).norm() <= allowed


def assert_products(c: dict, threads: int = 1) -> None:
    """All three products, the weight gradient by both operands."""
    bias = torch.randn(len(c["weight"])).to(c["weight"].dtype)
    wanted = exact(c, bias)
    arguments = (c["input"], c["weight"], bias, *c["geometry"], c["groups"])
    found = with_threads(threads, zeros_maps.maps_output, *arguments)
    with without_onednn(narrow(c)):
        same = torch.nn.functional.conv2d(*arguments)
    assert_close(found, wanted.output, same)
    size = c["input"].shape
    arguments = (c["grad_output"], c["weight"], size, *c["geometry"], c["groups"])
    found = with_threads(threads, zeros_maps.maps_grad_input, *arguments)
    assert_close(found, wanted.grad_input, torchs(c, [True, False, False]))
    for zeros_of in OPERANDS:
        for last in (True, False):
            found = with_threads(threads, grad_weight, c, zeros_of, None, None, None, None, last)
            assert found.is_contiguous(memory_format=FORMATS[last])
            assert_close(found, wanted.grad_weight, torchs(c, [False, True, False]))


@pytest.mark.each_isa
@given(convolutions(), st.sampled_from([1, 2, 5]))
def test_products(c, threads):
    assert_products(c, threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("samples", [1, 3, 8, 9, 17])
def test_batches(samples, dtype):
    assert_products(operands(samples, 35, 70, (9, 7), (3, 3), PLAIN, dtype=dtype), 2)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("memory", FORMATS)
def test_strips_of_wide_and_high_maps(memory, stride):
    """More positions than a strip has, rows longer than a chunk, and several blocks of channels."""
    geometry = ((stride, stride), (1, 1), (1, 1))
    for size in ((3, 530), (200, 5)):
        assert_products(operands(2, 72, 65, size, (3, 3), geometry, memory=[memory] * 3), 2)


@pytest.mark.parametrize("channels", [(4, 200), (200, 4), (130, 130)])
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (1, 31)])
def test_blocks_of_channels(kernel, channels):
    assert_products(operands(1, *channels, (7, 33), kernel, PLAIN), 5)


@pytest.mark.each_isa
@given(convolutions(), st.booleans(), st.sampled_from(OPERANDS), st.sampled_from([1, 2, 5]))
def test_lists(c, centred, zeros_of, threads):
    samples, _, rows, columns = c["grad_output"].shape
    chosen = torch.rand(samples * rows * columns) < 0.5
    index = chosen.nonzero().flatten().repeat_interleave(2)[::2].int()
    index = torch.cat([index, index[:1]]).sort().values  # one twice
    scale = torch.rand(len(index)) + 0.5
    mean = c["input"].float().mean((0, 2, 3)) if centred else None
    sums = torch.randn(len(c["weight"]), *c["weight"].shape[2:]) if centred else None
    found = with_threads(threads, grad_weight, c, zeros_of, index, scale, mean, sums)
    factors = torch.zeros(len(chosen), dtype=torch.float64)
    factors.index_add_(0, index.long(), scale.double())
    factors = factors.view(samples, 1, rows, columns)
    less = mean.view(1, -1, 1, 1) if centred else 0
    wide = {"grad_output": c["grad_output"].double() * factors, "input": c["input"].double() - less}
    wanted = exact({**c, **wide}).grad_weight
    narrow = {"grad_output": c["grad_output"] * factors, "input": c["input"] - less}
    narrow = {name: x.to(c["weight"].dtype) for name, x in narrow.items()}
    same = torchs({**c, **narrow}, [False, True, False])
    if centred:
        groups = c["groups"]
        means = mean.view(groups, -1).repeat_interleave(len(c["weight"]) // groups, 0)
        share = torch.einsum("oc,ohw->ochw", means.double(), sums.double())
        wanted, same = wanted + share, (same + share).to(same.dtype)
    assert_close(found, wanted, same)


@pytest.mark.parametrize("zeros_of", OPERANDS)
def test_a_list_of_all_positions_is_the_whole_product(zeros_of):
    c = operands(3, 8, 16, (7, 6), (3, 3), ((2, 1), (1, 1), (1, 1)))
    positions = c["grad_output"].numel() // 16
    index = torch.arange(positions, dtype=torch.int32)
    torch.testing.assert_close(grad_weight(c, zeros_of, index), grad_weight(c, zeros_of))


def test_only_zeros_give_zeros():
    c = operands(2, 8, 8, (6, 6), (3, 3), PLAIN, zeros=1.0)
    bias, size = torch.randn(8), c["input"].shape
    output = zeros_maps.maps_output(c["input"], c["weight"], bias, *PLAIN, 1)
    assert torch.equal(output, bias.view(1, -1, 1, 1).expand_as(output))
    assert not zeros_maps.maps_grad_input(c["grad_output"], c["weight"], size, *PLAIN, 1).any()
    assert not any(grad_weight(c, zeros_of).any() for zeros_of in OPERANDS)


@pytest.mark.each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("changed", ["input", "grad_output", "weight"])
def test_what_is_not_finite_comes_out_where_nonzeros_multiply_it(changed, value, dtype):
    """There alone: neither where a zero multiplies it nor beside the image."""
    c = operands(2, 8, 8, (5, 5), (3, 3), PLAIN, dtype=dtype)
    c[changed][1, 3, 0, 0] = value
    size = c["input"].shape
    found = {
        "input": zeros_maps.maps_output(c["input"], c["weight"], None, *PLAIN, 1),
        "grad_output": zeros_maps.maps_grad_input(c["grad_output"], c["weight"], size, *PLAIN, 1),
    }
    gradients = {zeros_of: grad_weight(c, zeros_of) for zeros_of in OPERANDS}
    for zeros_of in OPERANDS:
        counted = {name: torch.ones_like(c[name]).float() for name in (*OPERANDS, "weight")}
        counted[zeros_of] = (c[zeros_of] != 0).float()
        counted[changed] = (~c[changed].isfinite()).float()
        d = {**c, **counted}
        if changed in (zeros_of, "weight"):
            products = {
                "input": torch.nn.functional.conv2d(d["input"], d["weight"], None, *PLAIN),
                "grad_output": torchs(d, [True, False, False]),
            }
            assert torch.equal(~found[zeros_of].isfinite(), products[zeros_of] > 0.5)
        if changed != "weight":
            wanted = torchs(d, [False, True, False]) > 0.5
            assert torch.equal(~gradients[zeros_of].isfinite(), wanted)


def test_a_zero_leaves_out_what_it_would_multiply():
    """0 · ∞ adds nothing, and -0.0 is a zero."""
    c = operands(1, 4, 4, (4, 4), (3, 3), PLAIN, zeros=0.0)
    c["input"][0, 2], c["weight"][:, 2] = -0.0, float("inf")
    assert zeros_maps.maps_output(c["input"], c["weight"], None, *PLAIN, 1).isfinite().all()
    c["input"][0, 2, 1, 1], c["grad_output"][0, :, 0, 0] = float("nan"), 0.0
    found = grad_weight(c, "grad_output")
    assert found[:, [0, 1, 3]].isfinite().all()
    assert found[:, 2].isnan().sum() == 4 * 8  # but for the tap that dY's zeros multiply


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormal_numbers_are_multiplied(dtype):
    c = operands(1, 4, 4, (4, 4), (1, 1), ((1, 1), (0, 0), (1, 1)), dtype=dtype)
    tiny = torch.finfo(dtype).smallest_normal / 4
    c["input"].fill_(tiny)
    c["weight"].fill_(1024.0)
    output = zeros_maps.maps_output(c["input"], c["weight"], None, *c["geometry"], 1)
    torch.testing.assert_close(output, exact(c).output.to(dtype))
    assert output.all() and nonzeros(c["input"], 1).tolist() == [64, 64]


@pytest.mark.each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("memory", FORMATS)
def test_count_of_nonzeros(memory, dtype):
    values = maps((3, 37, 20, 21), 0.4, dtype, memory)
    values[0, 0, 0, :4] = torch.tensor([float("nan"), -0.0, float("inf"), 0.0])
    assert nonzeros(values, 1).tolist() == [int((values != 0).sum()), values.numel()]
    flat = values.permute(0, 2, 3, 1) if memory == torch.channels_last else values
    blocks = flat.flatten().split(4096)[::3]
    wanted = [sum(int((block != 0).sum()) for block in blocks), sum(map(len, blocks))]
    assert nonzeros(values, 3).tolist() == wanted
    assert nonzeros(values[:0], 3).tolist() == [0, 0]


def test_empty_batches_and_lists():
    c = operands(2, 4, 4, (4, 4), (3, 3), PLAIN)
    none = {**c, "input": c["input"][:0], "grad_output": c["grad_output"][:0]}
    arguments = (none["input"], c["weight"], None, *PLAIN, 1)
    assert zeros_maps.maps_output(*arguments).shape == (0, 4, 4, 4)
    mean, sums = torch.randn(4), torch.randn(4, 3, 3)
    index, scale = torch.empty(0, dtype=torch.int32), torch.empty(0)
    share = torch.einsum("c,ohw->ochw", mean, sums)
    for zeros_of in OPERANDS:
        assert not grad_weight(none, zeros_of).any()
        torch.testing.assert_close(grad_weight(c, zeros_of, index, scale, mean, sums), share)


def test_calls_from_several_threads():
    c = operands(4, 40, 72, (14, 14), (3, 3), PLAIN)
    size, results = c["input"].shape, []

    def run() -> None:
        for _ in range(5):
            results.append(
                (
                    zeros_maps.maps_output(c["input"], c["weight"], None, *PLAIN, 1),
                    zeros_maps.maps_grad_input(c["grad_output"], c["weight"], size, *PLAIN, 1),
                    *(grad_weight(c, zeros_of) for zeros_of in OPERANDS),
                )
            )

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 20
    for found in results:
        for one, other in zip(found, results[0], strict=True):
            assert torch.equal(one, other)


def test_wrong_arguments_are_named():
    c = operands(2, 3, 4, (5, 5), (3, 3), PLAIN)
    index, scale = torch.tensor([3, 7], dtype=torch.int32), torch.ones(2)
    changes = (
        ({"index": torch.tensor([7, 3], dtype=torch.int32)}, "index must be ascending"),
        ({"index": torch.tensor([7, 50], dtype=torch.int32)}, "positions of the output map"),
        ({"index": torch.tensor([-1, 5], dtype=torch.int32)}, "positions of the output map"),
        ({"index": torch.tensor([3, 7])}, r"index torch.int64"),
        ({"weight": torch.ones(3)}, r"weight torch.float32 \(3,\)"),
        ({"mean": torch.ones(4)}, r"mean torch.float32 \(4,\)"),
        ({"sums": torch.ones(4, 3)}, r"sums torch.float32 \(4, 3\)"),
        ({"index": None}, "index must be given"),
        ({"zeros_of": "weight"}, "zeros_of='weight'"),
    )
    for changed, reason in changes:
        given = {"zeros_of": "input", "index": index, "weight": scale} | changed
        with pytest.raises(ValueError, match=reason):
            grad_weight(c, **given)
    for changed, reason in (
        ({"grad_output": torch.ones(2, 4, 5, 6)}, "grad_output .* must have the shape"),
        ({"input": torch.ones(2, 6, 5, 5)}, "takes 3 channels"),
        ({"input": c["input"].half()}, "input has dtype torch.float16"),
        ({"grad_output": c["grad_output"][..., ::2]}, "contiguous or channels_last"),
        ({"geometry": ((1,), (1, 1), (1, 1))}, r"stride=\(1,\) must be two numbers"),
        ({"geometry": ((1, 1), (1, 1), ())}, r"dilation=\(\) must be two numbers"),
        ({"geometry": ((0, 1), (1, 1), (1, 1))}, r"stride=\(0, 1\) must be two numbers from 1"),
        ({"geometry": ((1, 1), (1, 1), (9, 1))}, "is larger than an input"),
        ({"groups": 3}, "groups=3 must divide 4 channels"),
    ):
        with pytest.raises((TypeError, ValueError), match=reason):
            grad_weight({**c, **changed}, "input")
    with pytest.raises(ValueError, match=r"bias torch.float32 \(5,\)"):
        zeros_maps.maps_output(c["input"], c["weight"], torch.ones(5), *PLAIN, 1)
    with pytest.raises(ValueError, match="2147483647"):
        zeros_maps.maps_grad_input(c["grad_output"], c["weight"], (2**27, 3, 5, 5), *PLAIN, 1)
    with pytest.raises(ValueError, match="every=0"):
        nonzeros(c["input"], 0)
    bad = ((2, 5, 5, 6, 5, 3, 3, 1, 1, 1, 1, 1, 1), 3, 4, 1)  # an output map of 6 rows
    pointers = (c["input"].data_ptr(), c["weight"].data_ptr(), None, 0, False)
    with pytest.raises(ValueError, match="describe no operands"):
        cpp.kernel("fst_maps_product")(*pointers, cpp.integers(*bad[0]), *bad[1:], None, None)


def test_reasons_of_refusal():
    x, weight = torch.ones(2, 8, 5, 5), torch.ones(8, 8, 3, 3)
    assert zeros_maps.refuses_maps((x, weight), weight.shape, 1) == ""
    shape = weight.shape
    for arguments, reason in (
        (((x, weight.half()), shape, 1), "operands of torch.float32 and torch.float16"),
        (((x.double(), weight.double()), shape, 1), "operands of torch.float64"),
        (((x[..., ::2], weight), shape, 1), "neither contiguous nor channels_last"),
        (((x.to("meta"), weight), shape, 1), "no plain tensor"),
        (((x, weight), (8, 1, 3, 3), 8), "groups of fewer than 4 channels"),
        (((x, weight), (8, 8, 32, 1), 1), "more than 31 taps"),
    ):
        assert reason in zeros_maps.refuses_maps(*arguments)
