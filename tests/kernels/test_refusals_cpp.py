"""Numbers that the C++ kernels cannot index with: refused by the operators and by the kernels."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from torch import nn

import fst
from fst.ops import cpp
from fst.ops.backends.lists_cpp import list_grad_input, list_grad_weight
from fst.ops.backends.zeros_maps import maps_grad_input, maps_grad_weight, maps_output
from fst.ops.backends.zeros_weight import refuses_zeros, zeros_output
from fst.ops.geometry import Geometry, geometry_of
from fst.ops.positions.draw import draw_positions, measure_positions
from fst.rules.sampled import Sampled

pytestmark = pytest.mark.skipif(bool(cpp.missing()), reason=f"the C++ kernels: {cpp.missing()}")

GRADS, IMAGES, WEIGHT = torch.ones(2, 4, 5, 5), torch.ones(2, 3, 5, 5), torch.ones(4, 3, 3, 3)
INDEX, SCALE = torch.tensor([3, 7], dtype=torch.int32), torch.ones(2)
SHAPES = [2, 5, 5, 5, 5, 3, 3, 1, 1, 1, 1, 1, 1]  # of `Geometry` in kernels/conv_shape.h


class Beside(Sampled):
    """A rule of a user's own whose draws start behind the last place."""

    def draw_start(self, generator, seed, device):
        return torch.tensor(1.0, dtype=torch.float64)


@pytest.mark.parametrize("start", [1.0, math.nan, math.inf, 1e300, -1e300, -0.1])
def test_a_draw_starts_in_its_first_stretch(start):
    with pytest.raises(ValueError, match=r"start=.* must be in \[0, 1\)"):
        draw_positions(torch.rand(5000), 700, torch.tensor(start, dtype=torch.float64))


