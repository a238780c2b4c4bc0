"""Converted models in training and evaluation: when masks are made, when the decay is added."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fst
from fst.ops.reference import reference_conv2d, reference_nm_mask
from tests.core.cases import error
from tests.strategy_settings import DEFAULTS, DETERMINISTIC, SETTINGS, setting

TRAINED = [
    row
    for row in SETTINGS
    if row in DEFAULTS
    or row.id in ("fst-flat", "fst-block2x2", "fst-phase_random", "fst-im2col", "fst-decoupled")
    or row.id in ("sdgp-random", "srste-random", "srste-backward", "wx-alternating", "tsm-4:8")
]


def _net(double=True):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(72, 4)
    )
    return net.double() if double else net


def _batch(seed=0, size=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, 5, 5, generator=generator, dtype=torch.float64).to(dtype)


def _gradients(net):
    return {name: p.grad.clone() for name, p in net.named_parameters()}


def _assert_close(actual, expected, tolerance=1e-12):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert error(actual[name], expected[name]) <= tolerance, name


def _plain(layers, strategy="srste", decay=0.5):
    fst.convert(layers, fst.get_strategy(strategy, decay=decay))
    return layers


# ---------------------------------------------------------------- whole networks


@pytest.mark.parametrize("row", [row for row in TRAINED if row.id != "tsm-4:8"])
def test_resnet18_trains(row):
    models = pytest.importorskip("torchvision.models")
    model = models.resnet18(num_classes=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    report = fst.convert(model, row.build())
    assert len(report.converted) + len(report.skipped) == 21
    fst.attach(model, optimizer)
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
    dense = _net(double=False)
    model = copy.deepcopy(dense)
    fst.convert(model, row.build(), include="0")
    input = _batch(dtype=torch.float32)
    for network in (dense, model):
        network(input).square().sum().backward()
    names = ["2.weight", "2.bias", "4.weight", "4.bias", "0.bias"]
    if "grad_weight" in row.dense:
        names.append("0.weight")
    gradients, expected = _gradients(model), _gradients(dense)
    for name in names:
        if name == "0.bias" and "grad_weight" not in row.dense:
            torch.testing.assert_close(gradients[name], expected[name])
        else:
            assert torch.equal(gradients[name], expected[name]), name


# ---------------------------------------------------------------- S(W) in evaluation


@pytest.fixture
def prunings(monkeypatch):
    """A list that grows by one whenever a layer computes S(W)."""
    import fst.modules

    calls, original = [], fst.modules.prune_weight
    monkeypatch.setattr(
        fst.modules, "prune_weight", lambda *a, **k: calls.append(1) or original(*a, **k)
    )
    return calls


def test_evaluation_computes_the_masks_once(prunings):
    net = _net()
    fst.convert(net, "fst")
    net.eval()
    with torch.no_grad():
        for seed in range(3):
            net(_batch(seed))
    assert len(prunings) == 2
    net.requires_grad_(False)
    net(_batch())
    assert len(prunings) == 2


def test_a_training_step_computes_the_masks_once(prunings):
    net = nn.Conv2d(4, 4, 3, padding=1)
    fst.convert(net, "fst")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    input = torch.randn(2, 4, 5, 5)
    for step in range(3):
        net(net(input)).sum().backward()
        optimizer.step()
        assert len(prunings) == step + 1


CHANGES = {
    "in_place": lambda net, new: net[0].weight.copy_(new),
    "copy_to_data": lambda net, new: net[0].weight.data.copy_(new),
    "new_data": lambda net, new: setattr(net[0].weight, "data", new.clone()),
    "new_parameter": lambda net, new: setattr(net[0], "weight", nn.Parameter(new.clone())),
    "load_state_dict": lambda net, new: net.load_state_dict({**net.state_dict(), "0.weight": new}),
    "assign": lambda net, new: net.load_state_dict(
        {**net.state_dict(), "0.weight": new}, assign=True
    ),
}


@pytest.mark.parametrize("row", [row for row in DEFAULTS if row.prunes_weight])
@pytest.mark.parametrize("change", CHANGES)
def test_evaluation_follows_the_weight(row, change):
    net = _net()
    fst.convert(net, row.build())
    net.eval()
    before = net(_batch())
    new = torch.randn_like(net[0].weight)
    with torch.no_grad():
        CHANGES[change](net, new)
    if "data" in change:  # past torch's own bookkeeping: noticed at the switch of the mode
        net.train()
        net.eval()
    if row.name == "tsm":  # its mask is refreshed in training only, and is applied to new values
        expected = net[0].effective_weight()
        assert torch.equal(expected[expected != 0], new[expected != 0])
    else:
        expected = new * reference_nm_mask(new, 2, 4, 1)
        assert torch.equal(net[0].effective_weight(), expected)
    actual = net(_batch())
    assert not torch.equal(actual, before)
    torch.testing.assert_close(actual, fst.fold(net).eval()(_batch()))


@pytest.mark.parametrize("row", [row for row in DEFAULTS if row.prunes_weight])
def test_evaluation_follows_the_optimizer(row):
    net = _net()
    fst.convert(net, row.build())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for _ in range(3):
        net.train()
        net(_batch()).sum().backward()
        optimizer.step()
        net.eval()
        with torch.no_grad():
            torch.testing.assert_close(net(_batch()), fst.fold(net)(_batch()))


def test_functional_call_sees_the_weights_it_is_given():
    net = _net()
    fst.convert(net, "fst")
    net.eval()
    own = net(_batch())
    other = copy.deepcopy(net)
    with torch.no_grad():
        for p in other.parameters():
            p.normal_()
    swapped = torch.func.functional_call(net, dict(other.named_parameters()), (_batch(),))
    torch.testing.assert_close(swapped, other(_batch()))
    assert torch.equal(net(_batch()), own)


def test_averaged_model():
    net = _net()
    fst.convert(net, "fst")
    averaged = torch.optim.swa_utils.AveragedModel(net)
    averaged.update_parameters(net)
    averaged.eval()(_batch())
    with torch.no_grad():
        net[0].weight.normal_()
    averaged.update_parameters(net)
    torch.testing.assert_close(averaged(_batch()), fst.fold(averaged.module).eval()(_batch()))


# ---------------------------------------------------------------- decay


def test_decay_by_hand():
    layer = _plain(nn.Conv2d(4, 1, 1, bias=False).double())
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 7, -3, 2]).reshape(1, 4, 1, 1))
    layer(torch.zeros(1, 4, 2, 2, dtype=torch.float64)).sum().backward()
    assert layer.weight.grad.flatten().tolist() == [0.5, 0, 0, 1.0]
    assert layer.weight.flatten().tolist() == [1, 7, -3, 2]


@pytest.mark.parametrize("calls", [2, 3])
def test_a_shared_layer_decays_once(calls):
    layer = _plain(nn.Conv2d(4, 4, 3, padding=1).double())
    plain = copy.deepcopy(layer)
    plain.strategy = fst.get_strategy("srste", decay=0.0)
    for network in (layer, plain):
        x = _batch()
        for _ in range(calls):
            x = network(x).tanh()
        x.sum().backward()
    difference = layer.weight.grad - plain.weight.grad
    expected = 0.5 * (layer.weight - layer.effective_weight())
    assert error(difference, expected.detach()) <= 1e-12


def test_every_step_decays():
    layer = _plain(nn.Conv2d(4, 4, 1, bias=False).double())
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
    net = _plain(_net())
    net(_batch()).sum().backward()
    expected = _gradients(net)
    net.zero_grad(set_to_none=set_to_none)
    net(_batch()).sum().backward()
    _assert_close(_gradients(net), expected)


def test_a_forward_pass_without_backward_does_not_take_the_decay():
    net = _plain(_net())
    net(_batch()).sum().backward()
    expected = _gradients(net)
    net.zero_grad()
    net(_batch(1))  # dropped
    with torch.no_grad():
        net(_batch(2))
    net.eval()
    net(_batch(3))
    net.train()
    net(_batch()).sum().backward()
    _assert_close(_gradients(net), expected)


def test_a_dropped_forward_pass_of_the_same_step_does_not_take_the_decay():
    net = _plain(_net())
    net(_batch()).sum().backward()
    expected = _gradients(net)
    net.zero_grad()
    net(_batch(1))  # with autograd, but never backwards; no change of mode in between
    net(_batch()).sum().backward()
    _assert_close(_gradients(net), expected)


@pytest.mark.parametrize("row", [row for row in DETERMINISTIC if row in DEFAULTS])
def test_gradient_accumulation_equals_one_batch(row):
    """Two half batches with half the loss: the same gradient, the decay in it once."""
    net = _net()
    overrides = dict(decay=0.5) if row.build().decay else {}
    fst.convert(net, row.build(**overrides))
    batch = _batch(size=4)
    net(batch).square().mean().backward()
    expected = _gradients(net)
    net.zero_grad()
    for half in batch.split(2):
        (net(half).square().mean() / 2).backward()
    _assert_close(_gradients(net), expected, 1e-10)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("row", [row for row in DETERMINISTIC if row in DEFAULTS])
def test_activation_checkpointing_changes_nothing(row, reentrant):
    net = _net()
    overrides = dict(decay=0.5) if row.build().decay else {}
    fst.convert(net, row.build(**overrides))
    net(_batch().requires_grad_()).square().sum().backward()
    expected = _gradients(net)
    net.zero_grad()
    x = _batch().requires_grad_()
    x = checkpoint(net[0], x, use_reentrant=reentrant)
    x = checkpoint(net[1:], x, use_reentrant=reentrant)
    x.square().sum().backward()
    _assert_close(_gradients(net), expected)


class _Scaler:
    """What GradScaler does to a loss."""

    factor = 1024.0

    def scale(self, value):
        return value * self.factor


def test_decay_is_scaled_as_the_loss_is():
    net = _plain(_net())
    net(_batch()).sum().backward()
    expected = _gradients(net)
    scaler = _Scaler()
    fst.set_grad_scaler(net, scaler)
    for factor in (1024.0, 8.0):  # a dynamic scale
        scaler.factor = factor
        net.zero_grad()
        scaler.scale(net(_batch()).sum()).backward()
        _assert_close({k: g / factor for k, g in _gradients(net).items()}, expected)
    fst.set_grad_scaler(net, None)
    net.zero_grad()
    net(_batch()).sum().backward()
    _assert_close(_gradients(net), expected)


def test_the_real_grad_scaler_is_accepted():
    net = _plain(_net(double=False))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    net(_batch(dtype=torch.float32)).sum().backward()
    expected = _gradients(net)
    net.zero_grad()
    fst.set_grad_scaler(net, scaler)
    scaler.scale(net(_batch(dtype=torch.float32)).sum()).backward()
    _assert_close({k: g / 256.0 for k, g in _gradients(net).items()}, expected, 1e-6)


def test_setting_a_scaler_needs_a_converted_model():
    with pytest.raises(ValueError, match="convert"):
        fst.set_grad_scaler(nn.Conv2d(4, 4, 3), _Scaler())


# ---------------------------------------------------------------- decoupled decay


def _decoupled(layers, decay=0.25):
    fst.convert(layers, fst.get_strategy("srste", decay=decay, decay_mode="decoupled"))
    return layers


def test_decoupled_decay_needs_attach():
    net = _decoupled(_net())
    with pytest.raises(RuntimeError, match=r"fst\.attach"):
        net(_batch()).sum().backward()
    with torch.no_grad():
        net(_batch())
    net.eval()(_batch())


@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_decoupled_decay_is_equation_6(lr):
    net = _decoupled(_net())
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    handle = fst.attach(net, optimizer)
    for _ in range(3):
        net.zero_grad()
        net(_batch()).square().sum().backward()
        weights = [net[i].weight.detach().clone() for i in (0, 2)]
        kept = [w * reference_nm_mask(w, 2, 4, 1) for w in weights]
        grads = [net[i].weight.grad.clone() for i in (0, 2)]
        optimizer.step()
        for i, w, s, g in zip((0, 2), weights, kept, grads, strict=True):
            expected = w - lr * g - 0.25 * (w - s)
            torch.testing.assert_close(net[i].weight.detach(), expected)
    handle.remove()
    with pytest.raises(RuntimeError, match=r"fst\.attach"):
        net(_batch())
    before = net[0].weight.detach().clone()
    torch.optim.SGD(net.parameters(), lr=0.0).step()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(net[0].weight, before)


def test_decoupled_decay_is_never_in_the_gradient():
    net = _decoupled(_net())
    fst.attach(net, torch.optim.SGD(net.parameters(), lr=0.1))
    net(_batch()).sum().backward()
    plain = _net()
    fst.convert(plain, fst.get_strategy("srste", decay=0.0))
    plain(_batch()).sum().backward()
    _assert_close(_gradients(net), _gradients(plain))


def test_decoupled_decay_once_per_step_under_accumulation():
    net = _decoupled(nn.Sequential(nn.Conv2d(4, 4, 1)).double())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    fst.attach(net, optimizer)
    before = net[0].weight.detach().clone()
    kept = net[0].effective_weight()
    for seed in range(3):
        net(_batch(seed)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(net[0].weight.detach(), before - 0.25 * (before - kept))


def test_attach_notices_the_wrong_optimizer():
    net = _decoupled(_net())
    with pytest.raises(ValueError, match="optimizer"):
        fst.attach(net, torch.optim.SGD(_net().parameters(), lr=0.1))
    with pytest.raises(ValueError, match="convert"):
        fst.attach(_net(), torch.optim.SGD(net.parameters(), lr=0.1))


def test_attaching_twice_decays_once():
    net = _decoupled(nn.Sequential(nn.Conv2d(4, 4, 1)).double())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    try:
        handles = [fst.attach(net, optimizer), fst.attach(net, optimizer)]
    except (ValueError, RuntimeError) as refused:
        assert "attach" in str(refused)
        return
    before, kept = net[0].weight.detach().clone(), net[0].effective_weight()
    net(_batch()).sum().backward()
    optimizer.step()
    torch.testing.assert_close(net[0].weight.detach(), before - 0.25 * (before - kept))
    assert len(handles) == 2


@pytest.mark.parametrize("row", [row for row in DEFAULTS if row.build().decay])
def test_the_layer_equals_the_reference(row):
    """One training step of one layer, decay included."""
    layer = nn.Conv2d(4, 8, 3, padding=1).double()
    fst.convert(layer, row.build(decay=0.5))
    input = _batch().requires_grad_()
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
    net = _plain(_net(), "fst")
    net(_batch()).sum().backward()
    expected = _gradients(net)
    net.zero_grad()
    torch.compile(net, fullgraph=True, backend="aot_eager")(_batch()).sum().backward()
    _assert_close(_gradients(net), expected)


# ---------------------------------------------------------------- kept and drawn masks


def _identity_layer(strategy, channels=8):
    """A 1x1 layer and an input of which the output shows S(W)."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Conv2d(channels, channels, 1, bias=False)).double()
    fst.convert(layer, strategy)
    return layer, torch.eye(channels, dtype=torch.float64)[:, :, None, None]


