"""Pair and block sums of grad_output against the operators in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from fst.backends import sources
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
def test_sums_like_the_operators(rule, phase, memory, device):
    for size, dtype in itertools.product(SIZES, (torch.float32, torch.bfloat16)):
        grad_output = torch.randn(2, 6, *size).to(dtype)
        if memory == "channels_last":
            grad_output = grad_output.contiguous(memory_format=torch.channels_last)
        elif memory == "sliced":
            grad_output = torch.randn(2, 8, size[0], size[1] + 2).to(dtype)[:, 1:-1, :, 1:-1]
        kept = rule.kept_positions(*size, phase)
        step = 0 if size == (1, 1) else phase
        exact = rule.summed(grad_output.double(), kept, step)
        same = rule.summed(grad_output, kept, step)
        flattened = [number for lattice in kept for number in lattice[:4]]
        summed = ops.sum_grad_output(grad_output.to(device), rule.block, flattened)
        for mine, theirs, wanted in zip(summed, same, exact, strict=True):
            assert mine.shape == wanted.shape
            allowed = 2 * (theirs.double() - wanted).abs().max() + 1e-6 * (dtype == torch.float32)
            assert (mine.cpu().double() - wanted).abs().max() <= allowed
            if memory == "channels_last":
                assert mine.is_contiguous(memory_format=torch.channels_last)


def test_other_dtypes_are_refused(device):
    with pytest.raises(TypeError, match="grad_output must have one dtype of .*got .*float64"):
        ops.sum_grad_output(torch.zeros(1, 4, 2, 2, device=device).double(), (1, 2), (0, 1, 0, 2))


def test_offsets_of_2_to_the_31_values_do_not_wrap(device):
    """The launch for a gradient of 4 GiB in bfloat16, run on the first of its tiles."""
    pair_sums = sources.load("pair_sums")
    large = torch.empty(128, 64, 512, 512, dtype=torch.bfloat16, device="meta")
    launch = pair_sums.sum_launch(large, large[..., ::2].contiguous(), (1, 2), (0, 1, 0, 2))
    values = 2 * launch.constants["BLOCK"]
    grad_output, out = torch.ones(values, device=device), torch.zeros(values // 2, device=device)
    arguments = (grad_output, out, *launch.arguments[2:])
    launch._replace(grid=(1,), arguments=arguments).run()
    assert torch.equal(out.cpu(), torch.full((values // 2,), 2.0))


def test_more_samples_than_a_grid_has_places_across(device):
    pair_sums = sources.load("pair_sums")
    many = torch.empty(70_000, 8, 2, 3, device="meta")
    launch = pair_sums.sum_launch(many, many[..., :2].contiguous(), (1, 2), (0, 1, 0, 2))
    assert len(launch.grid) == 2 and launch.grid[0] >= 70_000 and launch.grid[1] <= 65_535


def test_a_sample_beyond_32_bits_is_copied_or_refused(device):
    within = sources.load("launch").within_32_bits
    last = torch.empty(1, 2, 32_768, 32_768, device="meta").to(memory_format=torch.channels_last)
    assert within(last) is last
    image = torch.empty(2, 32_768, 8, 32_768, device="meta").permute(0, 3, 2, 1)
    wide = image[:, ::16]
    assert within(wide).is_contiguous()
    with pytest.raises(ValueError, match=r"shape \(2, 32768, 8, 32768\)"):
        within(image)
