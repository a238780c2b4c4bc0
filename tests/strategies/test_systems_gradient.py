"""meprop and sparsetrain: what each is about."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fst
from fst.report import describe_layer
from fst.rules import masks
from fst.rules.masks import top_k_mask
from fst.strategies.sparsetrain import zero_shares
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


def test_sparsetrain_counts_the_zeros_of_relu_and_changes_nothing():
    dense = small_net()
    net = copy.deepcopy(dense)
    fst.convert(net, "sparsetrain")
    conv = net[2]
    seen = {}
    net[1].register_forward_hook(lambda m, args, out: seen.update(input=out.detach()))
    net[0].register_full_backward_hook(lambda m, ins, outs: seen.update(grad_output=outs[0]))
    for network in (dense, net):
        network(batch()).square().sum().backward()
    for name, gradient in gradients(net).items():
        assert torch.equal(gradient, gradients(dense)[name]), name

    def share(tensor):
        return (tensor == 0).double().mean().item()

    assert 0.3 < share(seen["input"]) < 0.7
    assert zero_shares(conv)["input"].item() == pytest.approx(share(seen["input"]))
    first = zero_shares(net[0])
    assert first["input"].item() == 0
    assert first["grad_output"].item() == pytest.approx(share(seen["grad_output"]))
    assert f"{share(seen['input']):.1%}" in str(describe_layer(conv).gemms["output"].reason)


def test_sparsetrain_counts_training_only_and_can_start_anew():
    net = small_net()
    fst.convert(net, "sparsetrain")
    assert "are counted in training" in describe_layer(net[0]).gemms["output"].reason
    net.eval()(batch()).sum().backward()
    assert not zero_shares(net[0])
    zeros = torch.zeros(4, 4, 5, 5, dtype=torch.float64)
    net.train()
    net(zeros)
    net(batch())
    assert zero_shares(net[0])["input"].item() == pytest.approx(0.5), "over all calls"
    assert net[0].strategy.schedule.measure(net[0])["input_zeros"].item() == pytest.approx(0.5)
    net(zeros)
    assert zero_shares(net[0])["input"].item() == 1, "since it was measured"
    other = copy.deepcopy(net)
    fst.load_sparsity_state(other, fst.sparsity_state(net))
    assert zero_shares(other[0])["input"].item() == 1, "part of checkpoints"


def test_sparsetrain_counts_nothing_where_no_gradient_arrives():
    net = small_net()
    fst.convert(net, "sparsetrain")
    net[0].requires_grad_(False)
    net(batch()).sum().backward()
    assert not zero_shares(net[0]) and set(zero_shares(net[2])) == {"input", "grad_output"}


def test_sparsetrain_sees_the_gradient_before_an_in_place_relu():
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(inplace=True))
    fst.convert(net, "sparsetrain")
    output = net(torch.randn(2, 4, 6, 6))
    output.sum().backward()
    expected = (output == 0).float().mean().item()
    assert zero_shares(net[0])["grad_output"].item() == pytest.approx(expected)
