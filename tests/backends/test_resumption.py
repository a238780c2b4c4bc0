"""A training whose backends are chosen by measured times resumes to the bit."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fst
from fst import backends
from fst.backends import Record, choice
from fst.ops import cpp
from tests.strategy_settings import DEFAULTS, Setting, quick_first

STEPS = 10  # before the training stops, and after; zeros are counted anew in between
TOTAL = 40
# Whose weights get zeros after that: what comes into question then is measured, or on the disk.
LATER = ("acdc", "sdgf", "maxq", "dpf", "step", "asfp")
QUICK = ("srste", "fst", "fst_sampled", "sparsetrain", "sdgp", "rigl", "resprop", *LATER)
Raced = tuple[dict[str, float], dict[str, Exception]]
Race = Callable[..., Raced]


@pytest.fixture(autouse=True)
def _measured(tmp_path, monkeypatch) -> Iterator[None]:
    """Small products are timed too, and any gain counts."""
    monkeypatch.setenv("FST_AUTOTUNE", "1")
    monkeypatch.setenv("FST_CACHE_DIR", str(tmp_path / "first"))
    monkeypatch.delenv("FST_BACKENDS", raising=False)
    monkeypatch.setattr(choice, "LEAST_GAIN", 1.0)
    monkeypatch.setattr(choice, "LEAST_SAVED", 0.0)
    backends.forget_decisions()
    yield
    backends.forget_decisions()


def _times(log: list[str], *, later_is_faster: bool) -> Race:
    """Times by the order of the candidates' names, so that one of them clearly is the fastest."""

    def race(functions, *_: object, **__: object) -> Raced:
        log.append(" ".join(functions))
        names = sorted(functions, reverse=later_is_faster)
        return {name: 1.0 + place for place, name in enumerate(names)}, {}

    return race


class Training:
    """Convolutions whose operands have zeros, and a head, under a strategy."""

    def __init__(self, row: Setting, net: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        if net is None:
            net = nn.Sequential(
                *(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU()),
                *(nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU()),
                *(nn.Flatten(), nn.Linear(8 * 9, 8)),
            )
            fst.convert(net, row.build(), layers="all")
            fst.seed_random_rules(net, 0)
        self.net = net
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=0.005)
        self.attached = fst.attach(net, self.optimizer, total_steps=TOTAL, steps_per_epoch=4)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            torch.manual_seed(step)
            loss = self.net(torch.randn(4, 4, 6, 6, generator=generator).relu()).square().mean()
            self.attached.report_loss(loss)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def states(self) -> tuple[Any, Any, Any]:
        """What a checkpoint needs."""
        return self.net.state_dict(), self.optimizer.state_dict(), fst.sparsity_state(self.net)

    def load(self, model: Any, optimizer: Any, sparsity: Any) -> None:
        self.net.load_state_dict(model)
        self.optimizer.load_state_dict(copy.deepcopy(optimizer))
        fst.load_sparsity_state(self.net, sparsity)

    @property
    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.net.parameters()]

    @property
    def chosen(self) -> list[dict[str, str]]:
        layers = [m for m in self.net if hasattr(m, "state")]
        return [{k: d.backend for k, d in m.state.record.decisions.items()} for m in layers]


