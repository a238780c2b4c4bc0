"""The pure mask functions: N:M magnitude and random masks."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fst.baselines.clicktrain import connectivity_mask
from fst.rules import masks
from fst.rules.masks import nm_mask
from fst.rules.nm import NM
from fst.rules.transposable_masks import transposable_mask
from tests.oracle.conv import reference_nm_mask
from tests.rules.groups import kept_counts

PATTERNS = [(1, 4), (2, 4), (2, 8), (4, 8), (4, 16), (16, 32), (1, 1), (3, 5), (32, 32)]


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("values", "n", "m", "kept"),
    [
        ((1, 7, -3, 2), 2, 4, (0, 1, 1, 0)),  # SDGP, section III-B
        ((5, 5, 5, 5), 2, 4, (1, 1, 0, 0)),
        ((1, -2, 2, 2), 2, 4, (0, 1, 1, 0)),
        ((0, 0, 0, 0), 2, 4, (1, 1, 0, 0)),
        ((0.0, -0.0, 0, 1), 2, 4, (1, 0, 0, 1)),
        ((1, 2, 3, 4, 9, 8, 7), 2, 4, (0, 0, 1, 1, 1, 1, 0)),
        ((1, 2, 3, 4, 0), 2, 4, (0, 0, 1, 1, 1)),
        ((1, 2, 3, 4, 9, 8), 3, 4, (0, 1, 1, 1, 1, 1)),
        ((1, 2), 1, 4, (0, 1)),  # nothing but a short group
        ((3, 1, 2, 5, 4), 2, 5, (0, 0, 0, 1, 1)),
        ((1, 2, 3, 4), 4, 4, (1, 1, 1, 1)),
        ((math.nan, 1, math.inf, -math.inf), 2, 4, (1, 0, 1, 0)),
        ((math.inf, -math.inf, math.nan, 1), 2, 4, (1, 1, 0, 0)),
        ((1, math.nan, 2, 3), 1, 4, (0, 1, 0, 0)),
        ((math.inf, math.nan, -math.inf), 1, 3, (1, 0, 0)),
    ],
)
@pytest.mark.parametrize("function", [nm_mask, reference_nm_mask])
def test_by_hand(function, values, n, m, kept):
    mask = function(torch.tensor(values, dtype=torch.float32), n, m, 0)
    assert mask.dtype == torch.bool
    assert mask.int().tolist() == list(kept)


@st.composite
def _tensors(draw, values=None):
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    size = math.prod(shape)
    if values is None:
        values = st.integers(-3, 3)  # few values, many ties
    flat = draw(st.lists(values, min_size=size, max_size=size))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    return torch.tensor(flat, dtype=torch.float32).reshape(shape), dim


PATTERN = st.integers(1, 32).flatmap(lambda m: st.tuples(st.integers(1, m), st.just(m)))


@given(_tensors(), PATTERN)
def test_magnitude_equals_reference_on_every_dim(tensor_and_dim, pattern):
    tensor, dim = tensor_and_dim
    n, m = pattern
    mask = nm_mask(tensor, n, m, dim)
    assert mask.shape == tensor.shape
    assert torch.equal(mask, reference_nm_mask(tensor, n, m, dim))


@given(_tensors(), PATTERN, st.sampled_from(["magnitude", "random"]))
def test_exactly_n_of_each_group(tensor_and_dim, pattern, rule):
    tensor, dim = tensor_and_dim
    n, m = pattern
    mask = nm_mask(tensor, n, m, dim, rule=rule, generator=_generator())
    assert all(kept == min(n, length) for kept, length in kept_counts(mask, m, dim))


@given(
    _tensors(st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45])),
    st.just((2, 4)) | PATTERN,
)
def test_special_values(tensor_and_dim, pattern):
    """2:4 has code of its own."""
    tensor, dim = tensor_and_dim
    assert torch.equal(nm_mask(tensor, *pattern, dim), reference_nm_mask(tensor, *pattern, dim))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "m"), PATTERNS)
def test_dtypes(dtype, n, m):
    tensor = torch.randn(3, 37, 4, dtype=torch.float64).to(dtype)
    assert torch.equal(nm_mask(tensor, n, m, 1), reference_nm_mask(tensor, n, m, 1))


def test_close_float64_values_are_told_apart():
    tensor = torch.tensor([1.0, 1.0 + 1e-15, 1.0 - 1e-15, 1.0], dtype=torch.float64)
    assert nm_mask(tensor, 1, 4, 0).tolist() == [False, True, False, False]


@pytest.mark.parametrize("rule", ["magnitude", "random"])
@pytest.mark.parametrize("dim", range(4))
def test_independent_of_memory_layout(dim, rule):
    tensor = torch.randint(-3, 4, (4, 6, 5, 7)).float()
    expected = nm_mask(tensor, 2, 4, dim, rule=rule, generator=_generator())
    strided = torch.zeros(4, 12, 5, 14)[:, ::2, :, ::2].copy_(tensor)
    transposed = tensor.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    for other in (tensor.to(memory_format=torch.channels_last), strided, transposed):
        assert not other.is_contiguous()
        mask = nm_mask(other, 2, 4, dim, rule=rule, generator=_generator())
        assert torch.equal(mask, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(8, 12, 3, 2), (4, 4, 1, 1), (16, 8, 5)])
def test_blocks_of_every_layout(dtype, shape, monkeypatch):
    monkeypatch.setattr(masks, "CPU_BLOCK", 64)  # several blocks
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, math.inf, math.nan, 6e-8])
    tensor = values[torch.randint(len(values), shape, generator=_generator())].to(dtype)
    layouts = [tensor, tensor.transpose(0, 1).contiguous().transpose(0, 1), tensor.flip(1)]
    if tensor.dim() == 4:
        layouts.append(tensor.contiguous(memory_format=torch.channels_last))
    for laid_out in layouts:
        for dim in (0, 1):
            mask = nm_mask(laid_out, 2, 4, dim)
            assert mask.stride() == torch.empty_like(laid_out).stride()
            assert torch.equal(mask, reference_nm_mask(laid_out, 2, 4, dim))


def test_expanded_input():
    tensor = torch.tensor([1.0, 7, -3, 2]).expand(3, 4)
    assert nm_mask(tensor, 2, 4, 1).int().tolist() == [[0, 1, 1, 0]] * 3


def test_input_is_untouched_and_needs_no_graph():
    tensor = torch.randn(8, 8, requires_grad=True)
    before = tensor.detach().clone()
    mask = nm_mask(tensor, 2, 4, 1)
    assert torch.equal(tensor, before) and not mask.requires_grad


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0,)])
@pytest.mark.parametrize("rule", ["magnitude", "random"])
def test_empty(shape, rule):
    mask = nm_mask(torch.zeros(shape), 2, 4, -1, rule=rule)
    assert mask.shape == shape and mask.dtype == torch.bool


def test_something_is_always_kept():
    weight = torch.arange(4.0)
    assert masks.unstructured_mask(weight, 0.99).tolist() == [False, False, False, True]
    kernels = connectivity_mask(weight.view(2, 2, 1, 1), 0.99)
    assert kernels.flatten().tolist() == [False, False, False, True]


@pytest.mark.parametrize("rule", ["magnitude", "random"])
def test_n_equals_m_keeps_everything(rule):
    assert nm_mask(torch.zeros(3, 7), 4, 4, 1, rule=rule).all()


# ---------------------------------------------------------------- random


def _chi_square_limit(freedom, z=3.72):
    """The 1 - 1e-4 quantile of the chi-square distribution (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


def _subset_counts(groups):
    weights = 2 ** torch.arange(groups.shape[1])
    _, counts = (groups.long() * weights).sum(1).unique(return_counts=True)
    return counts


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (2, 5), (4, 8), (3, 4), (1, 2)])
@pytest.mark.parametrize("dim", [0, 1])
def test_random_is_uniform_over_all_subsets(n, m, dim):
    subsets = math.comb(m, n)
    total = 400 * subsets
    shape = (total, m) if dim == 1 else (m, total)
    mask = nm_mask(torch.zeros(shape), n, m, dim, rule="random", generator=_generator(1))
    counts = _subset_counts(mask.movedim(dim, -1))
    assert len(counts) == subsets
    chi_square = ((counts - 400.0) ** 2 / 400).sum().item()
    assert chi_square < _chi_square_limit(subsets - 1)


