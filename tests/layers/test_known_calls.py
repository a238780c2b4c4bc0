"""Layers of which every product is dense: for some steps the op asks no backend about them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fst
from fst.backends import record as records
from fst.layers.prepared import PreparedCall
from fst.ops import cpp
from fst.ops.operands import GradInput, GradWeight, Output

PRODUCTS = (Output, GradInput, GradWeight)


@pytest.fixture(autouse=True)
def _autotunes(tmp_path, monkeypatch):
    monkeypatch.setenv("FST_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FST_AUTOTUNE", "1")  # layers far too small to gain


def converted(strategy: str) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False))
    fst.convert(net, strategy)
    return net


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The gradients of a step that changes no weight."""
    optimizer.zero_grad()
    torch.manual_seed(1)
    net(torch.randn(2, 4, 6, 6).relu()).square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in net.parameters()]
    optimizer.step()
    return gradients


def still(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.0)


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """The products that were asked about."""
    found: list[str] = []
    for kind in PRODUCTS:

        def key(self, kind=kind, own=kind.key):
            found.append(kind.__name__)
            return own(self)

        monkeypatch.setattr(kind, "key", key)
    return found


KNOWN = ["srste", "fst_w", "fst_sampled", "sdgp", "sdgp,prune_grad_weight=True", "acdc"]


@pytest.mark.parametrize("strategy", KNOWN)
def test_a_known_call_asks_nothing_and_computes_the_same(strategy, asked):
    net = converted(strategy)
    optimizer = still(net)
    attached = fst.attach(net, optimizer, total_steps=40, steps_per_epoch=4)
    first = step(net, optimizer)
    assert set(asked) == {kind.__name__ for kind in PRODUCTS}
    asked.clear()
    known = step(net, optimizer)
    assert not asked
    assert all(torch.equal(a, b) for a, b in zip(first, known, strict=True))
    del attached


@pytest.mark.parametrize("strategy", ["srste", "sparsetrain"])
def test_after_some_steps_the_op_looks_again_and_counts_zeros(strategy, asked, monkeypatch):
    monkeypatch.setattr(records, "DENSE_STEPS", 3)
    net = converted(strategy)
    optimizer, looked = still(net), []
    for _ in range(10):
        asked.clear()
        step(net, optimizer)
        looked.append(bool(asked))
        if asked:
            assert {calls for calls, _ in net[0].state.record.shares.values()} == {1}
    assert looked == [True, False, False, False, True, False, False, False, True, False]


@pytest.mark.parametrize("strategy", ["srste", "sparsetrain"])
def test_the_passes_of_one_step_are_computed_alike(strategy, monkeypatch):
    """As checkpointing needs it, which compares what the two forward passes save."""
    monkeypatch.setattr(records, "DENSE_STEPS", 2)
    net = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1))
    fst.convert(net, strategy)
    optimizer = still(net)
    for _ in range(8):
        x = torch.randn(2, 4, 6, 6)
        for _ in range(2):
            x = checkpoint(net, x, use_reentrant=False)
        x.square().sum().backward()
        optimizer.step()


def test_a_backend_that_is_asked_for_runs_also_where_all_is_known(asked):
    net = converted("srste")
    optimizer = still(net)
    step(net, optimizer)
    record = copy.deepcopy(net[2].state.record)
    with fst.backends.force(grad_weight="zeros_input"):
        step(net, optimizer)
    assert net[2].state.record.decisions["grad_weight"].backend == "zeros_input"
    output = net(torch.randn(2, 4, 6, 6)).square().sum()
    with fst.backends.force(grad_weight="zeros_input"):
        output.backward()
    assert net[2].state.record.dense_calls.keys() == record.dense_calls.keys()


def test_evaluation_leaves_no_trace():
    net = converted("srste").eval()
    optimizer = still(net)
    step(net, optimizer)
    assert not net[0].state.record.dense_calls


@pytest.fixture
def runs(monkeypatch) -> list[int]:
    """Grows by one with each prepared call."""
    found: list[int] = []
    run = PreparedCall.run

    def counted(self, layer, input):
        found.append(1)
        return run(self, layer, input)

    monkeypatch.setattr(PreparedCall, "run", counted)
    return found


@pytest.mark.parametrize("strategy", ["srste", "fst_w", "wg", "sdgp", "fst_sampled", "asp"])
def test_prepared_calls_compute_the_same(strategy, runs):
    """The first step chooses, the second one prepares, the third one has all."""
    net = converted(strategy)
    optimizer = still(net)
    attached = fst.attach(net, optimizer, total_steps=40, steps_per_epoch=4)
    first = [step(net, optimizer) for _ in range(3)]
    assert len(runs) == (0 if net[0].strategy.schedule or cpp.missing() else 2)
    assert all(torch.equal(a, b) for found in first for a, b in zip(first[0], found, strict=True))
    del attached


