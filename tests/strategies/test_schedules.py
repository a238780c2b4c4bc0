"""What all systems that prune weights between optimizer steps have in common."""

import copy
import math

import pytest
import torch
from torch import nn

import fst
from tests.networks import attach, batch, optimizer_for, small_net, train
from tests.strategies.weight_systems import (
    OPTIMIZERS,
    PHASED,
    SYSTEMS,
    Training,
    assert_resumes,
)
from tests.strategy_settings import SETTINGS, of_each_kind


@pytest.mark.parametrize("name", SYSTEMS)
def test_training_without_attach_is_an_error(name):
    net = small_net()
    fst.convert(net, name)
    with pytest.raises(RuntimeError, match=rf"{name}.*fst\.attach"):
        net(batch())
    with torch.no_grad():
        net(batch())
    net.eval()(batch())
    training = Training(name)
    training.step(0)
    copied = copy.deepcopy(training.net)
    with pytest.raises(RuntimeError, match=r"fst\.attach"):
        copied(batch())


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("asfp", "steps_per_epoch"),
        ("asfp", "total_steps"),
        ("dpf", "total_steps"),
        ("rigl", "total_steps"),
        ("clicktrain", "total_steps"),
    ],
)
def test_the_length_of_training_is_asked_for_before_it_begins(name, missing):
    net = small_net()
    fst.convert(net, name)
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    lengths = {k: 10 for k in ("total_steps", "steps_per_epoch") if k != missing}
    with pytest.raises(ValueError, match=rf"{missing}.*{name}"):
        fst.attach(net, optimizer, **lengths)
    for bad in (0, -1, math.nan, "10", True):
        with pytest.raises(ValueError, match=missing):
            fst.attach(net, optimizer, **lengths, **{missing: bad})
    fst.attach(net, optimizer, **lengths, **{missing: 10})


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.weight_norm])
def test_a_computed_weight_is_an_error(norm):
    """What is held at zero would be computed anew."""
    net = nn.Sequential(nn.Conv2d(4, 4, 3))
    fst.convert(net, "asp")
    norm(net[0])
    with pytest.raises(ValueError, match="'0' is computed from other parameters; 'asp'"):
        fst.attach(net, OPTIMIZERS["sgd"](net.parameters()))


def test_a_weight_of_two_layers_is_an_error():
    net = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2)))
    net[1].weight = net[0].weight
    fst.convert(net, "asp")
    with pytest.raises(ValueError, match=r"'0' and '1' share"):
        fst.attach(net, OPTIMIZERS["sgd"](net.parameters()))


def test_a_reported_loss_must_be_a_tensor():
    net = small_net()
    fst.convert(net, "prunetrain")
    attachment = fst.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), steps_per_epoch=1)
    with pytest.raises(TypeError, match=r"loss=1\.5 must be the tensor"):
        attachment.report_loss(1.5)


@pytest.mark.parametrize("name", [*SYSTEMS, "tsm"])
def test_compiled_training_is_an_error(name):
    training = Training(name)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"torch\.compile cannot trace"):
        torch.compile(training.net, backend="eager", fullgraph=True)(batch())


@pytest.mark.parametrize("name", ["rigl", "tsm"])
def test_a_kept_mask_is_compiled_for_evaluation(name):
    training = Training(name)
    training.step(0)
    with torch.no_grad():
        training.net[0].weight.copy_(torch.randn_like(training.net[0].weight))
        training.net.eval()
        torch._dynamo.reset()
        compiled = torch.compile(training.net, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(batch()), training.net(batch()))


RESUMED = {
    **PHASED,
    "rigl-2:4": PHASED["rigl"],
    **{"asp": {}, "asfp": {}, "dpf": dict(interval=3), "rigl": dict(interval=3), "step": {}},
    "clicktrain": dict(choose=0.3, enforce=0.6),
    "resprop": dict(threshold=0.01, warmup=4),
}
STOPS = (1, 3, 5, 7, 9, 12, 13, 15, 18)