def test_random_is_uniform_in_every_place():
    """Along one dimension of several groups with a short last one: each group is drawn alike."""
    mask = nm_mask(torch.zeros(6000, 11), 2, 4, 1, rule="random", generator=_generator(2))
    for group, subsets in zip(mask.split(4, dim=1), (6, 6, 3), strict=True):
        counts = _subset_counts(group)
        expected = 6000 / subsets
        assert len(counts) == subsets
        assert ((counts - expected) ** 2 / expected).sum() < _chi_square_limit(subsets - 1)
    first, second, _ = mask.split(4, dim=1)
    pairs = _subset_counts(torch.cat([first, second], dim=1))  # independent of each other
    assert len(pairs) == 36
    assert ((pairs - 6000 / 36) ** 2 / (6000 / 36)).sum() < _chi_square_limit(35)


def test_random_depends_on_the_generator_alone():
    tensor = torch.randn(64, 64)

    def draw(values, seed):
        return nm_mask(values, 2, 4, 1, rule="random", generator=_generator(seed))

    assert torch.equal(draw(tensor, 3), draw(tensor, 3))
    assert torch.equal(draw(tensor, 3), draw(torch.full_like(tensor, math.nan), 3))
    assert not torch.equal(draw(tensor, 3), draw(tensor, 4))


