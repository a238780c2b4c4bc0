"""The decay with every kind of optimizer's step: scaled, fused, in a closure, nested, failed."""

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

import fst
from tests.cases import error
from tests.networks import (
    assert_close,
    batch,
    decaying,
    gradients,
    small_net,
    stepped_gradients,
    train,
)

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused_sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "foreach_adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused_adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def _trained(optimizer, mode="gradient", dtype=torch.float32, scaled=False, closure=False):
    """Weights after four steps; the loss is scaled by a GradScaler, or made in a closure."""
    net = small_net(double=False)
    fst.convert(net, fst.get_strategy("srste", decay=0.1, decay_mode=mode))
    optimizer = OPTIMIZERS[optimizer](net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
    for step in range(4):

        def loss(step=step):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                found = net(batch(step, dtype=torch.float32)).float().square().mean()
            scaler.scale(found).backward()
            return found

        if closure:
            optimizer.step(loss)
        else:
            loss()
            scaler.step(optimizer)
        scaler.update()
    return {name: p.detach().clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["gradient", "decoupled"])
def test_the_decay_is_never_scaled(optimizer, mode):
    """With a GradScaler and without; fused optimizers unscale the gradients themselves."""
    plain, scaled = (_trained(optimizer, mode, scaled=scaled) for scaled in (False, True))
    assert_close(scaled, plain, 1e-5)


@pytest.mark.parametrize("scaled", [False, True])
def test_float16_decays_as_float32(scaled):
    """The same weights up to rounding, whether a GradScaler is there or not."""
    half = _trained("sgd", dtype=torch.float16, scaled=scaled)
    assert_close(half, _trained("sgd"), 5e-3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["gradient", "decoupled"])
def test_gradients_made_in_a_closure_decay_too(optimizer, mode):
    plain, closure = (_trained(optimizer, mode, closure=closure) for closure in (False, True))
    assert_close(closure, plain, 1e-6)


def _lbfgs_step(layer):
    """One step of LBFGS on a loss that is constant: the decay is all that may move the weight."""
    optimizer = torch.optim.LBFGS(layer.parameters())

    def loss():
        optimizer.zero_grad()
        found = layer(torch.zeros(1, 4, 2, 2, dtype=torch.float64)).sum()
        found.backward()
        return found

    optimizer.step(loss)


def _layer(**options):
    layer = nn.Conv2d(4, 4, 1, bias=False).double()
    fst.convert(layer, fst.get_strategy("srste", **options))
    return layer


@pytest.mark.parametrize("wrap", [lambda layer: None, torch.nn.utils.parametrizations.weight_norm])
def test_a_decay_in_the_gradients_of_lbfgs_is_refused(wrap):
    """It compares losses, and the decay is in none of them."""
    layer = _layer(decay=0.5)
    wrap(layer)
    before = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match="LBFGS .*decay_mode='decoupled' or decay=0"):
        _lbfgs_step(layer)
    assert torch.equal(layer.weight, before)


def test_lbfgs_steps_with_a_decoupled_decay_and_without_one():
    for decay, mode in ((0.5, "decoupled"), (0.0, "gradient")):
        layer = _layer(decay=decay, decay_mode=mode)
        before, kept = layer.weight.detach().clone(), layer.effective_weight()
        _lbfgs_step(layer)
        torch.testing.assert_close(layer.weight.detach(), before - decay * (before - kept))
        assert layer.state.step == 1


class _Outer(torch.optim.Optimizer):
    """An optimizer that hands its step to another one, as sharded and lookahead optimizers do."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__([p for g in inner.param_groups for p in g["params"]], {})

    def step(self, closure=None):
        return self.inner.step(closure)


def test_a_step_within_a_step_decays_once():
    net, plain = decaying(small_net()), decaying(small_net())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (net, plain)]
    optimizers[0] = _Outer(optimizers[0])
    for model, optimizer in zip((net, plain), optimizers, strict=True):
        for step in range(2):
            optimizer.zero_grad()
            model(batch(step)).sum().backward()
            optimizer.step()
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    assert net[0].state.step == 2


class _Logged(torch.optim.Adam):
    """PyTorch calls the hooks around its step, and around its base class's."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("strategy", ["srste", "clicktrain", "step"])
