"""N:M pruning of grad_output along the channels, against fst.ops and against counting."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fst import NM
from fst.backends import force, sources
from fst.ops.backends import prune_triton as ops
from fst.ops.prune import prune_grad_output
from tests.kernels.values import FORMATS, awkward, bits, concentrated

SHAPES = (((2, 16, 3, 5), 1), ((1, 18, 2, 4), 2), ((2, 64, 1, 1), 1))
PATTERNS = ((2, 4), (1, 2), (3, 5), (4, 8), (2, 8))
LEFT_TO_TORCH = (
    (NM("grad_output", 8, 16), torch.bfloat16),
    (NM("grad_output", 2, 32, "random"), torch.bfloat16),
    (NM("grad_output", 2, 4, "magnitude_rescaled", "channel"), torch.bfloat16),
    (NM("grad_output", 2, 4), torch.float64),
)


def _prune(grad_output: Tensor, *arguments) -> Tensor:
    return sources.load("prune_gradient").prune(grad_output, *arguments)


@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize(("n", "m"), PATTERNS)
def test_magnitude_equals_the_operators_bit_for_bit(n, m, memory, device):
    dtypes = itertools.cycle([torch.bfloat16, torch.float16, torch.float32])
    for (shape, groups), dtype in zip(SHAPES, dtypes, strict=False):
        grad_output = awkward(shape, dtype, memory).to(device)
        pruned = _prune(grad_output, n, m, "magnitude", "", groups)
        rule = NM("grad_output", n, m)
        expected = prune_grad_output(grad_output.cpu(), rule, "grad_input", groups, None)
        assert torch.equal(bits(pruned), bits(expected))
        assert pruned.stride() == torch.empty_like(grad_output).stride()


@pytest.mark.parametrize("rescale", ["sample_channel", "group"])
@pytest.mark.parametrize("memory", FORMATS)
def test_rescaled_is_as_exact_as_the_operators(memory, rescale, device):
    """At most twice their error, both against float64."""
    for (n, m), dtype in (((2, 4), torch.bfloat16), ((3, 5), torch.float32)):
        grad_output = torch.randn(2, 10, 3, 5).to(dtype)
        if memory == "channels_last":
            grad_output = grad_output.contiguous(memory_format=torch.channels_last)
        elif memory == "sliced":
            grad_output = grad_output[:, :, :, 1:-1]
        rule = NM("grad_output", n, m, "magnitude_rescaled", rescale)
        exact = prune_grad_output(grad_output.double(), rule, "grad_input", 2, None)
        same = prune_grad_output(grad_output, rule, "grad_input", 2, None)
        pruned = _prune(grad_output.to(device), n, m, "magnitude_rescaled", rescale, 2).cpu()
        allowed = 2 * (same.double() - exact).abs().max() + 1e-6
        assert (pruned.double() - exact).abs().max() <= allowed
        again = _prune(grad_output.to(device), n, m, "magnitude_rescaled", rescale, 2).cpu()
        assert torch.equal(bits(pruned), bits(again))


def test_slices_that_span_more_than_32_bits_keep_their_samples(device):
    """The gradient of torch.cat in channels_last: few elements, far apart."""
    launch = sources.load("launch")
    whole = torch.empty((256, 1024, 112, 112), device="meta").to(memory_format=torch.channels_last)
    part = launch.layout_of(whole[:, :512])
    assert part.samples * part.channels * part.positions < 2**31
    assert launch.collapse(part, part) == (part, part)
    dense = launch.layout_of(whole[:64, :512].contiguous(memory_format=torch.channels_last))
    assert launch.collapse(dense)[0].samples == 1


def test_many_partial_sums_are_added_in_parallel(device):
    """One sample of many tiles: its chunks are as many as keep a GPU busy."""
    grad_output = torch.randn(1, 8, 192, 256)
    launch, sums = sources.load("prune_gradient").sums_launch(grad_output, 2, 4, 1)
    assert sums.shape[1] > 32
    rule = NM("grad_output", 2, 4, "magnitude_rescaled")
    exact = prune_grad_output(grad_output.double(), rule, "grad_input", 1, None)
    pruned = _prune(grad_output.to(device), 2, 4, "magnitude_rescaled", "sample_channel", 1)
    assert (pruned.cpu().double() - exact).abs().max() <= 1e-5


def test_rescaling_where_nothing_is_kept(device):
    zeros = torch.zeros(1, 8, 2, 2, device=device)
    for rescale in ("sample_channel", "group"):
        assert torch.equal(_prune(zeros, 2, 4, "magnitude_rescaled", rescale), zeros)


@pytest.mark.parametrize("memory", FORMATS[:2])
def test_rescaling_by_more_than_float16_holds(memory, device):
    grad_output = concentrated(memory)
    rule = NM("grad_output", 2, 4, "magnitude_rescaled")
    exact = prune_grad_output(grad_output.double(), rule, "grad_input", 1, None)
    pruned = _prune(grad_output.to(device), 2, 4, "magnitude_rescaled", "sample_channel", 1)
    torch.testing.assert_close(pruned.cpu().double(), exact, rtol=1e-3, atol=0)


@pytest.mark.parametrize(("n", "m"), [(2, 4), (3, 5), (1, 8)])
def test_random_subsets_are_equally_likely(n, m, device):
    """Chi-square over all subsets; the bound is passed by chance once in a million."""
    seed = torch.tensor([2026], device=device)
    ones = torch.ones(2, 4 * m, 40, 25, device=device)
    kept = _prune(ones, n, m, "random", "", 1, seed).cpu() != 0
    groups = kept.unflatten(1, (-1, m)).movedim(2, -1).flatten(0, -2)
    assert (groups.sum(1) == n).all()
    codes = (groups * 2 ** torch.arange(m)).sum(1)
    counts = codes.bincount(minlength=2**m)
    counts = counts[counts > 0].double()
    assert len(counts) == math.comb(m, n)
    expected = len(groups) / len(counts)
    degrees = len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    # Wilson and Hilferty's approximation of the quantile 1 - 1e-6
    bound = degrees * (1 - 2 / (9 * degrees) + 4.753 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < bound


def test_random_depends_on_the_seed_and_the_place_alone(device):
    grad_output = torch.randn(2, 24, 3, 4, device=device)
    seeds = [torch.tensor([s], device=device) for s in (1, 2, 2**40 + 1)]
    first, second, third = (_prune(grad_output, 2, 4, "random", "", 1, s) for s in seeds)
    assert torch.equal(first, _prune(grad_output, 2, 4, "random", "", 1, seeds[0]))
    assert not torch.equal(first, second)
    assert not torch.equal(first, third)
    other = grad_output.contiguous(memory_format=torch.channels_last)
    assert torch.equal(first, _prune(other, 2, 4, "random", "", 1, seeds[0]))


def test_random_in_a_short_group(device):
    """Of r < M elements min(N, r) are kept, each equally often."""
    ones = torch.ones(4, 7, 20, 25, device=device)
    kept = _prune(ones, 2, 4, "random", "", 1, torch.tensor([5], device=device)).cpu() != 0
    assert (kept[:, 4:].sum(1) == 2).all()
    shares = kept[:, 4:].double().mean((0, 2, 3))
    torch.testing.assert_close(shares, torch.full((3,), 2 / 3).double(), rtol=0, atol=0.06)


def test_nothing_to_prune_and_what_does_not_fit(device):
    grad_output = torch.randn(1, 8, 2, 2, device=device)
    assert torch.equal(_prune(grad_output, 4, 4), grad_output)
    assert _prune(grad_output[:0], 2, 4).shape == (0, 8, 2, 2)
    with pytest.raises(ValueError, match="seed"):
        _prune(grad_output, 2, 4, "random")


@pytest.mark.parametrize(("rule", "dtype"), LEFT_TO_TORCH, ids=str)
def test_what_is_left_to_torch(rule, dtype, device):
    grad_output = torch.randn(1, 32, 2, 2, device=device).to(dtype)
    fields = (rule.m, rule.rule, rule.rescale)
    assert ops._refuses_grad_output(*fields, dtype)
    assert not ops._refuses_grad_output(8, "magnitude_rescaled", "sample_channel", torch.bfloat16)
    with pytest.raises(ValueError, match=f"m={rule.m}, rule='{rule.rule}'"):
        ops.prune_grad_output(grad_output, rule.n, *fields, 1, torch.tensor([1], device=device))
    arguments = (grad_output, rule, "grad_input", 1, None)
    kept = prune_grad_output(*arguments).unflatten(1, (-1, rule.m)).ne(0).sum(2)
    assert (kept == rule.n).all()
    with (
        force(prune_grad_output="triton"),
        pytest.raises(RuntimeError, match="'triton' is forced but cannot compute"),
    ):
        prune_grad_output(*arguments)
