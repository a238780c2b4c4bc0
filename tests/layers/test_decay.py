"""SR-STE's decay: once, where the optimizer steps, through the gradient or decoupled."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fst
from fst.ops.prune import add_residual
from tests.cases import error
from tests.networks import (
    assert_close,
    attach,
    batch,
    decaying,
    gradients,
    small_net,
    stepped_gradients,
)
from tests.oracle.conv import reference_conv2d, reference_nm_mask
from tests.strategy_settings import DEFAULTS, DETERMINISTIC

# ---------------------------------------------------------------- through the gradient


def test_decay_by_hand():
    layer = decaying(nn.Conv2d(4, 1, 1, bias=False).double())
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 7, -3, 2]).reshape(1, 4, 1, 1))
    layer(torch.ones(1, 4, 2, 2, dtype=torch.float64)).sum().backward()
    assert layer.weight.grad.flatten().tolist() == [4, 4, 4, 4]  # the loss's alone
    assert stepped_gradients(layer)["weight"].flatten().tolist() == [4.5, 4, 4, 5.0]
    assert layer.weight.flatten().tolist() == [1, 7, -3, 2]


@pytest.mark.parametrize("calls", [2, 3])
def test_a_shared_layer_decays_once(calls):
    layer = decaying(nn.Conv2d(4, 4, 3, padding=1).double())
    plain = copy.deepcopy(layer)
    plain.strategy = fst.get_strategy("srste", decay=0.0)
    for network in (layer, plain):
        x = batch()
        for _ in range(calls):
            x = network(x).tanh()
        x.sum().backward()
        stepped_gradients(network)
    difference = layer.weight.grad - plain.weight.grad
    expected = 0.5 * (layer.weight - layer.effective_weight())
    assert error(difference, expected.detach()) <= 1e-12


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "weight in another order"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 7), (6, 5, 3, 3), (40, 130, 3, 3), (0, 4, 1, 1)])
def test_the_decay_s_pull_is_that_of_the_formula(shape, dtype, layout):
    torch.manual_seed(0)
    target, weight = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    mask = torch.rand(shape) > 0.5
    if layout != "contiguous" and len(shape) == 4:
        weight = weight.contiguous(memory_format=torch.channels_last)
        if layout == "channels_last":
            target, mask = (x.contiguous(memory_format=torch.channels_last) for x in (target, mask))
    expected = target.double() + 0.25 * weight.double() * ~mask
    version = target._version
    add_residual(target, weight, mask, 0.25)
    torch.testing.assert_close(target, expected.to(dtype))
    assert target._version > version


def test_every_step_decays():
    layer = decaying(nn.Conv2d(4, 4, 1, bias=False).double())
    input = torch.zeros(1, 4, 2, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    for _ in range(3):
        before, kept = layer.weight.detach().clone(), layer.effective_weight()
        optimizer.zero_grad()
        layer(input).sum().backward()
        optimizer.step()
        torch.testing.assert_close(layer.weight.detach(), before - 0.25 * (before - kept))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_discarded_gradient_loses_no_decay(set_to_none):
    """Steps that are skipped, probes of the gradients, passes that are dropped or only look."""
    net = decaying(small_net())
    net(batch()).sum().backward()
    expected = stepped_gradients(net)
    net.zero_grad(set_to_none=set_to_none)
    net(batch(1)).sum().backward()
    net.zero_grad(set_to_none=set_to_none)
    net(batch(1))  # with autograd, but never backwards
    with torch.no_grad():
        net(batch(2))
    net.eval()(batch(3))
    net.train()(batch()).sum().backward()
    assert_close(stepped_gradients(net), expected)


def test_a_weight_without_a_gradient_does_not_decay():
    net = decaying(small_net())
    before = net[2].weight.detach().clone()
    net[0](batch()).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert torch.equal(net[2].weight, before) and net[2].state.step == 0 < net[0].state.step


def test_a_frozen_weight_keeps_no_mask_for_a_decay():
    net = decaying(small_net())
    net[0].weight.requires_grad_(False)
    net(batch()).sum().backward()
    assert net[0].transient.decay_mask is None and net[2].transient.decay_mask is not None


@pytest.mark.parametrize("row", [row for row in DETERMINISTIC if row in DEFAULTS])
def test_gradient_accumulation_equals_one_batch(row):
    """Two half batches with half the loss: the same gradient, the decay in it once."""
    net = small_net()
    overrides = dict(decay=0.5) if row.build().decay else {}
    fst.convert(net, row.build(**overrides))
    attach(net)
    whole = batch(size=4)
    net(whole).square().mean().backward()
    expected = gradients(net)
    net.zero_grad()
    for half in whole.split(2):
        (net(half).square().mean() / 2).backward()
    assert_close(gradients(net), expected, 1e-10)
    alone = {name: gradient.clone() for name, gradient in expected.items()}
    for name in ("0", "2"):
        layer = net.get_submodule(name)
        alone[f"{name}.weight"] += (
            layer.strategy.gradient_decay * (layer.weight - layer.effective_weight()).detach()
        )
    if layer.strategy.schedule is None:
        assert_close(stepped_gradients(net), alone, 1e-10)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("row", [row for row in DETERMINISTIC if row in DEFAULTS])
def test_activation_checkpointing_changes_nothing(row, reentrant):
    net = small_net()
    overrides = dict(decay=0.5) if row.build().decay else {}
    fst.convert(net, row.build(**overrides))
    attach(net)
    net(batch().requires_grad_()).square().sum().backward()
    expected = gradients(net)
    net.zero_grad()
    x = batch().requires_grad_()
    x = checkpoint(net[0], x, use_reentrant=reentrant)
    x = checkpoint(net[1:], x, use_reentrant=reentrant)
    x.square().sum().backward()
    assert_close(gradients(net), expected)


@pytest.mark.parametrize("tokens", [6, 7])
@pytest.mark.parametrize("strategy", ["sampled", "fst_sampled"])
def test_activation_checkpointing_keeps_a_seeded_draw(strategy, tokens):
    """The recomputation is another call, but the draw stays the first one's."""

    def gradient(seed, use_reentrant=None):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(8, 8)).double()
        fst.convert(layer, fst.get_strategy(strategy), include="0")
        fst.seed_random_rules(layer, seed)
        input = torch.randn(3, tokens, 8, dtype=torch.float64, requires_grad=True)
        if use_reentrant is None:
            output = layer(input)
        else:
            output = checkpoint(layer, input, use_reentrant=use_reentrant)
        output.square().sum().backward()
        return layer[0].weight.grad

    for seed in range(6):
        expected = gradient(seed)
        for use_reentrant in (True, False):
            torch.testing.assert_close(gradient(seed, use_reentrant), expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_looking_in_the_middle_of_a_step_changes_nothing(autocast):
    """S(W) is asked for in float32 while the step itself may run in bfloat16."""

    def train(look):
        layer = decaying(small_net(double=False)[0])
        output = 0
        for seed in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = output + layer(batch(seed, dtype=torch.float32)).float()
            if look:
                layer.output_mask(), layer.effective_weight()
        output.square().sum().backward()
        return layer.weight.grad

    assert torch.equal(train(look=True), train(look=False))


def test_decay_of_tied_layers():
    """Two layers with one Parameter: it decays once, as it does under decoupled decay."""
    net = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))).double()
    net[1].weight = net[0].weight
    decaying(net)
    net(batch()).square().sum().backward()
    alone = net[0].weight.grad.clone()
    expected = 0.5 * (net[0].weight - net[0].effective_weight()).detach()
    assert error(stepped_gradients(net)["0.weight"] - alone, expected) <= 1e-12
    assert net[0].state.step == net[1].state.step == 1


