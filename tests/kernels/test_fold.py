"""Pair and block sums of grad_output against the operators in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from fst.ops import triton as ops
from fst.rules.alternating import Alternating

RULES = (
    (Alternating(), 0),
    (Alternating(phase=1), 1),
    (Alternating(block=(2, 2)), 0),
    (Alternating(pairing="flat"), 0),
    (Alternating(pairing="flat", phase=1), 1),
)
SIZES = ((4, 6), (3, 5), (1, 1), (3, 1), (1, 3), (5, 4))


@pytest.mark.parametrize("memory", ["contiguous", "channels_last", "sliced"])
@pytest.mark.parametrize(("rule", "phase"), RULES, ids=lambda value: str(value))
def test_folds_like_the_operators(rule, phase, memory, device):
    for size, dtype in itertools.product(SIZES, (torch.float32, torch.bfloat16)):
        grad_output = torch.randn(2, 6, *size).to(dtype)
        if memory == "channels_last":
            grad_output = grad_output.contiguous(memory_format=torch.channels_last)
        elif memory == "sliced":
            grad_output = torch.randn(2, 8, size[0], size[1] + 2).to(dtype)[:, 1:-1, :, 1:-1]
        kept = rule.kept_positions(*size, phase)
        step = 0 if size == (1, 1) else phase
        exact = rule.fold(grad_output.double(), kept, step)
        same = rule.fold(grad_output, kept, step)
        flattened = [number for lattice in kept for number in lattice]
        folded = ops.fold_grad_output(grad_output.to(device), rule.block, flattened)
        for mine, theirs, wanted in zip(folded, same, exact, strict=True):
            assert mine.shape == wanted.shape
            allowed = 2 * (theirs.double() - wanted).abs().max() + 1e-6 * (dtype == torch.float32)
            assert (mine.cpu().double() - wanted).abs().max() <= allowed
            if memory == "channels_last":
                assert mine.is_contiguous(memory_format=torch.channels_last)


def test_other_dtypes_are_refused(device):
    with pytest.raises(TypeError, match="grad_output must have one dtype of .*got .*float64"):
        ops.fold_grad_output(torch.zeros(1, 4, 2, 2, device=device).double(), (1, 2), (0, 1, 0, 2))
