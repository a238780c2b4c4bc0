"""The products of a convolution as programs: torch's, this library's by zeros, and SparseProp's.

A program's name is its product, and behind a comma what is special about it: "Y" is torch's, "Y, W
2:4" is ours without the zeros of W.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fst.backends.timing import Function
from fst.ops.backends.zeros_maps import maps_grad_input, maps_grad_weight
from fst.ops.backends.zeros_weight import zeros_grad_input, zeros_output
from fst.ops.geometry import Geometry, convolve, gradients
from fst.rules.masks import nm_mask

LAST = torch.channels_last
BOTH = "dX and dW"
AGAIN = "none: torch again, the control"
NEEDED = {"dX": (True, False, False), "dW": (False, True, False), BOTH: (True, True, False)}
UNSTRUCTURED = {"W 50 %": 0.5, "W 75 %": 0.75, "W 87.5 %": 0.875}  # shares of zeros
NEAR = {"rtol": 1e-3, "atol": 0.1}  # of sums of up to 1e5 products of normal numbers


class Layer(NamedTuple):
    """A convolution of square maps, padded by half of its kernel."""

    inside: int
    out: int
    size: int
    kernel: int
    stride: int

    def __str__(self) -> str:
        kind = f"{self.kernel}x{self.kernel}" + (f"/{self.stride}" if self.stride > 1 else "")
        return f"{self.inside}->{self.out} {self.size}x{self.size} {kind}"


class Row(NamedTuple):
    """A product without the zeros of an operand.

    Attributes:
        zeros: the operand, and which of its numbers are zero.
    """

    product: str
    zeros: str

    def __str__(self) -> str:
        return f"{self.product}, {self.zeros}"

    @property
    def theirs(self) -> str:
        """The program of SparseProp with the same operands."""
        return f"{self.product}, SparseProp, {self.zeros}"


class Group(NamedTuple):
    """Layers whose ratios have one geometric mean.

    Attributes:
        rows: of its table.
        rivalry: rows that are measured beside SparseProp.
    """

    title: str
    layers: tuple[Layer, ...]
    rows: tuple[Row, ...]
    rivalry: tuple[Row, ...] = ()

    @property
    def products(self) -> list[str]:
        """In the order of the rows."""
        return list(dict.fromkeys(row.product for row in self.rows))

    @property
    def programs(self) -> set[str]:
        """Names of all that is measured, SparseProp included."""
        rows = (*self.rows, *self.rivalry)
        dense = {row.product for row in rows}
        controls = {f"{product}, {AGAIN}" for product in dense}
        return dense | controls | {row.theirs for row in self.rivalry} | set(map(str, rows))


WEIGHTS = ("W dense", "W 2:4", "W 1:4")
THREE = Group(
    "3×3 of ResNet-18",
    (
        Layer(64, 64, 56, 3, 1),
        Layer(64, 128, 56, 3, 2),
        Layer(128, 128, 28, 3, 1),
        Layer(128, 256, 28, 3, 2),
        Layer(256, 256, 14, 3, 1),
        Layer(256, 512, 14, 3, 2),
        Layer(512, 512, 7, 3, 1),
    ),
    (
        *(Row(p, zeros) for p in ("Y", "dX") for zeros in (*WEIGHTS, "W 1:8")),
        *(Row("dX", zeros) for zeros in ("dY dense", "dY 2:4", "dY 4:32")),
        *(Row("dW", zeros) for zeros in ("X dense", "X half")),
    ),
    tuple(Row(p, zeros) for p in ("Y", BOTH) for zeros in UNSTRUCTURED),
)
ONE = Group(
    "1×1 of ResNet-50's last three stages",
    (
        Layer(512, 128, 28, 1, 1),
        Layer(128, 512, 28, 1, 1),
        Layer(1024, 256, 14, 1, 1),
        Layer(256, 1024, 14, 1, 1),
        Layer(2048, 512, 7, 1, 1),
        Layer(512, 2048, 7, 1, 1),
    ),
    tuple(Row("Y", zeros) for zeros in WEIGHTS),
)


class SparseProp:
    """The code of Nikdan et al. (ICML 2023), as `pip install --target FOLDER` has built it.

    Raises:
        ImportError: it is not in the folder, or does not run there.
    """

    def __init__(self, folder: Path) -> None:
        sys.path.insert(0, str(folder))
        from sparseprop.modules import sparsify_conv2d_auto

        self._convert = sparsify_conv2d_auto
        found = {d.name: d.version for d in importlib.metadata.distributions(path=[str(folder)])}
        self.version = found.get("sparseprop", "of unknown version")

    def programs(
        self, x: Tensor, weight: Tensor, dy: Tensor, geometry: Geometry
    ) -> dict[str, Function]:
        """Y, and dX with dW at the weights that are not zero, by the faster of its two kernels, as
        it chooses.

        Raises:
            AssertionError: it computes something else than torch.
        """
        x, weight, dy = (tensor.contiguous() for tensor in (x, weight, dy))
        conv = nn.Conv2d(
            *(weight.shape[1], weight.shape[0], weight.shape[2]),
            *(geometry.stride, geometry.padding),
            bias=False,
        )
        conv.weight.data = weight
        layer = self._convert(conv, x.shape)
        given = x.clone().requires_grad_()
        output = layer(given)

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(output, (given, layer.weight), dy, retain_graph=True)

        grad_input, grad_weight, _ = gradients(dy, x, weight, geometry, NEEDED[BOTH])(dy, x, weight)
        expected = (
            convolve(x, weight, geometry)(x, weight, None),
            grad_input,
            grad_weight[weight != 0],
        )
        torch.testing.assert_close((output, *backward()), expected, **NEAR)
        return {"Y": torch.no_grad()(lambda: layer(x)), BOTH: backward}


def programs(layer: Layer, batch: int, sparseprop: SparseProp | None) -> dict[str, Function]:
    """All programs of a layer, by name. Those of one product take the same operands.

    X is half zero. The weights of N:M are S(W), groups along the input channels.
    """
    inside, out, size, kernel, stride = layer
    geometry = Geometry((stride,) * 2, (kernel // 2,) * 2, (1, 1), 1)
    dense_x = _normal(batch, inside, size, size)
    x, weight = _without(dense_x, 0.5), _normal(out, inside, kernel, kernel)
    multiply = convolve(x, weight, geometry)
    dy = _normal(*multiply(x, weight, None).shape)
    found: dict[str, Function] = {"Y": lambda: multiply(x, weight, None)}
    for product, needed in NEEDED.items():
        grads = gradients(dy, x, weight, geometry, needed)
        found[product] = functools.partial(grads, dy, x, weight)
    found |= {f"{product}, {AGAIN}": program for product, program in found.items()}

    operands = {
        "W dense": weight,
        **{f"W {n}:{m}": weight * nm_mask(weight, n, m, 1) for n, m in ((2, 4), (1, 4), (1, 8))},
        **{zeros: _without(weight, share) for zeros, share in UNSTRUCTURED.items()},
        "dY dense": dy,
        **{f"dY {n}:{m}": dy * nm_mask(dy, n, m, 1) for n, m in ((2, 4), (4, 32))},
        "X dense": dense_x,
        "X half": x,
    }

    def grad_weight(x: Tensor) -> Tensor:
        no_list = (None, None, None, None)
        rest = (weight.shape, *geometry, True, "input")
        return maps_grad_weight(dy, x, *no_list, *rest)

    kernels = {
        ("Y", "W"): lambda w: zeros_output(x, w, None, None, None, *geometry),
        ("dX", "W"): lambda w: zeros_grad_input(dy, w, x.shape, *geometry),
        ("dX", "dY"): lambda dy: maps_grad_input(dy, weight, x.shape, *geometry),
        ("dW", "X"): grad_weight,
        (BOTH, "W"): lambda w: (
            zeros_grad_input(dy, w, x.shape, *geometry),
            grad_weight(x),
        ),
    }
    for (product, operand), kernel_of in kernels.items():
        for zeros, values in operands.items():
            if zeros.startswith(f"{operand} "):
                values = values.contiguous(memory_format=LAST)
                found[f"{product}, {zeros}"] = functools.partial(kernel_of, values)
    for zeros in UNSTRUCTURED if sparseprop else ():
        theirs = sparseprop.programs(x, operands[zeros], dy, geometry)
        found |= {f"{product}, SparseProp, {zeros}": program for product, program in theirs.items()}
    return found


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape).contiguous(memory_format=LAST)


def _without(values: Tensor, share: float) -> Tensor:
    """The values, of which a share, drawn at random, is zero."""
    zeros = torch.rand(values.shape) < share
    return values.masked_fill(zeros, 0).contiguous(memory_format=LAST)
