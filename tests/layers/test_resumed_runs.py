"""Runs that are resumed from saved states, and states that are refused."""

import copy
import io
import warnings

import pytest
import torch

import fst
from tests.networks import (
    TRAINED,
    attach,
    batch,
    identity_layer,
    masks_of_steps,
    optimizer_for,
    small_net,
    train,
)
from tests.strategy_settings import setting


def _built(row, optimizer_of=lambda net: optimizer_for(net, lr=0.05, momentum=0.9), **overrides):
    """A small net under a row's strategy, attached to its optimizer."""
    net = small_net()
    fst.convert(net, row.build(**overrides))
    optimizer = optimizer_of(net)
    attach(net, optimizer)
    return net, optimizer


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("row", TRAINED)
def test_resume_is_bit_exact(row, frozen):
    """state_dict, optimizer and sparsity_state, through a file that weights_only accepts; the state
    holds the seed of random rules.
    """
    overrides = dict(interval=2) if row.name in ("tsm", "dpf", "rigl") else {}

    def optimizer_of(net):
        net[2].weight.requires_grad_(not frozen)
        return optimizer_for(net, lr=0.05, momentum=0.9)

    def build():
        return _built(row, optimizer_of, **overrides)

    net, optimizer = build()
    fst.seed_random_rules(net, 5)
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


@pytest.mark.parametrize("name", ["tsm", "srste", "sdgp-random", "resprop", "rigl"])
def test_a_rollback_within_a_run_is_a_resume(name):
    """After training calls since the last step, which the state knows nothing of."""
    row = setting(name)

    def build():
        net, optimizer = _built(row, **(dict(interval=4) if name in ("tsm", "rigl") else {}))
        fst.seed_random_rules(net, 5)
        return net, optimizer

    def resume(net, optimizer, model, momentum, sparsity):
        net.load_state_dict(model)
        optimizer.load_state_dict(copy.deepcopy(momentum))  # it would train on in it
        fst.load_sparsity_state(net, sparsity)
        train(net, optimizer, range(4, 7))
        return net.state_dict()

    net, optimizer = build()
    train(net, optimizer, range(4))
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), fst.sparsity_state(net)))
    with torch.no_grad():
        net[2].weight.neg_().add_(0.1)
    net(batch(7))
    found, expected = resume(net, optimizer, *saved), resume(*build(), *saved)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


REMEMBERING = ["tsm", "rigl", "clicktrain", "asfp", "resprop"]
OPTIMIZERS = {
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
    "adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.01),
    "plain": lambda net: torch.optim.SGD(net.parameters(), lr=0.05),  # has no state to load
}


