"""Packed 2:4 weights: the reference by its properties, the packing kernel by the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fst.backends import sources
from fst.ops import sparse24
from fst.rules.nm import NM

from .values import awkward, bits

layout = sources.load("sparse24.layout")
SHAPES = (
    ((8, 8, 3, 3), 1),
    ((56, 24, 1, 1), 1),
    ((64, 64, 3, 3), 1),
    ((100, 40, 1, 7), 1),
    ((10, 7, 5, 5), 1),
    ((512, 72, 1, 1), 1),
    ((8, 2048, 1, 1), 1),
    ((128, 36, 3, 3), 2),
)
DTYPES = (torch.bfloat16, torch.float16)


def pruned(weight: Tensor, groups: int, transposed: bool) -> Tensor:
    mask = NM("weight", 2, 4).weight_mask(weight, "grad_input" if transposed else "output", groups)
    return weight.where(mask, torch.zeros(()))


@pytest.mark.parametrize("transposed", [False, True], ids=["output", "grad_input"])
@pytest.mark.parametrize("shape, groups", SHAPES, ids=str)
def test_unpacked_is_the_pruned_weight(shape, groups, transposed):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for dtype in DTYPES:
        packed = layout.pack(weight, groups, dtype, transposed=transposed)
        expected = layout.packed_shapes(weight.shape, groups, transposed=transposed)
        assert (packed.values.shape, packed.metadata.shape) == expected
        unpacked = layout.unpack(packed, weight.shape, transposed=transposed)
        assert torch.equal(unpacked, pruned(weight, groups, transposed).to(dtype))


@pytest.mark.parametrize("shape, groups", SHAPES[:6], ids=str)
def test_metadata_is_legal_for_every_input(shape, groups):
    torch.manual_seed(0)
    inputs = [torch.zeros(shape), -torch.zeros(shape), torch.full(shape, torch.nan)]
    inputs += [torch.ones(shape), awkward(shape, torch.float32, "contiguous")]
    for weight in inputs:
        for transposed in (False, True):
            packed = layout.pack(weight, groups, torch.bfloat16, transposed=transposed)
            words = packed.metadata.flatten()[:, None] >> torch.arange(0, 32, 4) & 15
            assert set(words.unique().tolist()) <= set(layout.LEGAL)


def test_ties_zeros_and_values_that_are_not_finite():
    nan, inf = torch.nan, torch.inf
    for group, kept in (
        ([0.0, -0.0, 0.0, -0.0], [0, 1]),
        ([1.0, -1.0, 1.0, -1.0], [0, 1]),
        ([-0.0, 0.0, 0.0, 2.0], [0, 3]),
        ([1.0, 2.0, nan, 3.0], [2, 3]),
        ([inf, nan, -inf, 9.0], [0, 1]),
        ([1.0, -inf, 2.0, nan], [1, 3]),
        # equal once rounded to bfloat16, but not as stored
        ([1.0, 1.0 + 2**-12, 0.5, 1.0], [0, 1]),
        ([1.0 - 2**-12, 1.0 - 2**-12, 1.0, 1.0], [2, 3]),
    ):
        weight = torch.tensor(group).view(1, 4, 1, 1)
        packed = layout.pack(weight, 1, torch.bfloat16)
        assert int(packed.metadata.flatten()[0]) & 15 == kept[0] | kept[1] << 2
        values = packed.values.flatten()[:2]
        assert torch.equal(bits(values), bits(weight.flatten()[kept].bfloat16()))


def test_every_register_of_every_lane_is_where_the_instruction_reads():
    """Each of the six patterns everywhere, then at random, with distinct values."""
    generator = torch.Generator().manual_seed(0)
    patterns = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    for pattern in [*patterns, None]:
        weight = torch.zeros(64, 64, 1, 1)
        groups = weight.view(64, 16, 4)
        value = 1
        for row in range(64):
            for group in range(16):
                drawn = int(torch.randint(6, (), generator=generator))
                for place in patterns[drawn] if pattern is None else pattern:
                    groups[row, group, place] = value
                    value += 1
        packed = layout.pack(weight, 1, torch.float16)
        assert torch.equal(layout.unpack(packed, weight.shape), weight.half())


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 70),
    depth=st.integers(1, 70),
    kernel=st.sampled_from([(1, 1), (2, 1), (1, 3)]),
    groups=st.integers(1, 3),
    transposed=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape_with_ties_everywhere(rows, depth, kernel, groups, transposed, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-2, 3, (rows * groups, depth, *kernel), generator=generator).float()
    packed = layout.pack(weight, groups, torch.float16, transposed=transposed)
    unpacked = layout.unpack(packed, weight.shape, transposed=transposed)
    assert torch.equal(unpacked, pruned(weight, groups, transposed).half())


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="float64"):
        layout.pack(torch.zeros(8, 8, 1, 1), 1, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_packs_a_network_like_the_reference(dtype, engine):
    """Both directions of all weights in one launch, whatever their format and values."""
    torch.manual_seed(0)
    cases = [(torch.randn(shape), groups) for shape, groups in SHAPES]
    formats = ("contiguous", "channels_last")
    cases += [(awkward((12, 24, 3, 3), torch.float32, memory), 1) for memory in formats]
    cases += [(torch.randn(64, 16, 3, 3).to(d), 2) for d in (torch.float16, torch.bfloat16)]
    cases += [(torch.randn(8, 8, 1, 1), 1)] * 40  # more than one launch takes
    weights, groups = [w.to(engine) for w, _ in cases], [g for _, g in cases]
    for weight, group, packed in zip(
        weights, groups, sparse24.pack(weights, groups, dtype), strict=True
    ):
        for transposed in (False, True):
            values, metadata = packed[2:] if transposed else packed[:2]
            expected = layout.pack(weight.cpu(), group, dtype, transposed=transposed)
            assert torch.equal(metadata.cpu(), expected.metadata)
            assert torch.equal(bits(values), bits(expected.values))
