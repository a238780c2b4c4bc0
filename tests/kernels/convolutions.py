"""Random convolutions for the C++ kernels, with the reference's results and torch's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from fst import Strategy
from fst.ops.geometry import Geometry
from tests.cases import without_onednn
from tests.oracle.conv import ReferenceResult, reference_conv2d
from tests.oracle.geometry import output_size

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = (torch.contiguous_format, torch.channels_last)
PLAIN = Geometry((1, 1), (1, 1), (1, 1), 1)
KERNELS = ((1, 1), (1, 1), (3, 3), (3, 3), (2, 2), (1, 3), (5, 2), (7, 7))
THREADS = st.sampled_from([1, 2, 5])

_pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))
_steps = st.one_of(st.just((1, 1)), _pairs)


@st.composite
def shapes(draw, kernels: Sequence[tuple[int, int]] = KERNELS) -> tuple:
    """Size of an image and of a kernel, and a geometry that gives them an output map."""
    kernel, stride, dilation = draw(st.sampled_from(kernels)), draw(_steps), draw(_steps)
    padding = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    span = [dilation[i] * (kernel[i] - 1) + 1 for i in range(2)]
    size = draw(st.tuples(st.integers(1, 15), st.integers(1, 31)))
    size = tuple(max(size[i], span[i] - 2 * padding[i]) for i in range(2))
    return size, kernel, Geometry(stride, padding, dilation, 1)


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
    geometry: Geometry = PLAIN,
    dtype: torch.dtype = torch.float32,
    memory=(torch.channels_last,) * 3,
    zeros: float = 0.5,
    kept: float = 1.0,
) -> dict:
    """Of a convolution; ``inside`` and ``out``: channels of a group, ``kept``: of the weight."""
    groups, shape = geometry.groups, output_size(size, kernel, *geometry[:3])
    weight = torch.randn(out * groups, inside, *kernel)
    weight *= torch.rand_like(weight) < kept
    return {
        "input": maps((samples, inside * groups, *size), zeros, dtype, memory[0]),
        "grad_output": maps((samples, out * groups, *shape), zeros, dtype, memory[1]),
        "weight": weight.to(dtype).contiguous(memory_format=memory[2]),
        "geometry": geometry,
    }


@st.composite
def convolutions(draw, least: int = 1, samples: Sequence[int] = (1, 2, 3)) -> dict:
    """Operands in any dtype and memory format, groups of ``least`` channels or more."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    size, kernel, geometry = draw(shapes())
    return operands(
        draw(st.sampled_from(samples)),
        draw(st.integers(least, 37)),
        draw(st.integers(least, 72)),
        size,
        kernel,
        geometry._replace(groups=draw(st.sampled_from([1, 1, 2, 3]))),
        dtype=draw(st.sampled_from(DTYPES)),
        memory=[draw(st.sampled_from(FORMATS)) for _ in range(3)],
        zeros=draw(st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0])),
        kept=draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
    )


def exact(c: dict, bias: Tensor | None = None) -> ReferenceResult:
    """The slow float64 reference of a dense convolution."""
    stride, padding, dilation, groups = c["geometry"]
    return reference_conv2d(
        *(c["input"], c["weight"], c["grad_output"]),
        bias=bias,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        strategy=Strategy("dense"),
    )


def torchs(c: dict, bias: Tensor | None = None) -> ReferenceResult:
    """Torch's own results in the dtype of the operands."""
    (input, weight), (*geometry, groups) = (c["input"], c["weight"]), c["geometry"]
    with without_onednn(input.shape[-1] < c["geometry"].stride[1]):
        output = torch.nn.functional.conv2d(input, weight, bias, *geometry, groups)
        gradients = torch.ops.aten.convolution_backward(
            *(c["grad_output"], input, weight, None, *geometry, False, [0, 0], groups),
            [True, True, False],
        )
    return ReferenceResult(output, *gradients)


def of_list(
    c: dict, index: Tensor, scale: Tensor, mean: Tensor | None = None, sums: Tensor | None = None
) -> tuple[ReferenceResult, ReferenceResult]:
    """`exact` and `torchs` of the listed positions alone, and of an input from which ``mean`` is
    taken; grad_weight gets its share again by ``sums``.
    """
    samples, _, rows, columns = c["grad_output"].shape
    factors = torch.zeros(samples * rows * columns, dtype=torch.float64)
    factors.index_add_(0, index.long(), scale.double())
    less = 0 if mean is None else mean.view(1, -1, 1, 1)
    wide = {
        "grad_output": c["grad_output"].double() * factors.view(samples, 1, rows, columns),
        "input": c["input"].double() - less,
    }
    weight, groups = c["weight"], c["geometry"].groups
    wanted = exact({**c, **wide})
    same = torchs({**c, **{name: x.to(weight.dtype) for name, x in wide.items()}})
    if mean is None:
        return wanted, same
    means = mean.view(groups, -1).repeat_interleave(len(weight) // groups, 0)
    share = torch.einsum("oc,ohw->ochw", means.double(), sums.double())
    theirs = (same.grad_weight + share).to(weight.dtype)
    return (
        wanted._replace(grad_weight=wanted.grad_weight + share),
        same._replace(grad_weight=theirs),
    )


def assert_as_exact(found: Tensor, wanted: Tensor, same: Tensor) -> None:
    """Error at most twice that of torch's result, and one rounding of the largest number."""
    assert found.shape == wanted.shape and found.dtype == same.dtype
    allowed = 2 * (same.double() - wanted).norm() + torch.finfo(same.dtype).eps * wanted.norm()
    assert (found.double() - wanted).norm() <= allowed