def assert_same(again: Training, whole: Training) -> None:
    """What the one chose since its beginning, and all weights."""
    for mine, other in zip(again.chosen, whole.chosen, strict=True):
        assert mine.items() <= other.items()
    for mine, other in zip(again.weights, whole.weights, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("row", quick_first(DEFAULTS, QUICK))
def test_a_resumed_training_and_a_copy_go_on_to_the_bit(row, tmp_path, monkeypatch):
    """Whatever the times are by then; on the disk nothing is needed of what was timed before."""
    log: list[str] = []
    monkeypatch.setattr("fst.backends.timing.race", _times(log, later_is_faster=True))
    whole = Training(row)
    whole.steps(0, STEPS)
    file = io.BytesIO()
    torch.save(whole.states, file)
    net = copy.deepcopy(whole.net)
    whole.steps(STEPS, 2 * STEPS)
    timed = any("dense" in names for names in log)
    assert timed or cpp.missing() or not row.build().skips_zeros

    file.seek(0)
    states = torch.load(file, weights_only=True)
    monkeypatch.setattr("fst.backends.timing.race", _times(log, later_is_faster=False))
    for name in ("resumed", "copied"):
        if row.id not in LATER:
            monkeypatch.setenv("FST_CACHE_DIR", str(tmp_path / name))
        backends.forget_decisions()
        again = Training(row, net if name == "copied" else None)
        if name == "resumed":
            again.load(*states)
        else:
            again.optimizer.load_state_dict(copy.deepcopy(states[1]))
        again.steps(STEPS, 2 * STEPS)
        assert_same(again, whole)
    backends.forget_decisions()
    monkeypatch.setenv("FST_CACHE_DIR", str(tmp_path / "other"))
    other = Training(row)
    other.steps(0, 1)
    assert (
        not timed or other.chosen != whole.chosen
    )  # what the state does not bring is measured anew


@pytest.mark.parametrize("row", quick_first(DEFAULTS, QUICK))
def test_where_nothing_is_measured_every_training_resumes_to_the_bit(row, tmp_path, monkeypatch):
    """Also where zeros come after the checkpoint, with nothing on the disk."""
    monkeypatch.setenv("FST_AUTOTUNE", "0")
    whole = Training(row)
    whole.steps(0, STEPS)
    states = copy.deepcopy(whole.states)
    whole.steps(STEPS, 2 * STEPS)
    monkeypatch.setenv("FST_CACHE_DIR", str(tmp_path / "resumed"))
    backends.forget_decisions()
    again = Training(row)
    again.load(*states)
    again.steps(STEPS, 2 * STEPS)
    assert_same(again, whole)


def test_a_state_of_another_machine_is_told_once_and_measured_anew(monkeypatch):
    (row,) = (row for row in DEFAULTS if row.id == "srste")
    monkeypatch.setattr("fst.backends.timing.race", _times([], later_is_faster=True))
    training = Training(row)
    training.steps(0, 1)
    state = fst.sparsity_state(training.net)
    assert all(entry["record"]["times"] for entry in state.values())
    monkeypatch.setattr(torch, "__version__", "another")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fst.load_sparsity_state(training.net, state)
    assert [w.category for w in caught] == [UserWarning]
    assert "chosen anew" in str(caught[0].message)
    assert not any(m.state.record.times for m in training.net if hasattr(m, "state"))


@pytest.mark.skipif(bool(cpp.missing()), reason="the C++ kernels are missing")
def test_a_share_that_moves_is_decided_by_the_times_at_hand(monkeypatch):
    """A time is proportional to what is left to do; the dense product's stays."""
    milliseconds, log = {"dense": 8.0, "zeros_input": 6.0}, []

    def race(functions, *_: object, **__: object) -> Raced:
        log.append(set(functions))
        return {name: milliseconds[name] for name in functions}, {}

    monkeypatch.setattr("fst.backends.timing.race", race)
    record, found = Record(), []
    monkeypatch.setattr("fst.api.functional.Record", lambda: record)
    weight = torch.randn(8, 8, 3, 3)
    for share in (0.5, 0.25, 0.75, 0.5):
        input = torch.ones(2, 8, 8, 8)
        input.view(-1)[: int(share * input.numel())] = 0
        record.shares.clear()
        fst.sparse_conv2d(input, weight, strategy="sparsetrain")
        found.append(record.decisions["output"])
    assert log == [{"dense", "zeros_input"}]
    assert [d.backend for d in found] == ["zeros_input", "dense", "zeros_input", "zeros_input"]
    assert [d.times["zeros_input"] for d in found] == [6.0, 9.0, 3.0, 6.0]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["srste", "fst", "sparsetrain", "sdgp", "fst_sampled"])
def test_where_nothing_is_timed_two_runs_are_equal(name, deterministic, monkeypatch):
    """With FST_AUTOTUNE=0, and with deterministic algorithms whatever FST_AUTOTUNE says."""

    def race(*_: object, **__: object) -> None:
        raise AssertionError("nothing may be timed")

    monkeypatch.setattr("fst.backends.timing.race", race)
    if not deterministic:
        monkeypatch.setenv("FST_AUTOTUNE", "0")
    (row,) = (row for row in DEFAULTS if row.id == name)
    runs = []
    torch.use_deterministic_algorithms(deterministic)
    try:
        for _ in range(2):
            backends.forget_decisions()
            training = Training(row)
            training.steps(0, 3)
            runs.append((training.weights, training.chosen))
    finally:
        torch.use_deterministic_algorithms(False)
    assert runs[0][1] == runs[1][1]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))