def test_a_rule_of_ones_own_that_starts_elsewhere_is_an_error():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1))
    fst.convert(model, fst.Strategy("test", grad_weight=Beside()))
    with pytest.raises(ValueError, match=r"start=1.0 must be in \[0, 1\)"):
        model(torch.randn(2, 4, 8, 8)).sum().backward()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"stride": (0, 1)}, r"stride=\(0, 1\) must be two numbers from 1"),
        ({"stride": (1, -1)}, r"stride=\(1, -1\) must be"),
        ({"stride": (1,)}, r"stride=\(1,\) must be two numbers"),
        ({"stride": (1, 2**31)}, "stride=.* to 2147483647"),
        ({"padding": (-1, 1)}, r"padding=\(-1, 1\) must be two numbers from 0"),
        ({"dilation": (1, 0)}, r"dilation=\(1, 0\) must be"),
        ({"dilation": (4, 4)}, "dilation=.* is larger than an input of"),
    ],
)
def test_the_numbers_of_a_convolution_are_checked(changed, message):
    geometry = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)} | changed
    numbers = tuple(geometry.values())
    listed = (INDEX, SCALE, None, None, None, WEIGHT.shape)
    for call in (
        lambda: measure_positions(GRADS, (5, 5), (3, 3), *numbers, True),
        lambda: list_grad_weight(GRADS, IMAGES, *listed, *numbers, 1, False),
        lambda: list_grad_input(GRADS, WEIGHT, INDEX, SCALE, IMAGES.shape, *numbers, 1),
        lambda: maps_grad_weight(
            GRADS, IMAGES, INDEX, SCALE, None, None, WEIGHT.shape, *numbers, 1, False, "input"
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def _list_grad_weight(index, scale, mean, sums, grads, images, groups, source=None):
    given = (grads, images, index, scale, source, mean, sums, WEIGHT.shape)
    return list_grad_weight(*given, (1, 1), (1, 1), (1, 1), groups, False)


def _maps_grad_weight(index, scale, mean, sums, grads, images, groups):
    given = (grads, images, index, scale, mean, sums, WEIGHT.shape)
    return maps_grad_weight(*given, (1, 1), (1, 1), (1, 1), groups, False, "input")


LISTED = dict(index=INDEX, scale=SCALE, mean=None, sums=None, grads=GRADS, images=IMAGES, groups=1)
BY_LISTS = (_list_grad_weight,)
BY_BOTH = (_list_grad_weight, _maps_grad_weight)


@pytest.mark.parametrize(
    ("changed", "reason", "products"),
    [
        ({"index": INDEX.flip(0)}, "index must be ascending", BY_BOTH),
        ({"index": INDEX + 43}, "positions of the output map", BY_BOTH),
        ({"index": INDEX - 4}, "positions of the output map", BY_BOTH),
        ({"index": INDEX.long()}, "index torch.int64", BY_BOTH),
        ({"scale": torch.ones(3)}, r"weight torch.float32 \(3,\)", BY_BOTH),
        ({"mean": torch.ones(4)}, r"mean torch.float32 \(4,\)", BY_BOTH),
        ({"sums": torch.ones(4, 3)}, r"sums torch.float32 \(4, 3\)", BY_BOTH),
        ({"grads": torch.ones(2, 4, 5, 6)}, "must have the shape", BY_BOTH),
        ({"images": torch.ones(2, 6, 5, 5)}, "takes 3 channels", BY_BOTH),
        ({"images": IMAGES.half()}, "input has dtype torch.float16", BY_BOTH),
        ({"grads": torch.ones(2, 4, 5, 10)[..., ::2]}, "contiguous or channels_last", BY_BOTH),
        ({"groups": 3}, "groups=3 must divide 4 channels", BY_BOTH),
        ({"source": INDEX * 7 + 1}, "source from 22 to 50", BY_LISTS),
        ({"source": INDEX, "grads": torch.ones(2, 5, 3, 3)}, "must have 4 channels", BY_LISTS),
    ],
)
def test_operands_and_lists_that_do_not_fit_are_named(changed, reason, products):
    for product in products:
        assert product(**LISTED).shape == WEIGHT.shape
        with pytest.raises((TypeError, ValueError), match=reason):
            product(**{**LISTED, **changed})


def test_shapes_are_checked():
    geometry = ((1, 1), (1, 1), (1, 1))
    with pytest.raises(ValueError, match=r"kernel_size=\(3,\) must be two numbers"):
        measure_positions(GRADS, (5, 5), (3,), *geometry, True)
    with pytest.raises(ValueError, match=r"input_size=\(5,\) must be two"):
        measure_positions(GRADS, (5,), (3, 3), *geometry, True)
    with pytest.raises(ValueError, match=r"must have the shape \(2, 4, 9, 9\)"):
        measure_positions(GRADS, (9, 9), (3, 3), *geometry, True)
    with pytest.raises(ValueError, match=r"input_size=\(2, 3, 5\) must be four sizes"):
        list_grad_input(GRADS, WEIGHT, INDEX, SCALE, (2, 3, 5), *geometry, 1)
    listed = (INDEX, SCALE, None, None, None)
    with pytest.raises(ValueError, match=r"weight_shape=\(4, 3, 3\) must be four sizes"):
        list_grad_weight(GRADS, IMAGES, *listed, (4, 3, 3), *geometry, 1, False)
    with pytest.raises(ValueError, match="index names 2 positions of an empty batch"):
        list_grad_weight(GRADS[:0], IMAGES[:0], *listed, WEIGHT.shape, *geometry, 1, False)
    with pytest.raises(ValueError, match="65536 images of 256x256 output positions"):
        cpp.convolution((2**16, 1, 256, 256), (1, 1, 1, 1), geometry_of([1, 1], [0, 0], [1, 1], 1))


# ---------------------------------------------------------------- the kernels themselves


def _pointer(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def _numbers(**changed: int) -> ctypes.Array:
    names = "images height width rows columns kernel_h kernel_w stride_h stride_w padding_h "
    names += "padding_w dilation_h dilation_w"
    given = dict(zip(names.split(), SHAPES, strict=True)) | changed
    return cpp.integers(*given.values())


SIZES = [
    {name: number}
    for name in ("images", "rows", "columns", "kernel_h", "stride_w", "dilation_h")
    for number in (-1, 0, 2**31)
] + [{"padding_h": -1}, {"height": -1}, {"rows": 6}, {"width": 2**31 - 1, "columns": 2**31 - 1}]


@pytest.mark.each_isa
@pytest.mark.parametrize("changed", SIZES, ids=str)
def test_kernels_refuse_sizes_that_are_no_convolution(changed):
    """Whatever the operators in front of them let through."""
    grads, images, weight, result = GRADS.clone(), IMAGES.clone(), WEIGHT.clone(), WEIGHT.clone()
    index, scale, scores = INDEX.clone(), SCALE.clone(), torch.empty(50)
    numbers, layouts = _numbers(**changed), cpp.integers(0, 0, 0)
    operands = (_pointer(grads), _pointer(images), 0, _pointer(index), _pointer(scale))
    for name, arguments in (
        ("fst_measure_positions", (_pointer(grads), 0, 4, 0, numbers, _pointer(scores), None)),
        (
            "fst_list_grad_weight",
            (*operands, None, 2, 25, 50, None, None, numbers, 3, 4, 1, layouts, _pointer(result)),
        ),
        (
            "fst_list_grad_input",
            (
                *(_pointer(grads), _pointer(weight), 0, _pointer(index), _pointer(scale), 2),
                *(numbers, 3, 4, 1, layouts, _pointer(images)),
            ),
        ),
    ):
        with pytest.raises(ValueError, match=name):
            cpp.kernel(name)(*arguments)


def test_kernels_refuse_positions_and_patterns_that_do_not_fit():
    x, y, mask = torch.randn(8, 4), torch.empty(8, 4), torch.empty(8, 4, dtype=torch.bool)
    index, weight, source = INDEX.clone(), SCALE.clone(), torch.tensor([0, 50], dtype=torch.int32)
    layouts = cpp.integers(0, 0, 0)
    grads, images, result = GRADS.clone(), IMAGES.clone(), WEIGHT.clone()
    starts = torch.tensor([1.0, math.nan, 0.5], dtype=torch.float64)
    outside = (_pointer(source), 2, 25, 50, None, None, _numbers(), 3, 4, 1, layouts)
    operands = (_pointer(grads), _pointer(images), 0, _pointer(index), _pointer(weight))
    drawn = (_pointer(index), _pointer(weight))
    maps, convolution = (_pointer(grads), _pointer(images)), (_numbers(), 3, 4, 1, layouts)
    counts = torch.zeros(2, dtype=torch.int64)
    bad = [
        ("fst_list_grad_weight", (*operands, *outside, _pointer(result))),
        *(
            ("fst_draw_positions", (_pointer(x), count, n, _pointer(start), *drawn))
            for count, n, start in ((32, 2, starts[0]), (32, 2, starts[1]), (32, 0, starts[2]))
        ),
        *(
            (
                "fst_prune_grad_output",
                (
                    *(_pointer(x), _pointer(y)),
                    *(cpp.integers(kind, 1, 8, 4, *(32, 4, 1) * 2, n, m, 0, 0, groups), 0),
                ),
            )
            for kind, n, m, groups in (
                *((3, 2, 4, 1), (0, 0, 4, 1), (0, 5, 4, 1), (0, 2, 33, 1), (0, 2, 4, 3)),
            )
        ),
        *(
            (
                "fst_prune_weight",
                (
                    *(_pointer(x), cpp.integers(kind, 0, 8, 4, 1, 1, 1, n, m, 0, 0)),
                    *(_pointer(y), _pointer(mask), 0),
                ),
            )
            for kind, n, m in ((1, 2, 4), (0, 5, 4), (0, -1, 4), (0, 2, 33))
        ),
        *(
            ("fst_maps_product", (*maps, None, kind, 0, *convolution, _pointer(result)))
            for kind in (-1, 3)
        ),
        *(
            (
                "fst_maps_grad_weight",
                (*maps, kind, 1, None, None, 0, None, None, *convolution, _pointer(result)),
            )
            for kind in (-1, 3)
        ),
        *(("fst_count_nonzeros", (_pointer(x), kind, 32, 1, _pointer(counts))) for kind in (-1, 3)),
    ]
    for name, arguments in bad:
        with pytest.raises(ValueError, match=name):
            cpp.kernel(name)(*arguments)


@pytest.mark.each_isa
@pytest.mark.parametrize("reach", [2**19, 2**29])
def test_windows_that_reach_far_are_refused_or_right(reach):
    """One pixel, of which the middle tap alone sees anything; `make sanitize` sees overflows."""
    input, weight = torch.randn(1, 8, 1, 1), torch.randn(8, 8, 3, 3)
    geometry = Geometry((1, 1), (reach, reach), (reach, reach), 1)
    assert "too large" in refuses_zeros(input, weight, geometry)
    assert "too large" in refuses_zeros(input, weight, geometry, input.shape)
    middle = weight[:, :, 1, 1]
    found = maps_output(input, weight, None, *geometry)
    torch.testing.assert_close(found[0, :, 0, 0], middle @ input[0, :, 0, 0])
    found = maps_grad_input(input, weight, input.shape, *geometry)
    torch.testing.assert_close(found[0, :, 0, 0], middle.T @ input[0, :, 0, 0])


def test_elements_behind_the_first_two_thousand_million_are_read():
    """Of memory that nothing has written, which takes none, a few pixels are read."""
    channels, side, geometry = 2**17, 129, Geometry((16, 16), (0, 0), (1, 1), 1)
    input = torch.empty(1, side, side, channels, dtype=torch.float16).permute(0, 3, 1, 2)
    weight = torch.zeros(4, channels, 1, 1, dtype=torch.float16)
    weight[1, ::4] = 2**-8
    input[:, ::4, -1, -1] = 2**-8
    assert input.numel() > 2**31
    assert zeros_output(input, weight, None, None, None, *geometry)[0, 1, -1, -1] == 0.5
    assert maps_output(input, weight, None, *geometry)[0, 1, -1, -1] == 0.5
