"""meprop and sparsetrain, each in its own terms."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fst
from fst.rules import masks
from fst.rules.masks import top_k_mask
from tests.cases import case, run
from tests.networks import batch, gradients, small_net
from tests.oracle.conv import reference_top_k_mask

# ---------------------------------------------------------------- meprop


@given(
    st.lists(st.sampled_from([0.0, -1.0, 1.0, 2.0, -2.0, float("inf")]), min_size=1, max_size=24),
    st.floats(0.01, 1),
)
def test_top_k_keeps_exactly_k_and_the_lower_of_equals(values, density):
    sample = torch.tensor(values)
    tensor = torch.stack([sample, sample.flip(0)])
    k = max(1, round(density * len(values)))
    mask = top_k_mask(tensor, k)
    assert (mask.sum(1) == k).all()
    assert torch.equal(mask, reference_top_k_mask(tensor, density))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_top_k_is_per_sample_in_every_memory_format(dtype):
    tensor = torch.randn(3, 4, 5, 6).round(decimals=1).to(dtype)
    tensor[1] *= 100  # a sample does not compete with others
    expected = reference_top_k_mask(tensor, 0.3)
    for layout in (torch.contiguous_format, torch.channels_last):
        assert torch.equal(top_k_mask(tensor.contiguous(memory_format=layout), 36), expected)
    assert (expected.flatten(1).sum(1) == 36).all()


def test_meprop_selects_once_for_both_products(monkeypatch):
    calls, original = [], masks.top_k_mask
    monkeypatch.setattr(fst.rules.masks, "top_k_mask", lambda *a: calls.append(1) or original(*a))
    net = small_net()
    fst.convert(net, "meprop", include="2")
    net(batch()).sum().backward()
    assert len(calls) == 1


def test_meprop_leaves_the_bias_gradient_dense():
    the_case = case("basic")
    operands = the_case.operands()
    dense, sparse = (run(the_case, operands, s) for s in (None, "meprop"))
    torch.testing.assert_close(sparse[3], dense[3])
    assert not torch.equal(sparse[2], dense[2])


def test_meprop_compiles():
    net = small_net()
    fst.convert(net, "meprop")
    expected = copy.deepcopy(net)
    torch.compile(net, fullgraph=True, backend="aot_eager")(batch()).square().sum().backward()
    expected(batch()).square().sum().backward()
    for name, gradient in gradients(net).items():
        torch.testing.assert_close(gradient, gradients(expected)[name])


# ---------------------------------------------------------------- sparsetrain


def test_sparsetrain_changes_nothing():
    dense = small_net()
    net = copy.deepcopy(dense)
    report = fst.convert(net, "sparsetrain")
    assert list(report.converted) == list(fst.sparse_layers(net)) == ["0", "2"]
    for _ in range(2):
        for network in (dense, net):
            network(batch()).square().sum().backward()
        for name, gradient in gradients(net).items():
            assert torch.equal(gradient, gradients(dense)[name]), name
    assert all(state["schedule_state"] == {} for state in fst.sparsity_state(net).values())
