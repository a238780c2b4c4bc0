"""The registry and the chooser: which backend is chosen, why, and what is remembered."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fst
from fst import backends
from fst.backends import Record, choice, compute, registry, sources, store
from fst.backends import record as record_of_layers
from fst.backends.choice import Key, key_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _autotunes(tmp_path, monkeypatch):
    monkeypatch.setenv("FST_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FST_AUTOTUNE", "1")
    monkeypatch.delenv("FST_BACKENDS", raising=False)
    backends.forget_decisions()
    yield
    backends.forget_decisions()


@dataclass
class Number:
    """Operands of an operation that only these tests have."""

    size: int = 1
    names: tuple[str, ...] = ("first", "second")
    draws: bool = False
    is_all_zero: bool = False

    operation = kind = "number"
    trains = True
    device = CPU

    def key(self) -> Key:
        return key_of(torch.empty(2, self.size))

    def without_draws(self) -> Number:
        return self

    def first_samples(self, count: int) -> tuple[Number, float]:
        return self, 1.0


class Toy(backends.Backend):
    """Returns its name; computes the operands that name it."""

    computes = {"number": "its own name"}
    raises = ""

    def __init__(self, name: str) -> None:
        self.name = name

    def refuses(self, operands: Number) -> str:
        return "" if self.name in operands.names else f"{self.name} is not named"

    def skipped(self, operands: Number) -> str:
        return "" if self.name == "dense" else "some"

    def number(self, operands: Number) -> Callable[[Number], str]:
        if self.raises:
            raise RuntimeError(self.raises)
        return lambda o: self.name


@pytest.fixture(autouse=True)
def toys(monkeypatch) -> dict[str, Toy]:
    """Backends "first", "second" and "dense" of an operation "number"."""
    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))
    monkeypatch.setitem(registry.OPERATIONS, "number", "a name")
    found = {name: Toy(name) for name in ("first", "second", "dense")}
    for toy in found.values():
        backends.register_backend(toy)
    return found


@pytest.fixture
def timed(monkeypatch):
    """Let the test say how long each candidate takes; counts the measurements."""
    log: list[set[str]] = []
    milliseconds = {"first": 1.0, "second": 1.0}

    def race(functions, *_):
        log.append(set(functions))
        return {name: milliseconds[name] for name in functions}, {}

    monkeypatch.setattr("fst.backends.timing.race", race)
    return milliseconds, log


def _choose(**operands: Any) -> choice.Decision:
    return backends.choose(Number(**operands), Record())[1]


@pytest.mark.parametrize(
    ("dense", "other", "chosen"),
    [(1.0, 0.5, "second"), (1.0, 0.85, "dense"), (0.3, 0.15, "dense"), (10.0, 9.6, "dense")],
)
def test_what_leaves_something_out_must_save_what_the_op_costs_too(dense, other, chosen, timed):
    timed[0].update(dense=dense, second=other)
    assert _choose(names=("dense", "second")).backend == chosen


@pytest.mark.parametrize(
    ("other", "chosen"),
    [(0.5, "second"), (0.94, "second"), (0.96, "first"), (2, "first")],
)
def test_another_backend_must_be_five_percent_faster(other, chosen, timed):
    timed[0]["second"] = other
    decision = _choose()
    assert decision.backend == chosen
    assert decision.times == {"first": 1.0, "second": other}
    assert decision.reason.startswith("measured")


def test_a_layer_is_measured_once_per_machine(timed, monkeypatch, tmp_path):
    milliseconds, log = timed
    milliseconds["second"] = 0.5
    first = _choose()
    assert _choose() == first
    backends.forget_decisions()
    milliseconds["second"] = 2.0
    assert _choose() == first
    assert _choose(size=2).backend == "first"
    assert len(log) == 2
    (file,) = tmp_path.iterdir()
    stored = [json.loads(line) for line in file.read_text().splitlines() if line]
    assert len(stored) == 2
    assert stored[0]["environment"]["torch"] == torch.__version__
    backends.forget_decisions()
    monkeypatch.setattr(torch, "__version__", "another")
    assert _choose().backend == "first"
    assert len(log) == 3
    assert len(list(tmp_path.iterdir())) == 2


def test_a_candidate_that_raises_is_left_out_with_its_reason(toys):
    toys["second"].raises = "out of resource: shared memory"
    decision = _choose()
    assert (decision.backend, decision.times["second"]) == ("first", math.inf)
    assert "second raised an error" in decision.reason
    backends.forget_decisions()
    toys["second"].raises = ""
    assert _choose() == decision  # from the disk, the failure too


def test_what_a_captured_graph_could_not_measure_is_measured_later(timed, monkeypatch):
    milliseconds, log = timed
    milliseconds["second"] = 0.5
    record = Record()
    with monkeypatch.context() as capturing:
        capturing.setattr(Number, "device", torch.device("cuda"))
        capturing.setattr(store, "environment", lambda _: {})
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert compute(Number(), record) == "first"
        assert record.decisions["number"].reason == choice.CAPTURED
    assert compute(Number(), record) == "second" and len(log) == 1


def test_a_layer_goes_on_with_its_choice(timed, monkeypatch):
    """A copy and a loaded state too, whatever the times are by then."""
    milliseconds, log = timed
    milliseconds["second"] = 0.5
    record = Record()
    assert compute(Number(), record) == "second"
    milliseconds["second"] = 2.0
    loaded = Record()
    assert loaded.restore(record.saved(), CPU) == ""
    for same in (copy.deepcopy(record), loaded):
        backends.forget_decisions()
        monkeypatch.setenv("FST_CACHE_DIR", "/dev/null/nowhere")
        assert compute(Number(), same) == "second"
    assert len(log) == 1
    monkeypatch.setattr(torch, "__version__", "another")
    assert loaded.restore(record.saved(), CPU) == record.machine
    assert not loaded.times


def test_a_layer_of_ever_new_sizes_stops_measuring(timed):
    """Detectors see images of many sizes: a ninth one takes what most of the others took."""
    milliseconds, log = timed
    milliseconds["second"] = 0.5
    record = Record()
    found = [compute(Number(size=size), record) for size in range(1, 20)]
    assert found == ["second"] * 19
    assert len(log) == record_of_layers.MOST_SIZES
    assert record.decisions["number"].reason == "as for most other sizes of this layer"


def test_a_share_of_zeros_flips_no_choice():
    """It leaves its eighth only where it has clearly left it."""
    record = Record()
    found = []
    for share in (0.43, 0.44, 0.43, 0.44, 0.6, 0.55):
        record.count("input", share)
        found.append(record.shares["input"] / 8)
    assert found == [0.375, 0.375, 0.375, 0.375, 0.625, 0.625]
    assert record.moved


def test_zeros_are_counted_in_every_16th_step_and_after_an_operand_that_is_wholly_zero(timed):
    """The first gradients of a residual branch whose last batch norm begins at zero."""
    record = Record()

    def counting(step: int) -> bool:
        record.begin(step)
        return record.counting

    assert [step for step in range(40) if counting(step)] == [0, 16, 32]
    record.count("input", 1.0)
    assert counting(5)
    record.count("input", 0.97)
    assert not counting(5) and record.shares == {"input": 7}
    timed[0]["second"] = 0.01
    assert compute(Number(is_all_zero=True), record) == "first"
    assert (timed[1], record.times) == ([], {})
    assert "all is zero" in record.decisions["number"].reason
    assert compute(Number(), record) == "second"
    assert len(timed[1]) == 1


def test_times_under_other_settings_of_the_libraries_are_others(monkeypatch):
    """Those of cuDNN and of TF32, which change what is fastest."""
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "some GPU")
    files = {store.path(store.environment(cuda))}
    conv, matmul = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    changes = (
        (torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark),
        (torch.backends.cudnn, "deterministic", not torch.backends.cudnn.deterministic),
        (conv, "fp32_precision", "ieee" if conv.fp32_precision == "tf32" else "tf32"),
        (matmul, "fp32_precision", "ieee" if matmul.fp32_precision == "tf32" else "tf32"),
    )
    for holder, name, value in changes:
        before = getattr(holder, name)
        setattr(holder, name, value)
        try:
            files.add(store.path(store.environment(cuda)))
        finally:
            setattr(holder, name, before)
    assert len(files) == 1 + len(changes)


def test_those_who_add_at_once_lose_nothing():
    """Nor do they behind a line that a full disk has cut off."""
    surroundings = store.environment(CPU)
    store.path(surroundings).write_text('{"environment": {"fst": "0.1')

    def add(index):
        store.add(surroundings, f"{index}" * 500, {"b": 1.0})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(480)))
    with pytest.warns(UserWarning, match="is not used"):
        assert len(store.read(surroundings)) == 480


@pytest.mark.parametrize(
    "change",
    [
        None,
        dict(key={}),
        dict(times={}),
        dict(times={"first": "1"}),
        dict(environment={}),
    ],
    ids=str,
)
def test_a_broken_line_is_not_used(change, timed):
    _choose()
    (file,) = store.folder().iterdir()
    entry = json.loads(file.read_text())
    text = "{" if change is None else json.dumps({**entry, **change})
    file.write_text(text)
    backends.forget_decisions()
    with pytest.warns(UserWarning, match="is not used"):
        assert _choose().backend == "first"
    assert len(timed[1]) == 2
    backends.forget_decisions()
    with pytest.warns(UserWarning, match="is not used"):
        _choose()
    assert len(timed[1]) == 2  # the line that was added replaces it


def test_a_folder_that_cannot_be_written_is_no_error(timed, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FST_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.warns(UserWarning, match="cannot be written"):
        assert _choose().backend == "first"


def test_off_measures_nothing(timed, monkeypatch):
    monkeypatch.setenv("FST_AUTOTUNE", "0")
    assert "not measured" in _choose().reason
    monkeypatch.setenv("FST_AUTOTUNE", "1")
    torch.use_deterministic_algorithms(True)
    try:
        assert "not measured" in _choose(size=3).reason
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.delenv("FST_AUTOTUNE")
    assert "not measured" in _choose().reason
    assert not timed[1]
    timed[0]["dense"] = 1.0
    assert "measured: " in _choose(names=("dense", "second")).reason
    monkeypatch.setenv("FST_AUTOTUNE", "yes")
    with pytest.raises(ValueError, match="FST_AUTOTUNE='yes'"):
        _choose()


def test_what_draws_random_numbers_is_not_timed(timed):
    assert "random" in _choose(draws=True).reason
    assert not timed[1]


def test_force_wins_and_ends(timed, monkeypatch):
    with backends.force(number="second"):
        assert (_choose().backend, _choose().reason) == ("second", "forced")
    monkeypatch.setenv("FST_BACKENDS", "number=second")
    assert _choose().backend == "second"
    assert not timed[1]
    monkeypatch.setenv("FST_BACKENDS", "grad_wait=torch")
    with pytest.raises(ValueError, match="Did you mean 'grad_weight'"):
        _choose()


def test_a_forced_backend_that_cannot_compute_names_every_reason(timed):
    with (
        backends.force(number="second"),
        pytest.raises(RuntimeError) as caught,
    ):
        _choose(names=("first",))
    message = str(caught.value)
    assert "number='second' is forced but cannot compute this" in message
    assert "first: can compute it" in message
    assert "second: second is not named" in message
    assert "dense: dense is not named" in message


def test_prefer_wins_where_it_can_and_force_over_it(timed):
    with backends.prefer(number="second"):
        assert (_choose().backend, _choose().reason) == ("second", "forced")
        assert _choose(names=("first",)).backend == "first"
        with backends.force(number="first"):
            assert _choose().backend == "first"
    assert _choose().reason.startswith("measured")
    with pytest.raises(ValueError, match="secnd"), backends.prefer(number="secnd"):
        pass


def test_a_record_takes_the_latest_decision_of_each_operation(timed):
    record = Record()
    assert compute(Number(), record) == "first"
    with backends.force(number="second"):
        assert compute(Number(), record) == "second"
    compute(Number(size=4))
    assert record.decisions.keys() == {"number"}
    decision = record.decisions["number"]
    assert (decision.backend, decision.reason) == ("second", "forced")


def test_unknown_and_unusable_names():
    with (
        pytest.raises(ValueError, match="Did you mean 'triton'"),
        backends.force(prune_weight="tritn"),
    ):
        pass
    with pytest.raises(ValueError, match="'pruning' is unknown"):
        backends.backends("pruning")
    if not torch.cuda.is_available():
        with (
            pytest.raises(RuntimeError, match="no CUDA device"),
            backends.force(prune_weight="triton"),
        ):
            pass


def test_a_name_is_taken_once_and_the_table_has_it():
    backends.register_backend(Toy("new"))
    with pytest.raises(ValueError, match="is taken"):
        backends.register_backend(Toy("new"))
    assert re.search(r"^number +new +available +its own name$", backends.describe(), re.MULTILINE)


def test_an_impossible_name_in_the_environment_is_said_even_where_it_would_not_run(monkeypatch):
    """`fst` has no pruned grad_output that such a backend could compute."""
    if not sources.triton_missing():
        pytest.skip("the backend can run here")
    monkeypatch.setenv("FST_BACKENDS", "prune_grad_output=triton")
    images, weight = torch.randn(1, 8, 4, 4), torch.randn(8, 8, 3, 3)
    with pytest.raises(RuntimeError, match="prune_grad_output='triton'"):
        fst.sparse_conv2d(images, weight, strategy="fst")


def test_times_of_other_kernels_are_not_taken(monkeypatch):
    device = torch.device("cpu")
    before = store.path(store.environment(device))
    monkeypatch.setattr(store, "cpp_checksum", lambda: 0)
    assert store.path(store.environment(device)) != before