OF_TORCH = {  # layer, shape of its input
    "3x3": (lambda: nn.Conv2d(8, 8, 3, padding=1), (2, 8, 6, 6)),
    "groups": (lambda: nn.Conv2d(8, 8, 3, stride=2, groups=2, bias=False), (2, 8, 7, 7)),
    "1x1": (lambda: nn.Conv2d(8, 8, 1), (2, 8, 5, 5)),
    "pixel": (lambda: nn.Conv2d(8, 8, 1), (3, 8, 1, 1)),
    "rows": (lambda: nn.Linear(8, 8), (3, 8)),
    "tokens": (lambda: nn.Linear(8, 8, bias=False), (2, 5, 8)),
    "maps": (lambda: nn.Linear(8, 8), (2, 4, 3, 8)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OF_TORCH)
def test_known_calls_that_only_prune_weights_are_plain_convolutions(kind, dtype):
    """Y and dX by S(W), dW dense: PyTorch's node computes what the op's does."""
    torch.manual_seed(0)
    make, shape = OF_TORCH[kind]
    net = nn.Sequential(make(), nn.ReLU(inplace=True)).to(dtype)
    fst.convert(net, "srste", layers="all")
    optimizer, found = still(net), []
    input = torch.randn(shape, dtype=dtype, requires_grad=True)
    for _ in range(3):
        output = net[0](input)
        gradients = torch.autograd.grad(net[1](output).square().sum(), [input, *net.parameters()])
        for parameter, gradient in zip(net.parameters(), gradients[1:], strict=True):
            parameter.grad = gradient
        found.append((output.detach(), *gradients, net[0].passing.decay_mask))
        optimizer.step()
    assert net[0].state.record.dense_calls
    for known in found[1:]:
        for ours, theirs in zip(found[0], known, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_plain_convolutions_live_with_checkpoints_and_refuse_weights_that_were_written():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 8, 3))
    fst.convert(net, "srste")
    optimizer, input = still(net), torch.randn(2, 8, 6, 6)
    for _ in range(2):
        net(input).square().sum().backward()
        optimizer.step()
    assert net[0].state.record.dense_calls
    plain = torch.autograd.grad(net(input).square().sum(), net[0].weight)
    again = checkpoint(net, input, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again.square().sum(), net[0].weight), plain)
    output = net(input)
    with torch.no_grad():
        net[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_the_op_stays_where_more_than_weights_is_pruned():
    """Its node, and not PyTorch's, prunes dY."""
    names = []
    for strategy in ("srste", "sdgp", "fst_w", "tsm"):
        net = nn.Sequential(nn.Conv2d(8, 8, 3))
        fst.convert(net, strategy)
        optimizer = still(net)
        attached = fst.attach(net, optimizer, total_steps=40)
        for _ in range(2):
            output = net(torch.randn(2, 8, 6, 6))
            output.sum().backward()
            optimizer.step()
        assert net[0].state.record.dense_calls
        names.append(type(output.grad_fn).__name__)
        attached.remove()
    assert [name.startswith("_SparseConv2d") for name in names] == [False, True, True, False]


def _in_other_order(net):
    net[2].weight.data = net[2].weight.data.contiguous(memory_format=torch.channels_last)


def _with_other_padding(net):
    net[2].padding = (2, 1)


def _with_another_strategy(net):
    net[2].strategy = fst.get_strategy("srste", n=1, m=4)


def _in_evaluation(net):
    net.eval()


@pytest.mark.skipif(bool(cpp.missing()), reason="no kernel, no prepared pruning")
@pytest.mark.parametrize(
    "change", [_in_other_order, _with_other_padding, _with_another_strategy, _in_evaluation]
)
def test_a_changed_layer_is_looked_at_anew(change, runs):
    nets = [converted("srste") for _ in range(2)]
    for _ in range(3):
        step(nets[0], still(nets[0]))
    assert runs
    runs.clear()
    for net in nets:
        change(net)
    optimizers = [still(net) for net in nets]
    found, expected = (step(*both) for both in zip(nets, optimizers, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(runs) == (0 if change is _in_evaluation else 1)  # the other layer's


def test_a_weight_that_moves_is_pruned_anew():
    net = converted("srste")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(4):
        step(net, optimizer)
        inputs = torch.randn(2, 4, 6, 6)
        plain = copy.deepcopy(net)
        for layer in fst.sparse_layers(plain).values():
            layer.weight.data = layer.effective_weight()
        plain = fst.fold(plain)
        torch.testing.assert_close(net(inputs), plain(inputs))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_prepare_their_own_calls(copied):
    net = converted("srste")
    optimizer = still(net)
    expected = [step(net, optimizer) for _ in range(3)][-1]
    again = copied(net)
    assert not again[2].state.record.prepared
    for _ in range(2):
        found = step(again, still(again))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("strategy", ["srste", "fst_w", "sdgp"])
def test_depthwise_layers_have_nothing_to_prune_and_run_as_they_are(strategy, monkeypatch):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 8, 1))
    fst.convert(net, strategy)
    assert [layer.is_too_small for layer in net] == [True, False]
    optimizer = still(net)
    first = step(net, optimizer)
    calls, own = [], nn.Conv2d.forward
    monkeypatch.setattr(nn.Conv2d, "forward", lambda *a: calls.append(a[0]) or own(*a))
    again = step(net, optimizer)
    assert calls == [net[0]]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_rules_that_reach_small_groups():
    """Of a 3x3 kernel in im2col order, of transposable masks' tiles, and of random draws."""
    assert fst.get_strategy("srste").keeps_all(2, 1)
    assert not fst.get_strategy("srste").keeps_all(3, 1)
    assert not fst.get_strategy("tsm").keeps_all(1, 1)
    assert not fst.get_strategy("sampled").keeps_all(1, 1)
    im2col = fst.Strategy("im2col", fst.NM("weight", 2, 4, group_order="im2col"))
    assert not im2col.keeps_all(1, 1)


def test_a_model_that_moves_to_another_device_is_asked_again():
    net = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3))
    fst.convert(net, "srste")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    images = torch.randn(2, 16, 8, 8)
    for _ in range(3):
        net(images).sum().backward()
        optimizer.step()
    net.to("meta")
    with pytest.raises(ValueError, match="weight is on meta, input on cpu"):
        net(images)