def _masks_of_steps(layer, unit, steps, between=lambda step: None):
    masks = []
    for step in range(steps):
        output = layer(unit)
        masks.append(output.detach()[:, :, 0, 0].T != 0)
        output.sum().backward()
        between(step)
        with torch.no_grad():  # the optimizer: wholly different weights
            generator = torch.Generator().manual_seed(step)
            layer[0].weight.copy_(
                torch.randn(layer[0].weight.shape, generator=generator, dtype=torch.float64)
            )
    return masks


@pytest.mark.parametrize("interval", [1, 3])
def test_tsm_refreshes_its_mask_every_interval_steps(interval):
    layer, unit = _identity_layer(fst.get_strategy("tsm", interval=interval))
    masks = _masks_of_steps(layer, unit, 8)
    for step in range(1, 8):
        same = torch.equal(masks[step], masks[step - 1])
        assert same == (step % interval != 0), step
    for mask in masks:
        assert (mask.reshape(2, 4, 8).sum(1) == 2).all()
        assert (mask.reshape(8, 2, 4).sum(2) == 2).all()


def _look(layer):
    """Everything that only looks."""
    layer[0].output_mask()
    layer[0].effective_weight()
    fst.verify(layer)
    fst.sparsity_state(layer)
    fst.fold(layer)
    copy.deepcopy(layer)
    repr(layer)


