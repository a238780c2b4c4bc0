"""S(W), S(Wᵀ), masks and SR-STE's term of many weights at once, bit for bit as fst.ops does it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fst import NM, Strategy
from fst.backends import sources
from fst.ops.prune import apply_mask, prune_weight
from tests.kernels.values import awkward, bits

Pattern = tuple[int, int] | None
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


def _strategy(output: Pattern, grad_input: Pattern) -> Strategy:
    return Strategy(
        "test",
        output=NM("weight", *output) if output else None,
        grad_input=NM("weight", *grad_input) if grad_input else None,
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
        expected = prune_weight(job.weight.cpu(), _strategy(output, grad_input), job.groups, dtype)
        if output:
            assert torch.equal(bits(job.output), bits(expected.output))
            assert torch.equal(job.mask.cpu(), expected.mask)
        if grad_input:
            assert torch.equal(bits(job.grad_input), bits(expected.grad_input))


@pytest.mark.parametrize("pattern", [(2, 4), (2, 8)])
def test_decay_is_added_to_the_gradients(pattern, device):
    kernels, jobs = _jobs(pattern, None, torch.float32, device)
    gradients = [torch.randn_like(job.weight) for job in jobs]
    expected = [_decayed(job.weight, g, pattern) for job, g in zip(jobs, gradients, strict=True)]
    jobs = [
        kernels.Job(job.weight, job.groups, gradient=gradient)
        for job, gradient in zip(jobs, gradients, strict=True)
    ]
    kernels.prune(jobs, pattern, None, decay=2e-4)
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(
            gradient.cpu(), wanted.float(), rtol=1e-6, atol=1e-7, equal_nan=True
        )


def _decayed(weight: Tensor, gradient: Tensor, pattern: tuple[int, int]) -> Tensor:
    weight = weight.cpu()
    mask = prune_weight(weight, _strategy(pattern, None), 1, torch.float32).mask
    return gradient.cpu().double() + 2e-4 * apply_mask(weight, ~mask).double()


def test_a_network_takes_two_launches(device):
    """Weights whose channels are contiguous in memory, and the others."""
    kernels, jobs = _jobs((2, 4), (2, 4), torch.bfloat16, device)
    assert len(kernels.launches(jobs, (2, 4), (2, 4))) == 2


def test_what_does_not_fit_is_named(device):
    kernels, jobs = _jobs((2, 4), None, torch.float32, device)
    job = jobs[0]
    with pytest.raises(ValueError, match="float64"):
        kernels.prune([job._replace(weight=job.weight.double())], (2, 4), None)
    with pytest.raises(ValueError, match="output has strides"):
        wrong = job.output.contiguous(memory_format=torch.channels_last)
        kernels.prune([job._replace(output=wrong)], (2, 4), None)
