"""Converted models in training and evaluation: what stays dense, and when masks are made."""

import copy
import threading

import pytest
import torch
from torch import nn

import fst
from fst import NM
from fst.layers.remembered import TransientState
from fst.ops.plan import CallPlan
from tests.networks import TRAINED, attach, batch, gradients, optimizer_for, small_net
from tests.oracle.conv import reference_nm_mask
from tests.strategy_settings import DEFAULTS, SETTINGS, quick_first

# ---------------------------------------------------------------- whole networks


QUICK = ("dense", "fst", "sdgp", "srste")  # of whole networks, those of `make test`


@pytest.mark.parametrize(
    "row",
    quick_first([row for row in TRAINED if row.id != "tsm-4:8"], QUICK),
)
def test_resnet18_trains(row):
    models = pytest.importorskip("torchvision.models")
    model = models.resnet18(num_classes=4)
    report = fst.convert(model, row.build())
    optimizer = optimizer_for(model, lr=0.01, momentum=0.9)
    assert len(report.converted) + len(report.skipped) == 21
    attach(model, optimizer)
    input, target = torch.randn(2, 3, 32, 32), torch.tensor([0, 3])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(2):
        loss = nn.functional.cross_entropy(model(input), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.isfinite()
    for name, p in model.named_parameters():
        assert p.isfinite().all() and not torch.equal(p, before[name]), name
    assert model.eval()(input).isfinite().all()


def test_dense_is_the_dense_model_bit_for_bit():
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    dense = models.resnet18(num_classes=4)
    model = copy.deepcopy(dense)
    fst.convert(model, "dense")
    input = torch.randn(2, 3, 32, 32)
    for network in (dense, model):
        network(input).square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    assert torch.equal(model.eval()(input), dense.eval()(input))


@pytest.mark.parametrize("row", [row for row in SETTINGS if "output" in row.dense])
def test_layers_left_dense_get_bit_equal_gradients(row):
    """Without a pruned forward pass, whatever lies behind the converted layer is as before."""
    dense = small_net(double=False)
    model = copy.deepcopy(dense)
    fst.convert(model, row.build(), include="0")
    attach(model)
    input = batch(dtype=torch.float32)
    for network in (dense, model):
        network(input).square().sum().backward()
    names = ["2.weight", "2.bias", "4.weight", "4.bias", "0.bias"]
    if "grad_weight" in row.dense:
        names.append("0.weight")
    actual, expected = gradients(model), gradients(dense)
    exact = "grad_weight" in row.dense and row.build().sampling is None
    for name in names:
        if name.startswith("0.") and not exact:
            torch.testing.assert_close(actual[name], expected[name])
        else:
            assert torch.equal(actual[name], expected[name]), name


# ---------------------------------------------------------------- S(W) in evaluation


@pytest.fixture
def prunings(monkeypatch):
    """A list that grows by one whenever a layer computes S(W)."""

    calls, original = [], CallPlan.prune
    monkeypatch.setattr(CallPlan, "prune", lambda *a, **k: calls.append(1) or original(*a, **k))
    return calls


def test_a_frozen_evaluation_computes_the_masks_once(prunings):
    net = small_net()
    fst.convert(net, "fst")
    net.eval()
    with torch.no_grad(), fst.frozen(net):
        expected = [net(batch(seed)) for seed in range(3)]
    assert len(prunings) == 2
    assert all(torch.equal(net(batch(seed)), expected[seed]) for seed in range(3))
    assert len(prunings) == 8


def test_a_training_step_computes_the_masks_once_a_call(prunings):
    """The decay takes the last call's; `fst.frozen` makes one of many."""
    net = nn.Conv2d(4, 4, 3, padding=1)
    fst.convert(net, "fst")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    input = torch.randn(2, 4, 5, 5)
    for step in range(3):
        net(net(input)).sum().backward()
        optimizer.step()
        assert len(prunings) == 2 * (step + 1)
    prunings.clear()
    with fst.frozen(net):
        for half in input.split(1):
            net(net(half)).sum().backward()
    optimizer.step()
    assert len(prunings) == 1


def test_a_frozen_weight_is_that_of_each_precision_and_mode():
    net = small_net(double=False)
    fst.convert(net, "fst")
    input = batch(dtype=torch.float32)
    with fst.frozen(net):
        with torch.inference_mode():
            first = net(input)
        with torch.autocast("cpu", torch.bfloat16):
            assert net(input).dtype == torch.bfloat16
        output = net(input)
        assert torch.equal(output, first)
        output.sum().backward()


def test_a_replica_of_data_parallel_changes_nothing_of_its_layer():
    net = nn.Conv2d(4, 8, 3, padding=1).double()
    fst.convert(net, fst.get_strategy("tsm", interval=3))
    replica = net._replicate_for_data_parallel()
    replica.weight, replica.bias = net.weight * 1, net.bias * 1
    assert torch.equal(replica(batch()), net.eval()(batch()))
    assert replica.transient.calls == 1 and net.transient.calls == 0
    assert net.state.kept_mask is None


def test_frozen_does_not_nest():
    net = small_net()
    with pytest.raises(ValueError, match="no converted layer"), fst.frozen(net):
        pass
    fst.convert(net, "fst")
    with fst.frozen(net), pytest.raises(ValueError, match="frozen already"), fst.frozen(net):
        pass
    assert net[0].transient.frozen is None


def test_a_thread_that_leaves_a_frozen_block_leaves_none_behind():
    net = small_net()
    fst.convert(net, "fst")
    entered, go_on = threading.Event(), threading.Event()

    def evaluate():
        with torch.no_grad(), fst.frozen(net):
            net(batch())
            entered.set()
            go_on.wait(10)

    thread = threading.Thread(target=evaluate)
    thread.start()
    assert entered.wait(10) and net[0].transient.frozen is not None
    with pytest.raises(ValueError, match="frozen already"), fst.frozen(net):
        pass
    assert net[0].transient.frozen is not None
    go_on.set()
    thread.join()
    assert net[0].transient.frozen is None and net[2].transient.frozen is None


def test_an_interrupt_that_freezes_half_of_the_layers_frees_them(monkeypatch):
    """As Ctrl-C may come between two layers."""
    net = small_net()
    fst.convert(net, "fst")
    frozen = []

    def interrupted(run, name, value):
        object.__setattr__(run, name, value)
        if name == "frozen_block" and value is not None:
            frozen.append(run)
            raise KeyboardInterrupt

    monkeypatch.setattr(TransientState, "__setattr__", interrupted)
    with pytest.raises(KeyboardInterrupt), fst.frozen(net):
        pass
    assert len(frozen) == 1 and frozen[0].frozen is None


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("row", [row for row in DEFAULTS if row.prunes_weight])
def test_the_next_call_follows_the_weight(row, training):
    """Changed behind autograd's back; tests/campaign/weights.py has the other ways."""
    net = small_net()
    fst.convert(net, row.build())
    if net[0].strategy.schedule is not None:
        attach(net)
    net.train(training)
    before = net(batch()).detach()
    net[0].weight.data.normal_()
    new = net[0].weight.detach()
    rule, kept = row.build().output, net[0].effective_weight()
    if rule.changes_values:
        assert ((kept != 0) <= (new != 0)).all()
    elif net[0].strategy.keeps_masks or not isinstance(rule, NM):  # the mask is state, or not N:M
        assert torch.equal(kept[kept != 0], new[kept != 0])
    else:
        assert torch.equal(kept, new * reference_nm_mask(new, rule.n, rule.m, 1))
    actual = net(batch()).detach()
    assert not torch.equal(actual, before)
    hidden = nn.functional.conv2d(batch(), kept, net[0].bias, padding=1).relu()
    torch.testing.assert_close(actual, net[2:](hidden).detach())


@pytest.mark.parametrize("row", [row for row in DEFAULTS if row.prunes_weight])
def test_evaluation_follows_the_optimizer(row):
    net = small_net()
    fst.convert(net, row.build())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    attach(net, optimizer)
    for _ in range(3):
        net.train()
        net(batch()).sum().backward()
        optimizer.step()
        net.eval()
        with torch.no_grad():
            torch.testing.assert_close(net(batch()), fst.fold(net)(batch()))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_tracers_are_told_what_to_trace():
    net = small_net().eval()
    fst.convert(net, "fst")
    with pytest.raises(RuntimeError, match=r"torch.jit.trace.*fst.fold\(model\)"):
        torch.jit.trace(net, batch())
    with pytest.raises(TypeError, match="torch.fx cannot trace converted layers"):
        torch.fx.symbolic_trace(net)
    of_gradients = small_net().eval()
    fst.convert(of_gradients, "sdgp")
    with pytest.raises(RuntimeError, match=r"torch.jit.trace.*fst.fold\(model\)"):
        torch.jit.trace(of_gradients, batch())
    with torch.no_grad():  # its forward pass is plain
        assert torch.equal(torch.jit.trace(of_gradients, batch())(batch()), of_gradients(batch()))
    with pytest.raises(RuntimeError, match=r"layer '0': torch.jit.script .*fst.fold\(model\)"):
        torch.jit.script(net)
    assert torch.equal(torch.jit.script(fst.fold(net))(batch()), fst.fold(net)(batch()))
    traced = torch.fx.symbolic_trace(small_net())
    assert fst.convert(traced, "fst").converted
    assert torch.jit.trace(fst.fold(net), batch())


def test_a_stride_in_a_list_and_an_input_that_is_no_tensor():
    layer = nn.Conv2d(8, 8, 3)
    fst.convert(layer, "srste")
    images = torch.randn(2, 8, 6, 6)
    expected = layer(images)
    layer.stride = [1, 1]
    assert torch.equal(layer(images), expected)
    with pytest.raises(TypeError, match="input='x' must be a torch.Tensor"):
        layer("x")