@pytest.mark.parametrize("id", ["tsm", "srste-random", "srste"])
@pytest.mark.parametrize("grad", [True, False])
def test_looking_at_a_layer_changes_nothing(id, grad):
    row = setting(id)
    strategy = row.build(interval=3) if id == "tsm" else row.build()

    def run(between):
        layer, unit = _identity_layer(strategy)
        fst.seed_random_rules(layer, 7)
        return _masks_of_steps(layer, unit, 8, between(layer)), layer[0].weight.grad

    def look(layer):
        def between(step):
            with torch.set_grad_enabled(grad):
                _look(layer)

        return between

    masks, gradient = run(lambda layer: lambda step: None)
    watched, watched_gradient = run(look)
    for step in range(8):
        assert torch.equal(masks[step], watched[step]), step
    assert torch.equal(gradient, watched_gradient)


def test_evaluation_in_between_changes_no_refresh():
    def between(layer):
        def evaluate(step):
            layer.eval()
            with torch.no_grad():
                layer(torch.randn(2, 8, 3, 3, dtype=torch.float64))
            layer.train()

        return evaluate

    strategy = fst.get_strategy("tsm", interval=3)
    layer, unit = _identity_layer(strategy)
    expected = _masks_of_steps(layer, unit, 8)
    layer, unit = _identity_layer(strategy)
    actual = _masks_of_steps(layer, unit, 8, between(layer))
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_random_masks_follow_seed_layer_and_step():
    def masks(seed, rank=0, steps=3):
        layer, unit = _identity_layer(setting("srste-random").build())
        fst.seed_random_rules(layer, seed, rank)
        torch.manual_seed(torch.seed())  # the global generator does not matter
        return _masks_of_steps(layer, unit, steps)

    first = masks(1)
    assert all(torch.equal(a, b) for a, b in zip(first, masks(1), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, masks(1, rank=3), strict=True))
    assert not torch.equal(first[0], first[1]), "a new draw at each step"
    assert not torch.equal(first[0], masks(2)[0])
    net = nn.Sequential(*(nn.Conv2d(16, 16, 1) for _ in range(2)))
    fst.convert(net, setting("srste-random").build())
    fst.seed_random_rules(net, 1)
    net(torch.randn(1, 16, 1, 1))
    assert not torch.equal(net[0].output_mask(), net[1].output_mask()), "each layer its own"