def _resumed(row, optimizer, restore):
    """A run that is saved after three steps, and goes on in a new model; what was warned of."""

    net, made = _built(row, OPTIMIZERS[optimizer])
    train(net, made, range(3))
    file = io.BytesIO()
    torch.save((net.state_dict(), made.state_dict(), fst.sparsity_state(net)), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, other_made = _built(row, OPTIMIZERS[optimizer])
    restore(other, other_made, *saved)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(other, other_made, range(3, 6))
    return [str(w.message) for w in caught if "the weights were loaded" in str(w.message)]


def _by_hand(net, optimizer, model, momentum, sparsity):
    net.load_state_dict(model)
    optimizer.load_state_dict(momentum)


def _whole(net, optimizer, model, momentum, sparsity):
    _by_hand(net, optimizer, model, momentum, sparsity)
    fst.load_sparsity_state(net, sparsity)


def _state_first(net, optimizer, model, momentum, sparsity):
    fst.load_sparsity_state(net, sparsity)
    _by_hand(net, optimizer, model, momentum, sparsity)


def _dense_weights(net, optimizer, model, momentum, sparsity):
    net.load_state_dict(dict(model))  # without the metadata, as of a dense model


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", REMEMBERING)
def test_a_resumption_without_the_sparsity_state_is_warned_of_by_name_once(name, optimizer):
    (warned,) = _resumed(setting(name), optimizer, _by_hand)
    assert "layer '0'" in warned and repr(name) in warned and "load_sparsity_state" in warned


@pytest.mark.parametrize("restore", [_whole, _state_first, _dense_weights])
@pytest.mark.parametrize("optimizer", ["momentum", "plain"])
@pytest.mark.parametrize("name", REMEMBERING)
def test_other_loads_are_not_warned_of(name, optimizer, restore):
    """The whole state in any order, or weights that a training begins with."""
    assert not _resumed(setting(name), optimizer, restore)


@pytest.mark.parametrize("name", ["srste", "fst", "sampled", "sparsetrain"])
def test_strategies_that_remember_nothing_resume_without_a_warning(name):
    assert not _resumed(setting(name), "momentum", _by_hand)


def test_a_rollback_without_the_sparsity_state_is_warned_of():
    net = small_net()
    fst.convert(net, "tsm")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    train(net, optimizer, range(2))
    net.load_state_dict(net.state_dict())
    with pytest.warns(UserWarning, match="layer '0' and 1 more: .* masks that strategy 'tsm'"):
        train(net, optimizer, range(1))


def test_saved_state_is_a_snapshot():
    layer, unit = identity_layer(fst.get_strategy("tsm", interval=1))
    masks_of_steps(layer, unit, 1)
    state = fst.sparsity_state(layer)
    before = copy.deepcopy(state)
    masks_of_steps(layer, unit, 3)
    assert str(state) == str(before)


def test_state_of_another_strategy_or_model_is_refused():
    net = small_net()
    fst.convert(net, "tsm")
    state = fst.sparsity_state(net)
    for other_strategy in ("fst", fst.get_strategy("tsm", interval=7)):
        other = small_net()
        fst.convert(other, other_strategy)
        with pytest.raises(ValueError, match="strategy"):
            fst.load_sparsity_state(other, state)
    other = small_net()
    fst.convert(other, "tsm", include="0")
    with pytest.raises(ValueError, match="2"):
        fst.load_sparsity_state(other, state)
    with pytest.raises(ValueError, match="convert"):
        fst.load_sparsity_state(small_net(), state)


@pytest.mark.parametrize("broken", [None, 3, {"0": 1, "2": 2}, {"0": {}, "2": {}}])
def test_a_foreign_state_is_refused(broken):
    net = small_net()
    fst.convert(net, "tsm")
    with pytest.raises((ValueError, TypeError), match="state"):
        fst.load_sparsity_state(net, broken)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", -3),
        ("step", "a"),
        ("step", True),
        ("calls", -1),
        ("seed", "5"),
        ("kept_mask", torch.ones(3, dtype=torch.bool)),
        ("kept_mask", torch.ones(8, 8)),
        ("schedule_state", 3),
        ("memories", [1]),
    ],
)
def test_impossible_states_are_refused_before_anything_is_restored(field, value):
    layer, _ = identity_layer("tsm")
    state = fst.sparsity_state(layer)
    fst.load_sparsity_state(layer, {"0": {**state["0"], "step": 5}})
    with pytest.raises(ValueError, match=f"layer '0': {field}=.* must be"):
        fst.load_sparsity_state(layer, {"0": {**state["0"], field: value}})
    assert layer[0].state.step == 5


ORDERS = dict(grad_input="double", permutations=2)
STARTED = {"schedule_state": {"started": True}}
BAD_PHASE = {"schedule_state": {"started": True, "phase": {"wrong": 1}}}


@pytest.mark.parametrize(
    ("strategy", "options", "broken", "words"),
    [
        ("sste", {}, STARTED, "lacks 'factor'"),
        ("step", {}, STARTED, "lacks 'phase'"),
        ("step", {}, {"schedule_state": {"started": True, "phase": None}}, "lacks 'moment'"),
        ("acdc", dict(warmup=0.0), {"kept_mask": None}, "lacks 'kept_mask'"),
        ("acdc", {}, STARTED, "lacks 'phase'"),
        ("rigl", dict(n=2, m=4), {"kept_mask": None}, "lacks 'kept_mask'"),
        ("fst_w", ORDERS, STARTED, "lacks 'phase'"),
        (
            "fst_w",
            ORDERS,
            BAD_PHASE,
            "phase={'wrong': 1} .*none of strategy 'fst_w'",
        ),
        ("sdgf", {}, BAD_PHASE, "phase={'wrong': 1} .*none of strategy 'sdgf'"),
    ],
)
def test_states_that_a_schedule_cannot_go_on_with_are_refused(strategy, options, broken, words):
    net = small_net()
    fst.convert(net, strategy, **options)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    attach(net, optimizer)
    train(net, optimizer, range(2))
    state = fst.sparsity_state(net)
    fst.load_sparsity_state(net, state)
    with pytest.raises(ValueError, match=f"layer '2': .*{words}"):
        fst.load_sparsity_state(net, {**state, "2": {**state["2"], **broken}})
    assert str(fst.sparsity_state(net)) == str(state)
    train(net, optimizer, range(2, 4))