def test_a_step_that_calls_its_base_classes_acts_once(strategy):
    found = []
    for kind in (torch.optim.Adam, _Logged, torch.optim.Adam):
        net = small_net()
        fst.convert(net, strategy)
        optimizer = kind(net.parameters(), lr=0.05)
        fst.attach(net, optimizer, total_steps=12, steps_per_epoch=2)
        train(net, optimizer, range(10))
        assert net[0].state.step == 10
        found.append({name: p.detach().clone() for name, p in net.named_parameters()})
    assert_close(found[1], found[0], 0)
    assert_close(found[2], found[0], 0)


@pytest.mark.system
def test_a_compiled_step_acts_as_the_eager_one():
    torch._dynamo.reset()
    eager, compiled = decaying(small_net()), decaying(small_net())
    for net, wrap in ((eager, lambda f: f), (compiled, torch.compile(backend="aot_eager"))):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        step = wrap(optimizer.step)
        for number in range(3):
            optimizer.zero_grad()
            net(batch(number)).square().mean().backward()
            step()
    assert compiled[0].state.step == 3
    assert_close(dict(compiled.named_parameters()), dict(eager.named_parameters()))


class _Failing(torch.optim.SGD):
    def step(self, closure=None):
        raise ArithmeticError


def test_a_step_that_failed_does_not_stop_the_next():
    net = decaying(small_net())
    failing = _Failing(net.parameters(), lr=0.1)
    net(batch()).sum().backward()
    expected = gradients(net)
    with pytest.raises(ArithmeticError):
        failing.step()
    net.zero_grad()
    net(batch()).sum().backward()
    found = stepped_gradients(net)
    pull = 0.5 * (net[0].weight - net[0].effective_weight()).detach()
    assert error(found["0.weight"] - expected["0.weight"], pull) <= 1e-12
    assert net[0].state.step == 1


def test_a_step_inside_frozen_is_refused():
    net = decaying(small_net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with fst.frozen(net):
        net(batch()).sum().backward()
        with pytest.raises(RuntimeError, match=r"layer '0' inside fst\.frozen"):
            optimizer.step()
    optimizer.step()


@pytest.mark.parametrize("wrap", [lambda layer: None, torch.nn.utils.parametrizations.weight_norm])
def test_a_decay_in_gradients_that_are_climbed_is_refused(wrap):
    net = decaying(small_net())
    wrap(net[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, maximize=True)
    net(batch()).sum().backward()
    with pytest.raises(RuntimeError, match="SGD: maximize=True"):
        optimizer.step()


def test_a_decoupled_decay_knows_no_direction():
    net = small_net()
    fst.convert(net, fst.get_strategy("srste", decay=0.5, decay_mode="decoupled"))
    before, kept = net[0].weight.detach().clone(), net[0].effective_weight()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0, maximize=True)
    net(batch()).sum().backward()
    optimizer.step()
    torch.testing.assert_close(net[0].weight.detach(), (before + kept) / 2)


@pytest.mark.parametrize(
    "wrap",
    [
        torch.nn.utils.parametrizations.weight_norm,
        lambda layer: torch.nn.utils.prune.l1_unstructured(layer, "weight", 0.25),
    ],
    ids=["weight_norm", "prune"],
)
def test_a_decoupled_decay_of_a_computed_weight_is_refused(wrap):
    net = small_net()
    fst.convert(net, fst.get_strategy("srste", decay_mode="decoupled"))
    wrap(net[2])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(batch()).sum().backward()
    with pytest.raises(RuntimeError, match="layer '2': decay_mode='decoupled'"):
        optimizer.step()


@pytest.mark.parametrize("kind", ["pruned", "normalised", "plain"])
def test_weights_that_torch_computes_train(kind):
    """Utilities of torch that replace the Parameter; every optimizer's step looks at the layer."""
    layer = nn.Sequential(decaying(nn.Conv2d(4, 8, 1, bias=False)), nn.Conv2d(8, 2, 1))
    if kind == "pruned":
        torch.nn.utils.prune.l1_unstructured(layer[0], "weight", 0.25)
    elif kind == "normalised":
        torch.nn.utils.parametrizations.weight_norm(layer[0])
    else:
        del layer[0].weight
        layer[0].weight = torch.randn(8, 4, 1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    before = layer[0].weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.randn(2, 4, 3, 3)).square().sum().backward()
        optimizer.step()
    layer(torch.randn(2, 4, 3, 3))
    assert layer[0].state.step == (0 if kind == "plain" else 2)
    assert torch.equal(layer[0].weight, before) == (kind == "plain")
