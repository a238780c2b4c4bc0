"""SR-STE's decay: once per step, through the gradient or decoupled."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fst
from fst.attach import set_grad_scaler
from fst.ops.reference import reference_conv2d, reference_nm_mask
from tests.core.cases import error
from tests.core.networks import assert_close, attach, batch, decaying, gradients, small_net
from tests.strategy_settings import DEFAULTS, DETERMINISTIC

# ---------------------------------------------------------------- through the gradient


def test_decay_by_hand():
    layer = decaying(nn.Conv2d(4, 1, 1, bias=False).double())
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 7, -3, 2]).reshape(1, 4, 1, 1))
    layer(torch.zeros(1, 4, 2, 2, dtype=torch.float64)).sum().backward()
    assert layer.weight.grad.flatten().tolist() == [0.5, 0, 0, 1.0]
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
    difference = layer.weight.grad - plain.weight.grad
    expected = 0.5 * (layer.weight - layer.effective_weight())
    assert error(difference, expected.detach()) <= 1e-12


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
def test_a_discarded_gradient_takes_its_decay_with_it(set_to_none):
    """A skipped step (NaN, a probe of the gradients) must not lose the next one's decay."""
    net = decaying(small_net())
    net(batch()).sum().backward()
    expected = gradients(net)
    net.zero_grad(set_to_none=set_to_none)
    net(batch()).sum().backward()
    assert_close(gradients(net), expected)


def test_a_forward_pass_without_backward_does_not_take_the_decay():
    net = decaying(small_net())
    net(batch()).sum().backward()
    expected = gradients(net)
    net.zero_grad()
    net(batch(1))  # dropped
    with torch.no_grad():
        net(batch(2))
    net.eval()
    net(batch(3))
    net.train()
    net(batch()).sum().backward()
    assert_close(gradients(net), expected)


def test_a_dropped_forward_pass_of_the_same_step_does_not_take_the_decay():
    net = decaying(small_net())
    net(batch()).sum().backward()
    expected = gradients(net)
    net.zero_grad()
    net(batch(1))  # with autograd, but never backwards; no change of mode in between
    net(batch()).sum().backward()
    assert_close(gradients(net), expected)


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
    actual = net[0].weight.grad.clone()
    for layer in net:
        layer.strategy = fst.get_strategy("srste", decay=0.0)
    net.zero_grad()
    net(batch()).square().sum().backward()
    expected = 0.5 * (net[0].weight - net[0].effective_weight()).detach()
    assert error(actual - net[0].weight.grad, expected) <= 1e-12


class _Scaler:
    """What GradScaler does to a loss."""

    factor = 1024.0

    def scale(self, value):
        return value * self.factor


def test_decay_is_scaled_as_the_loss_is():
    net = decaying(small_net())
    net(batch()).sum().backward()
    expected = gradients(net)
    scaler = _Scaler()
    set_grad_scaler(net, scaler)
    for factor in (1024.0, 8.0):  # a dynamic scale
        scaler.factor = factor
        net.zero_grad()
        scaler.scale(net(batch()).sum()).backward()
        assert_close({k: g / factor for k, g in gradients(net).items()}, expected)
    set_grad_scaler(net, None)
    net.zero_grad()
    net(batch()).sum().backward()
    assert_close(gradients(net), expected)


def test_the_real_grad_scaler_is_accepted():
    net = decaying(small_net(double=False))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    net(batch(dtype=torch.float32)).sum().backward()
    expected = gradients(net)
    net.zero_grad()
    set_grad_scaler(net, scaler)
    scaler.scale(net(batch(dtype=torch.float32)).sum()).backward()
    assert_close({k: g / 256.0 for k, g in gradients(net).items()}, expected, 1e-6)


def test_setting_a_scaler_needs_a_converted_model():
    with pytest.raises(ValueError, match="convert"):
        set_grad_scaler(nn.Conv2d(4, 4, 3), _Scaler())


# ---------------------------------------------------------------- decoupled


def _decoupled(layers, decay=0.25):
    fst.convert(layers, fst.get_strategy("srste", decay=decay, decay_mode="decoupled"))
    return layers


def test_decoupled_decay_needs_attach():
    net = _decoupled(small_net())
    with pytest.raises(RuntimeError, match=r"fst\.attach"):
        net(batch()).sum().backward()
    with torch.no_grad():
        net(batch())
    net.eval()(batch())


@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_decoupled_decay_is_equation_6(lr):
    net = _decoupled(small_net())
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    handle = fst.attach(net, optimizer)
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
    handle.remove()
    with pytest.raises(RuntimeError, match=r"fst\.attach"):
        net(batch())
    before = net[0].weight.detach().clone()
    torch.optim.SGD(net.parameters(), lr=0.0).step()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(net[0].weight, before)


def test_decoupled_decay_is_never_in_the_gradient():
    net = _decoupled(small_net())
    fst.attach(net, torch.optim.SGD(net.parameters(), lr=0.1))
    net(batch()).sum().backward()
    plain = small_net()
    fst.convert(plain, fst.get_strategy("srste", decay=0.0))
    plain(batch()).sum().backward()
    assert_close(gradients(net), gradients(plain))


def test_decoupled_decay_once_per_step_under_accumulation():
    net = _decoupled(nn.Sequential(nn.Conv2d(4, 4, 1)).double())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    fst.attach(net, optimizer)
    before = net[0].weight.detach().clone()
    kept = net[0].effective_weight()
    for seed in range(3):
        net(batch(seed)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(net[0].weight.detach(), before - 0.25 * (before - kept))


def test_attach_notices_the_wrong_optimizer():
    net = _decoupled(small_net())
    with pytest.raises(ValueError, match="optimizer"):
        fst.attach(net, torch.optim.SGD(small_net().parameters(), lr=0.1))
    with pytest.raises(ValueError, match="convert"):
        fst.attach(small_net(), torch.optim.SGD(net.parameters(), lr=0.1))


def test_attaching_twice_decays_once():
    net = _decoupled(nn.Sequential(nn.Conv2d(4, 4, 1)).double())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    try:
        handles = [fst.attach(net, optimizer), fst.attach(net, optimizer)]
    except (ValueError, RuntimeError) as refused:
        assert "attach" in str(refused)
        return
    before, kept = net[0].weight.detach().clone(), net[0].effective_weight()
    net(batch()).sum().backward()
    optimizer.step()
    torch.testing.assert_close(net[0].weight.detach(), before - 0.25 * (before - kept))
    assert len(handles) == 2


@pytest.mark.parametrize("row", [row for row in DEFAULTS if row.build().decay])
def test_the_layer_equals_the_reference(row):
    """One training step of one layer, decay included."""
    layer = nn.Conv2d(4, 8, 3, padding=1).double()
    fst.convert(layer, row.build(decay=0.5))
    input = batch().requires_grad_()
    output = layer(input)
    grad_output = torch.randn_like(output)
    output.backward(grad_output)
    expected = reference_conv2d(
        input, layer.weight, grad_output, bias=layer.bias, padding=1, strategy=layer.strategy
    )
    actual = (output.detach(), input.grad, layer.weight.grad, layer.bias.grad)
    assert all(error(a, e) <= 1e-10 for a, e in zip(actual, expected, strict=True))


def test_a_compiled_model_trains_as_the_eager_one():
    torch._dynamo.reset()
    net = decaying(small_net(), "fst")
    net(batch()).sum().backward()
    expected = gradients(net)
    net.zero_grad()
    torch.compile(net, fullgraph=True, backend="aot_eager")(batch()).sum().backward()
    assert_close(gradients(net), expected)