def test_random_advances_the_generator_and_spares_the_global_one():
    state = torch.random.get_rng_state()
    generator = _generator()
    first, second = (
        nm_mask(torch.zeros(64, 64), 2, 4, 1, rule="random", generator=generator) for _ in range(2)
    )
    assert not torch.equal(first, second)
    assert torch.equal(state, torch.random.get_rng_state())


def test_random_without_generator_follows_the_global_seed():
    def draw():
        torch.manual_seed(5)
        return nm_mask(torch.zeros(64, 64), 2, 4, 1, rule="random")

    assert torch.equal(draw(), draw())


def test_autocast_changes_no_mask():
    """The scores are compared in full precision, whatever dtype autocast would multiply in."""
    tensor = torch.randn(64, 64)
    expected = nm_mask(tensor, 2, 4, 1), transposable_mask(tensor), transposable_mask(tensor, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        actual = (
            nm_mask(tensor, 2, 4, 1),
            transposable_mask(tensor),
            transposable_mask(tensor, 4, 8),
        )
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("dim", [2, -3])
def test_bad_dim(dim):
    with pytest.raises(IndexError):
        nm_mask(torch.zeros(8, 8), 2, 4, dim)


def test_bad_rule_suggests_the_nearest():
    with pytest.raises(ValueError, match="magnitude"):
        nm_mask(torch.zeros(8), 2, 4, 0, rule="magnitud")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_masks_need_floating_point(dtype):
    for function in (lambda t: nm_mask(t, 2, 4, 0), transposable_mask):
        with pytest.raises((TypeError, ValueError), match=str(dtype)):
            function(torch.zeros(8, 8, dtype=dtype))


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("rescale", ["", "sample_channel", "channel", "group"])
def test_grad_output_is_the_same_in_parts_of_the_cache(rescale, memory, monkeypatch):
    rule = NM("grad_output", rule="magnitude_rescaled", rescale=rescale) if rescale else None
    rule = rule or NM("grad_output")
    grad_output = torch.randn(5, 18, 6, 7).contiguous(memory_format=memory)
    expected = rule.prune_grad_output(grad_output, "grad_input", 2)
    whole = []
    monkeypatch.setattr(masks, "CPU_PART", grad_output.numel() // 5 * 2)
    monkeypatch.setattr(NM, "_mask", lambda *a, old=NM._mask: whole.append(len(a[1])) or old(*a))
    pruned = rule.prune_grad_output(grad_output, "grad_input", 2)
    assert torch.equal(pruned.view(torch.int32), expected.view(torch.int32))
    assert pruned.stride() == expected.stride()
    assert whole == ([5] if rescale == "channel" else [2, 2, 1])
