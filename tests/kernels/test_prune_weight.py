"""S(W), S(Wᵀ) and masks of many weights at once, bit for bit as fst.ops does it."""

from __future__ import annotations

import pytest
import torch

from fst import backends
from fst.backends import sources
from fst.backends.choice import compute
from fst.ops.backends import prune_triton as ops
from fst.ops.operands import PruneWeight
from tests.kernels.values import Pattern, awkward, bits, of_patterns

# shape, groups, memory format: channels divisible by four or not, taps or not, groups, short ones
NETWORK = (
    ((8, 16, 3, 3), 1, "contiguous"),
    ((8, 16, 3, 3), 1, "channels_last"),
    ((6, 3, 3, 3), 1, "channels_last"),
    ((12, 8, 1, 1), 2, "contiguous"),
    ((10, 10, 3, 1), 2, "channels_last"),
)
PATTERNS = (
    ((2, 4), (2, 4)),
    ((1, 4), (3, 4)),
    ((1, 2), (1, 2)),
    ((2, 4), None),
    (None, (2, 4)),
    ((3, 5), (2, 8)),
)


def _jobs(output: Pattern, grad_input: Pattern, dtype: torch.dtype, device: torch.device):
    kernels = sources.load("prune_weight")
    jobs = []
    for shape, groups, memory in NETWORK:
        weight = awkward(shape, torch.float32, memory).to(device)
        poison = torch.full_like(weight, 7, dtype=dtype)
        jobs.append(
            kernels.Job(
                weight,
                groups,
                poison if output else None,
                poison.clone() if grad_input else None,
                torch.empty_like(weight, dtype=torch.bool) if output else None,
            )
        )
    return kernels, jobs


@pytest.mark.parametrize(("output", "grad_input"), PATTERNS)
def test_bits_equal_the_operators(output, grad_input, device):
    dtype = torch.float16 if output == (1, 4) else torch.bfloat16
    kernels, jobs = _jobs(output, grad_input, dtype, device)
    kernels.prune(jobs, output, grad_input)
    for job in jobs:
        strategy = of_patterns(output, grad_input)
        expected = compute(PruneWeight(job.weight.cpu(), strategy, job.groups, dtype))
        if output:
            assert torch.equal(bits(job.output), bits(expected.output))
            assert torch.equal(job.mask.cpu(), expected.mask)
        if grad_input:
            assert torch.equal(bits(job.grad_input), bits(expected.grad_input))


def test_a_plan_prunes_other_weights_of_its_kind(device):
    """Those too that lie elsewhere than at multiples of 16 bytes."""
    kernels, jobs = _jobs((2, 4), (2, 4), torch.bfloat16, device)
    for job in jobs:
        run = kernels.planned(job, (2, 4), (2, 4))
        room = job.weight.new_empty(job.weight.numel() + 1)
        moved = room[1:].as_strided(job.weight.shape, job.weight.stride())
        for weight in (job.weight.neg().roll(1, 0), moved.copy_(job.weight.roll(1, 1))):
            run(job._replace(weight=weight))
            strategy = of_patterns((2, 4), (2, 4))
            expected = compute(PruneWeight(weight.cpu(), strategy, job.groups, torch.bfloat16))
            assert torch.equal(bits(job.output), bits(expected.output))
            assert torch.equal(bits(job.grad_input), bits(expected.grad_input))
            assert torch.equal(job.mask.cpu(), expected.mask)


def test_a_network_takes_two_launches(device):
    """Weights whose channels are contiguous in memory, and the others."""
    kernels, jobs = _jobs((2, 4), (2, 4), torch.bfloat16, device)
    assert len(kernels.launches(jobs, (2, 4), (2, 4))) == 2


def test_tables_of_a_weight_are_made_once(device):
    """They serve every weight of its kind, wherever that and its results lie."""
    kernels, jobs = _jobs((2, 4), None, torch.bfloat16, device)
    _, others = _jobs((2, 4), None, torch.bfloat16, device)
    for job, other in zip(jobs, others, strict=True):
        (made,) = kernels.launches([job], (2, 4), None)
        (again,) = kernels.launches([other], (2, 4), None)
        assert made.arguments[0] is job.weight and again.arguments[0] is other.weight
        assert all(a is b for a, b in zip(made.arguments[-2:], again.arguments[-2:], strict=True))


def test_what_does_not_fit_is_named(device):
    weight = torch.randn(8, 8, 3, 3, device=device)
    patterns = (2, 4, 0, 1)
    for wrong, reason in (
        (weight.double(), "float64"),
        (weight.transpose(2, 3), r"strides \(72, 9, 1, 3\)"),
    ):
        with pytest.raises(ValueError, match=reason):
            ops.prune_weight(wrong, 1, patterns, torch.bfloat16)
    with pytest.raises(ValueError, match=r"\[2, 4, 2, 16\]: m must be at most 8"):
        ops.prune_weight(weight, 1, (2, 4, 2, 16), torch.bfloat16)
    strategy = of_patterns((2, 16), None)
    operands = PruneWeight(weight, strategy, 1, torch.float32)
    reason = backends.backend("prune_weight", "triton").refuses(operands)
    assert reason == "it knows N:M by magnitude alone, M up to 8"
    with pytest.raises(ValueError, match="into torch.float64"):
        ops.prune_weight(weight, 1, patterns, torch.float64)