def _each_stop():
    """All crossings; of each strategy a third of the stops, with one optimizer, run in part."""
    for index, name in enumerate(RESUMED):
        for at, stop in enumerate(STOPS):
            for which, optimizer in enumerate(("sgd", "adamw")):
                runs = at % 3 == index % 3 and (which == at % 2 or name == "step")
                if name != "step" or optimizer == "adamw":
                    marks = () if runs else pytest.mark.exhaustive
                    yield pytest.param(name, stop, optimizer, marks=marks)


@pytest.mark.parametrize(("name", "stop", "optimizer"), _each_stop())
def test_resume_in_any_phase(name, optimizer, stop):
    def training():
        found = Training(name.partition("-")[0], optimizer, **RESUMED[name])
        for group in found.optimizer.param_groups:
            group["lr"] = 0.01
        return found

    assert_resumes(training, stop)


def _trained(row, closure):
    """The model after 20 steps, with gradients made in the steps or before them."""
    net = small_net()
    fst.convert(net, row.build())
    fst.seed_random_rules(net, 3)
    optimizer = optimizer_for(net, lr=0.1, momentum=0.9, weight_decay=1e-2)
    attachment = attach(net, optimizer)
    for step in range(20):

        def loss(step=step):
            optimizer.zero_grad()
            found = net(batch(step)).tanh().square().mean()
            attachment.report_loss(found)
            found.backward()
            return found

        if closure:
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()
    return net


@pytest.mark.parametrize(
    "row", of_each_kind([row for row in SETTINGS if row.build().schedule is not None])
)
def test_gradients_made_in_a_closure_are_those_that_schedules_see(row):
    nets = [_trained(row, closure) for closure in (False, True)]
    plain, closure = (net.state_dict() for net in nets)
    assert all(torch.equal(plain[name], closure[name]) for name in plain)
    plain, closure = map(fst.sparsity_state, nets)
    assert str(plain) == str(closure)
    for name in plain:
        masks = plain[name]["kept_mask"], closure[name]["kept_mask"]
        assert masks == (None, None) or torch.equal(*masks)


def test_a_closure_called_twice_in_a_step_is_refused():
    net = small_net()
    fst.convert(net, "asp")
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)
    attach(net, optimizer)

    def loss():
        optimizer.zero_grad()
        found = net(batch()).square().mean()
        found.backward()
        return found

    with pytest.raises(RuntimeError, match="LBFGS.step calls its closure several times: .*'asp'"):
        optimizer.step(loss)