def test_random_gradient_masks_differ_between_ranks_and_calls():
    def masks(rank):
        torch.manual_seed(0)
        layer = nn.Conv2d(8, 8, 1, bias=False).double()
        fst.convert(layer, setting("sdgp-random").build())
        fst.seed_random_rules(layer, 1, rank)
        with torch.no_grad():
            layer.weight.copy_(torch.eye(8)[:, :, None, None])
        inputs = [torch.zeros(4, 8, 3, 3, dtype=torch.float64, requires_grad=True) for _ in "ab"]
        sum(layer(x).sum() for x in inputs).backward()
        return [x.grad != 0 for x in inputs]

    first = masks(0)
    assert all(torch.equal(a, b) for a, b in zip(first, masks(0), strict=True))
    assert not torch.equal(first[0], first[1]), "two calls in a step"
    assert not torch.equal(first[0], masks(1)[0]), "two ranks"


# ---------------------------------------------------------------- resume


@pytest.mark.parametrize("row", TRAINED)
def test_resume_is_bit_exact(row):
    """state_dict, optimizer and sparsity_state, through a file that weights_only accepts."""
    overrides = dict(interval=2) if row.name == "tsm" else {}

    def build():
        net = _net()
        fst.convert(net, row.build(**overrides))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        fst.attach(net, optimizer)
        fst.seed_random_rules(net, 5)
        return net, optimizer

    def train(net, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            net(_batch(step)).square().mean().backward()
            optimizer.step()

    net, optimizer = build()
    train(net, optimizer, range(3))
    file = io.BytesIO()
    saved = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "sparsity": fst.sparsity_state(net),
    }
    torch.save(saved, file)
    train(net, optimizer, range(3, 7))

    other, other_optimizer = build()
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["optimizer"])
    fst.load_sparsity_state(other, state["sparsity"])
    train(other, other_optimizer, range(3, 7))
    for (name, p), q in zip(net.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(p, q[1]), name
    assert str(fst.sparsity_state(net)) == str(fst.sparsity_state(other))


def test_saved_state_is_a_snapshot():
    layer, unit = _identity_layer(fst.get_strategy("tsm", interval=1))
    _masks_of_steps(layer, unit, 1)
    state = fst.sparsity_state(layer)
    before = copy.deepcopy(state)
    _masks_of_steps(layer, unit, 3)
    assert str(state) == str(before)


def test_state_of_another_strategy_or_model_is_refused():
    net = _net()
    fst.convert(net, "tsm")
    state = fst.sparsity_state(net)
    for other_strategy in ("fst", fst.get_strategy("tsm", interval=7)):
        other = _net()
        fst.convert(other, other_strategy)
        with pytest.raises(ValueError, match="strategy"):
            fst.load_sparsity_state(other, state)
    other = _net()
    fst.convert(other, "tsm", include="0")
    with pytest.raises(ValueError, match="2"):
        fst.load_sparsity_state(other, state)
    with pytest.raises(ValueError, match="convert"):
        fst.load_sparsity_state(_net(), state)


@pytest.mark.parametrize("broken", [None, 3, {"0": 1, "2": 2}, {"0": {}, "2": {}}])
def test_a_foreign_state_is_refused(broken):
    net = _net()
    fst.convert(net, "tsm")
    with pytest.raises((ValueError, TypeError), match="state"):
        fst.load_sparsity_state(net, broken)