def test_functional_gradients_are_the_loss_s_alone():
    """The decay belongs to the optimizer's step: `torch.autograd.grad` does not see it."""
    net, plain = decaying(small_net()), decaying(small_net(), decay=0.0)
    found = torch.autograd.grad(net(batch()).sum(), list(net.parameters()))
    expected = torch.autograd.grad(plain(batch()).sum(), list(plain.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_computed_weight_decays_through_what_it_is_computed_from():
    """Parametrized after the conversion: the op adds the term, in the gradient of W itself."""
    layer = decaying(nn.Conv2d(4, 4, 1, bias=False).double())
    original = layer.weight.detach().clone()
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", _Twice())
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer(torch.zeros(1, 4, 2, 2, dtype=torch.float64)).sum().backward()
    expected = (layer.weight - layer.effective_weight()).detach()  # 0.5 · 2, by the chain rule
    torch.testing.assert_close(next(layer.parameters()).grad, expected)
    optimizer.step()
    torch.testing.assert_close(next(layer.parameters()).detach(), original - expected)
    assert layer.state.step == 1


class _Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


# ---------------------------------------------------------------- decoupled


def _decoupled(layers, decay=0.25):
    fst.convert(layers, fst.get_strategy("srste", decay=decay, decay_mode="decoupled"))
    return layers


@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_decoupled_decay_is_equation_6(lr):
    net = _decoupled(small_net())
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for _ in range(3):
        net.zero_grad()
        net(batch()).square().sum().backward()
        weights = [net[i].weight.detach().clone() for i in (0, 2)]
        kept = [w * reference_nm_mask(w, 2, 4, 1) for w in weights]
        grads = [net[i].weight.grad.clone() for i in (0, 2)]
        optimizer.step()
        for i, w, s, g in zip((0, 2), weights, kept, grads, strict=True):
            expected = w - lr * g - 0.25 * (w - s)
            torch.testing.assert_close(net[i].weight.detach(), expected)


def test_decoupled_decay_is_never_in_the_gradient():
    net = _decoupled(small_net())
    net(batch()).sum().backward()
    plain = small_net()
    fst.convert(plain, fst.get_strategy("srste", decay=0.0))
    plain(batch()).sum().backward()
    assert_close(stepped_gradients(net), stepped_gradients(plain))


def test_decoupled_decay_once_per_step_under_accumulation():
    net = _decoupled(nn.Sequential(nn.Conv2d(4, 4, 1)).double())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    before = net[0].weight.detach().clone()
    kept = net[0].effective_weight()
    for seed in range(3):
        net(batch(seed)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(net[0].weight.detach(), before - 0.25 * (before - kept))


def test_attach_notices_wrong_optimizers_and_models():
    net, plain = small_net(), small_net()
    fst.convert(net, "asp")
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.0) for model in (net, plain))
    with pytest.raises(ValueError, match="optimizer"):
        fst.attach(net, other)
    with pytest.raises(ValueError, match="convert"):
        fst.attach(plain, optimizer)
    for none in (None, "sgd", torch.optim.SGD):
        with pytest.raises(TypeError, match="optimizer is a .*; it must be a torch.optim.Optim"):
            fst.attach(net, none)
    fst.attach(net, optimizer)
    with pytest.raises(ValueError, match="attached to an optimizer already"):
        fst.attach(net, optimizer)


@pytest.mark.parametrize("row", [row for row in DEFAULTS if row.build().decay and not row.drawn])
def test_the_layer_equals_the_reference(row):
    """One training step of one layer, decay included."""
    layer = nn.Conv2d(4, 8, 3, padding=1).double()
    fst.convert(layer, row.build(decay=0.5))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    if layer.strategy.schedule is not None:
        attach(layer, optimizer)
    input = batch().requires_grad_()
    torch.manual_seed(5)
    start = torch.rand((), dtype=torch.float64)
    torch.manual_seed(5)
    output = layer(input)
    grad_output = torch.randn_like(output)
    output.backward(grad_output)
    acting = layer.current_strategy
    optimizer.step()
    expected = reference_conv2d(
        input,
        layer.weight,
        grad_output,
        bias=layer.bias,
        padding=1,
        strategy=acting,
        draws={"phase": 0, "start": start},
    )
    actual = (output.detach(), input.grad, layer.weight.grad, layer.bias.grad)
    assert all(error(a, e) <= 1e-10 for a, e in zip(actual, expected, strict=True))


def test_the_mask_of_a_step_without_a_call_is_planned_once():
    """As compiled code and graphs need it, in which a call leaves no mask for the decay."""
    layer = decaying(nn.Conv2d(4, 4, 1))
    masks, plans = [], set()
    for sign in (1, -1):
        with torch.no_grad():
            layer.weight.copy_(sign * torch.arange(16).reshape(4, 4, 1, 1) - 8)
        masks.append(layer.output_mask())
        plans.add(layer.transient.pruning[1])
        assert torch.equal(masks[-1], reference_nm_mask(layer.weight.detach(), 2, 4, 1))
    assert len(plans) == 1 and not torch.equal(*masks)
    with fst.backends.force(prune_weight="torch"):
        assert torch.equal(layer.output_mask(), masks[-1])
        assert layer.transient.pruning[1] not in plans


def test_a_compiled_model_trains_as_the_eager_one():
    torch._dynamo.reset()
    net = decaying(small_net(), "fst")
    net(batch()).sum().backward()
    expected = stepped_gradients(net)
    net.zero_grad()
    torch.compile(net, fullgraph=True, backend="aot_eager")(batch()).sum().backward()
    assert_close(stepped_gradients(net), expected)


def test_a_weight_that_changed_since_its_call_decays_by_its_own_mask():
    """Of values that a call has not seen, the mask of that call says nothing."""
    layer = nn.Conv2d(8, 4, 1, bias=False)
    fst.convert(layer, fst.get_strategy("srste", decay=0.5))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.randn(2, 8, 3, 3)).sum().backward()
    with torch.no_grad():
        layer.weight.copy_(torch.randn_like(layer.weight))
    before, gradient = layer.weight.detach().clone(), layer.weight.grad.clone()
    kept = layer.output_mask()
    optimizer.step()
    expected = before - 0.1 * (gradient + 0.5 * before * ~kept)
    torch.testing.assert_close(layer.weight.detach(), expected)
