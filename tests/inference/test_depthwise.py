"""The C++ kernel of depthwise convolutions and the 1x1 ones around them, against float64."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fst.ops import cpp
from fst.ops.backends import depthwise
from fst.ops.backends.depthwise import Layer, PreparedDepthwise, refuses_depthwise
from fst.ops.backends.zeros_weight import ACTIVATIONS
from fst.ops.geometry import LINEAR, Geometry
from tests.cases import without_onednn
from tests.kernels.convolutions import DTYPES, THREADS, shapes
from tests.kernels.values import with_threads
from tests.oracle.geometry import Windows, output_size

KERNELS = ((3, 3), (3, 3), (1, 1), (5, 5), (2, 3), (7, 1))
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "hardswish": F.hardswish,
}

pytestmark = pytest.mark.skipif(bool(cpp.missing()), reason=f"the C++ kernels: {cpp.missing()}")


def layer(*shape: int, dtype: torch.dtype = torch.float32, kept: float = 1.0) -> Layer:
    weight = torch.randn(shape) / (shape[1] * shape[2] * shape[3]) ** 0.5
    weight = (weight * (torch.rand(shape) < kept)).to(dtype)
    return Layer(weight, torch.randn(shape[0]), 0)


@st.composite
def chains(draw) -> dict:
    """A depthwise convolution with or without others around it, an input and a residual."""
    size, kernel, geometry = draw(shapes(KERNELS))
    channels, dtype = draw(st.integers(16, 40)), draw(st.sampled_from(DTYPES))
    around, kept = draw(st.tuples(st.booleans(), st.booleans())), draw(st.sampled_from([0, 0.3, 1]))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    inside = draw(st.integers(1, 40)) if around[0] else channels
    layers = [
        layer(channels, inside, 1, 1, dtype=dtype, kept=kept) if around[0] else None,
        layer(channels, 1, *kernel, dtype=dtype),
        layer(draw(st.integers(1, 40)), channels, 1, 1, dtype=dtype, kept=kept)
        if around[1]
        else None,
    ]
    for i, of in enumerate(layers):
        if of is not None:
            bias = of.bias if draw(st.booleans()) else None
            layers[i] = Layer(of.weight, bias, draw(st.integers(0, len(ACTIVATIONS) - 1)))
    samples = draw(st.sampled_from([1, 2, 5]))
    last = layers[2] or layers[1]
    shape = (samples, len(last.weight), *output_size(size, kernel, *geometry[:3]))
    with_residual = around[1] and draw(st.booleans())
    return {
        "input": maps(samples, inside, *size, dtype=dtype),
        "layers": layers,
        "geometry": geometry._replace(groups=channels),
        "residual": maps(*shape, dtype=dtype) if with_residual else None,
        "kept": draw(st.sampled_from([1, 4000, 20_000, depthwise.KEPT])),
        "threads": draw(THREADS),
    }


def maps(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).contiguous(memory_format=torch.channels_last)


def oracle(c: dict) -> tuple[Tensor, Tensor]:
    """In float64 by unfolded windows; and the last sums of absolute values."""
    before, middle, behind = c["layers"]
    stride, padding, dilation, groups = c["geometry"]
    x = c["input"].double()
    if before is not None:
        x = finished(pointwise(before.weight.double(), x), before)
    windows = Windows(x.shape[2:], middle.weight.shape[2:], stride, padding, dilation)
    columns = windows.im2col(x).unflatten(1, (groups, -1))
    taps = middle.weight.double().flatten(1)
    product, sizes = (
        torch.einsum("gi,ngip->ngp", w, x).unflatten(2, windows.output)
        for w, x in ((taps, columns), (taps.abs(), columns.abs()))
    )
    x = finished(product, middle)
    if behind is None:
        return x, sizes
    weight = behind.weight.double()
    return finished(pointwise(weight, x), behind, c["residual"]), pointwise(weight.abs(), x.abs())


def pointwise(weight: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("oi,nihw->nohw", weight.flatten(1), x)


def finished(product: Tensor, of: Layer, residual: Tensor | None = None) -> Tensor:
    if of.bias is not None:
        product = product + of.bias.double().view(-1, 1, 1)
    if residual is not None:
        product = product + residual.double()
    return FUNCTIONS[ACTIVATIONS[of.activation]](product)


def by_torch(c: dict) -> Tensor:
    """Layer by layer, each rounded to the dtype."""
    x = c["input"]
    for of, geometry in zip(c["layers"], (LINEAR, c["geometry"], LINEAR), strict=True):
        if of is None:
            continue
        with without_onednn(x.shape[-1] < geometry[0][1]):
            x = F.conv2d(x.float(), of.weight.float(), of.bias, *geometry)
        if of is c["layers"][2] and c["residual"] is not None:
            x = x + c["residual"].float()
        x = FUNCTIONS[ACTIVATIONS[of.activation]](x).to(c["input"].dtype)
    return x


def in_one_go(c: dict) -> Tensor:
    before, middle, behind = c["layers"]
    product = PreparedDepthwise(c["input"], middle, c["geometry"], before, behind)
    return product(c["input"], c["residual"])


@pytest.mark.each_isa
@given(chains())
def test_all_geometries(c):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(depthwise, "KEPT", c["kept"])
        found = with_threads(c["threads"], in_one_go, c)
    assert found.is_contiguous(memory_format=torch.channels_last)
    (exact, sizes), same = oracle(c), by_torch(c)
    assert found.shape == exact.shape and found.dtype == same.dtype
    allowed = 2 * (same.double() - exact).norm() + torch.finfo(found.dtype).eps * sizes.norm()
    assert (found.double() - exact).norm() <= allowed


def mobile(channels: int = 48, size: int = 20) -> dict:
    torch.manual_seed(0)
    layers = [layer(channels, 8, 1, 1, kept=0.5), layer(channels, 1, 3, 3)]
    return {
        "input": maps(3, 8, size, size),
        "layers": [*layers, layer(8, channels, 1, 1, kept=0.5)],
        "geometry": Geometry((1, 1), (1, 1), (1, 1), channels),
        "residual": maps(3, 8, size, size),
    }


def test_threads_change_nothing_and_rows_the_order_of_sums_at_most(monkeypatch):
    c = mobile()
    expected = in_one_go(c)
    for kept in (1, 10_000, 10**9):
        monkeypatch.setattr(depthwise, "KEPT", kept)
        found = with_threads(1, in_one_go, c)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        for threads in (2, 7):
            assert torch.equal(with_threads(threads, in_one_go, c), found)


def test_calls_from_many_threads():
    c = mobile()
    before, middle, behind = c["layers"]
    product = PreparedDepthwise(c["input"], middle, c["geometry"], before, behind)
    expected = product(c["input"], c["residual"])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: product(c["input"], c["residual"]), range(40)))
    assert all(torch.equal(x, expected) for x in found)


@pytest.mark.each_isa
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_reaches_what_it_is_multiplied_into(value):
    c = mobile()
    c["input"][1, 3, 5, 7] = value
    connected = (c["layers"][0].weight[:, 3] != 0).flatten()
    reached = (c["layers"][2].weight.flatten(1)[:, connected] != 0).any(1)
    found = in_one_go(c)
    assert not found[1, reached, 4:7, 6:9].isfinite().any()
    found[1, :, 4:7, 6:9] = 0
    assert found.isfinite().all()


def test_what_is_refused_and_why():
    x, geometry = maps(2, 16, 5, 5), Geometry((1, 1), (1, 1), (1, 1), 16)
    weight = torch.randn(16, 1, 3, 3)
    assert not refuses_depthwise(x, 16, weight, geometry)
    assert "channels_last" in refuses_depthwise(x.contiguous(), 16, weight, geometry)
    assert "empty" in refuses_depthwise(x[:0], 16, weight, geometry)
    assert "16 channels" in refuses_depthwise(x, 8, weight, geometry)
    assert "float64" in refuses_depthwise(x.double(), 16, weight.double(), geometry)
    assert "operands" in refuses_depthwise(x.bfloat16(), 16, weight, geometry)
    assert "belong" in refuses_depthwise(x, 16, torch.randn(16, 1, 9, 9), geometry)
    few = Geometry((1, 1), (1, 1), (1, 1), 8)
    assert refuses_depthwise(maps(2, 8, 5, 5), 8, torch.randn(8, 1, 3, 3), few)
    assert refuses_depthwise(x, 16, torch.randn(32, 1, 3, 3), geometry)


def test_layers_that_do_not_follow_each_other_are_named():
    c = mobile()
    before, middle, behind = c["layers"]
    given = (c["input"], middle, c["geometry"])
    with pytest.raises(
        ValueError, match=r"\(8, 40, 1, 1\) must be torch.float32 \(Cout, 48, 1, 1\)"
    ):
        PreparedDepthwise(*given, before, layer(8, 40, 1, 1))
    with pytest.raises(ValueError, match="torch.bfloat16"):
        PreparedDepthwise(*given, layer(48, 8, 1, 1, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="bias torch.float64"):
        PreparedDepthwise(*given, before, Layer(behind.weight, behind.bias.double(), 0))
    with pytest.raises(ValueError, match="takes"):
        PreparedDepthwise(c["input"], middle, c["geometry"])


def test_the_kernel_refuses_numbers_that_do_not_belong_together():
    """Whatever the functions in front of it let through."""
    c = mobile()
    before, middle, behind = c["layers"]
    product = PreparedDepthwise(c["input"], middle, c["geometry"], before, behind)
    result = torch.empty_strided(*product._form)
    good = (c["input"].data_ptr(), *product._fixed, None, result.data_ptr())
    cpp.kernel("fst_depthwise")(*good)
    for place, value in ((1, 9), (3, 16), (6, 99), (9, 8), (11, -1), (14, 8), (16, 9)):
        bad = [*good]
        bad[place] = value
        with pytest.raises(ValueError, match="fst_depthwise"):
            cpp.kernel("fst_depthwise")(*bad)
    numbers = list(product._fixed[1])
    for place, value in ((0, 0), (1, -1), (3, 7), (5, 99), (7, 0)):
        changed = [*numbers]
        changed[place] = value
        with pytest.raises(ValueError, match="fst_depthwise"):
            cpp.kernel("fst_depthwise")(*good[:2], cpp.integers(*changed), *good[3:])