@pytest.mark.parametrize("name", SYSTEMS)
def test_looking_between_steps_changes_nothing(name):
    options = dict(interval=3) if name in ("dpf", "rigl") else {}
    plain, watched = Training(name, **options), Training(name, **options)
    for step in range(12):
        fst.fold(watched.net), fst.sparsity_state(watched.net)
        watched.net.eval()(batch(step))
        watched.net.train()
        plain.step(step), watched.step(step)
    for p, q in zip(plain.net.parameters(), watched.net.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", ["dpf", "rigl", "clicktrain", "asfp"])
def test_weights_that_are_not_two_of_four_do_not_pass_as_such(name):
    training = Training(name, **(dict(ramp=0.0) if name == "dpf" else {}))
    training.steps(20)
    assert not fst.verify(training.net).ok
    assert not fst.verify(fst.fold(training.net)).ok


def test_reports_say_what_is_simulated_and_why():
    def report(name):
        return str(fst.convert(small_net(), name))

    assert "unstructured: no hardware path" in report("dpf")
    assert "unstructured: no hardware path" in report("rigl")
    assert "kernel patterns need a compiler" in report("clicktrain")
    assert "filters zeroed after each epoch" in report("asfp")
    assert "mask of the trained model, frozen" in report("asp")


def test_masks_have_the_weights_memory_format():
    net = small_net().to(memory_format=torch.channels_last)
    fst.convert(net, "rigl")
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    fst.attach(net, optimizer, total_steps=10)
    net(batch())
    for layer in fst.sparse_layers(net).values():
        assert layer.state.kept_mask.stride() == layer.weight.stride()


def test_a_removed_attachment_leaves_the_optimizer_alone():
    training = Training("asp")
    training.step(0)
    training.attachment.remove()
    for p in training.net.parameters():
        p.grad = torch.ones_like(p)
    training.optimizer.step()
    assert (training.net[0].weight != 0).all()
    fst.attach(training.net, training.optimizer)


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_step_of_another_optimizer_is_an_error(name):
    training = Training(name)
    training.step(0)
    other = OPTIMIZERS["adamw"](training.net.parameters())
    with pytest.raises(RuntimeError, match=rf"AdamW.*{name}.*another optimizer.*remove"):
        train(training.net, other, range(1))


def test_several_optimizers_train_a_model():
    """Each of the layers that it holds; those with a schedule go to one, or part by part."""
    for name, parts in (("srste", lambda net: (net, net)), ("asp", lambda net: (net[0], net[2]))):
        net = small_net()
        fst.convert(net, name)
        optimizers = [torch.optim.SGD(net[index].parameters(), lr=0.1) for index in (0, 2)]
        for part, optimizer in zip(parts(net), optimizers, strict=True):
            fst.attach(part, optimizer)
        net(batch()).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert [layer.state.step for layer in fst.sparse_layers(net).values()] == [1, 1]
        assert fst.verify(fst.fold(net)).ok


def test_steps_go_on_beside_a_frozen_layer():
    """Which needs no optimizer, and counts no steps."""
    net = small_net()
    fst.convert(net, fst.get_strategy("asfp", goal=0.9))
    net[0].requires_grad_(False)
    optimizer = OPTIMIZERS["sgd"](net[2:].parameters())
    fst.attach(net, optimizer, total_steps=4, steps_per_epoch=2)
    train(net, optimizer, range(2))
    assert [layer.state.step for layer in fst.sparse_layers(net).values()] == [0, 2]
    assert (net[2].weight.flatten(1) == 0).all(1).any(), "an epoch is over"


@pytest.mark.parametrize("name", SYSTEMS)
def test_training_in_eval_mode_is_an_error(name):
    training = Training(name)
    training.net.eval()
    with pytest.raises(RuntimeError, match=rf"'0' has a gradient.*{name}.*model\.train\(\)"):
        training.step(0)


def test_an_attached_model_can_be_folded_in_place():
    training = Training("asp")
    net = training.net
    training.step(0)
    fst.fold(net[2], inplace=True)
    training.step(1)
    assert fst.verify(net[0]).ok and not fst.verify(net[2]).ok
    fst.fold(net, inplace=True)
    training.step(2)
    training.attachment.remove()


def test_linear_layers_follow_schedules_too():
    for name in SYSTEMS:
        options = dict(interval=1, sparsity=0.9) if name in ("dpf", "rigl") else {}
        training = Training(name, total=6, epoch=2, include="*", **options)
        training.steps(6)
        assert (fst.fold(training.net)[4].weight == 0).any(), name


@pytest.mark.parametrize(
    ("name", "options", "sparse"),
    [
        ("sste", dict(dense_tail=0.25), "11111100"),
        ("tsrste", dict(dense_tail=0.5), "11110000"),
        ("sdgf", dict(dense_start=0.25), "00111111"),
    ],
)
def test_dense_phases_begin_and_end_at_their_step(name, options, sparse):
    training, found = Training(name, total=8, epoch=4, **options), ""
    for seed in range(8):
        training.backward(seed)
        found += "01"[training.layers[0].current_strategy.output is not None]
        training.optimizer.step()
    assert found == sparse
