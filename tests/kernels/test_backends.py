"""The registry and the autotuner: what is chosen, why, and what is remembered."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fst
from fst import backends
from fst.backends import autotune, cache, dispatch, registry, sources
from fst.lab.benchmark import Timing

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FST_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FST_AUTOTUNE", "1")
    monkeypatch.delenv("FST_BACKENDS", raising=False)
    backends.forget_decisions()
    yield
    backends.forget_decisions()


@pytest.fixture
def timed(monkeypatch):
    """Let the test say how long each candidate takes; counts the measurements."""
    log: list[set[str]] = []
    milliseconds = {"strided": 1.0, "torch": 1.0}

    def compare(functions, repeats, device, **_):
        log.append(set(functions))
        return {name: Timing(*[milliseconds[name]] * 3) for name in functions}

    monkeypatch.setattr("fst.backends.timing.compare", compare)
    return milliseconds, log


def _choose(key: int = 0, names=("strided", "torch"), exact=None):
    layer = autotune.LayerKey.of(torch.empty(2, key + 1))
    candidates = {name: lambda: None for name in names}
    return backends.choose(backends.Question("grad_weight", layer, candidates, CPU, exact))


@pytest.mark.parametrize(
    ("exact", "other", "chosen"),
    [(1.0, 0.5, "torch"), (1.0, 0.85, "dense"), (0.3, 0.15, "dense"), (10.0, 9.6, "dense")],
)
def test_sampling_must_save_what_the_op_costs_too(exact, other, chosen, timed):
    timed[0].update(dense=exact, torch=other)
    assert _choose(names=("dense", "torch"), exact="dense").backend == chosen


@pytest.mark.parametrize(
    ("other", "chosen"),
    [(0.5, "torch"), (0.94, "torch"), (0.96, "strided"), (2, "strided")],
)
def test_another_backend_must_be_five_percent_faster(other, chosen, timed):
    timed[0]["torch"] = other
    decision = _choose()
    assert decision.backend == chosen
    assert decision.times == {"strided": 1.0, "torch": other}
    assert decision.reason.startswith("measured")


def test_a_layer_is_measured_once_per_machine(timed, monkeypatch, tmp_path):
    milliseconds, log = timed
    milliseconds["torch"] = 0.5
    first = _choose()
    assert _choose() is first
    backends.forget_decisions()
    milliseconds["torch"] = 2.0
    assert _choose() == first
    assert _choose(key=1).backend == "strided"
    assert len(log) == 2
    (file,) = tmp_path.iterdir()
    stored = [json.loads(line) for line in file.read_text().splitlines() if line]
    assert len(stored) == 2
    assert stored[0]["environment"]["torch"] == torch.__version__
    backends.forget_decisions()
    monkeypatch.setattr(torch, "__version__", "another")
    assert _choose().backend == "strided"
    assert len(log) == 3
    assert len(list(tmp_path.iterdir())) == 2


def test_decisions_are_bounded_and_none_is_measured_again(timed, monkeypatch):
    monkeypatch.setattr(autotune, "MOST_DECIDED", 3)
    for key in (*range(5), *range(5)):
        _choose(key=key)
        assert len(backends.decisions()) <= 3
    assert len(timed[1]) == 5


def test_a_candidate_that_raises_is_left_out_with_its_reason(timed):
    milliseconds, log = timed

    def too_large():
        raise RuntimeError("out of resource: shared memory")

    def choose():
        layer = autotune.LayerKey.of(torch.empty(3))
        candidates = {"strided": lambda: None, "torch": too_large, "dense": lambda: None}
        return backends.choose(backends.Question("grad_weight", layer, candidates, CPU))

    milliseconds["dense"] = 0.5
    decision = choose()
    assert (decision.backend, decision.times["torch"]) == ("dense", math.inf)
    assert "torch raised RuntimeError: out of resource: shared memory" in decision.reason
    backends.forget_decisions()
    assert choose() == decision and len(log) == 1  # from the disk, the failure too


def test_times_under_other_settings_of_the_libraries_are_others(monkeypatch):
    """Those of cuDNN and of TF32, which change what is fastest."""
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "some GPU")
    files = {cache.path(cache.environment(cuda))}
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
            files.add(cache.path(cache.environment(cuda)))
        finally:
            setattr(holder, name, before)
    assert len(files) == 1 + len(changes)


def test_those_who_add_at_once_lose_nothing():
    """Nor do they behind a line that a full disk has cut off."""
    surroundings = cache.environment(CPU)
    cache.path(surroundings).write_text('{"environment": {"fst": "0.1')

    def add(index):
        entry = dict(operation="o", key=f"{index}" * 500, backend="b", reason="r", times={"b": 1.0})
        cache.add(surroundings, entry)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(480)))
    with pytest.warns(UserWarning, match="is not used"):
        assert len(cache.read(surroundings)) == 480


@pytest.mark.parametrize(
    "change",
    [
        None,
        dict(backend={}),
        dict(backend="transposd"),
        dict(times={"strided": "1"}),
        dict(environment={}),
    ],
    ids=str,
)
def test_a_broken_line_is_not_used(change, timed):
    _choose()
    (file,) = cache.folder().iterdir()
    entry = json.loads(file.read_text())
    text = "{" if change is None else json.dumps({**entry, **change})
    file.write_text(text)
    backends.forget_decisions()
    with pytest.warns(UserWarning, match="is not used"):
        assert _choose().backend == "strided"
    assert len(timed[1]) == 2
    backends.forget_decisions()
    with pytest.warns(UserWarning, match="is not used"):
        _choose()
    assert len(timed[1]) == 2  # the line that was added replaces it


def test_a_folder_that_cannot_be_written_is_no_error(timed, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FST_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.warns(UserWarning, match="cannot be written"):
        assert _choose().backend == "strided"


def test_off_measures_nothing(timed, monkeypatch):
    monkeypatch.setenv("FST_AUTOTUNE", "0")
    assert "not measured" in _choose().reason
    assert not timed[1]
    monkeypatch.delenv("FST_AUTOTUNE")
    assert not autotune.enabled(CPU)
    assert autotune.enabled(torch.device("cuda"))
    monkeypatch.setenv("FST_AUTOTUNE", "yes")
    with pytest.raises(ValueError, match="FST_AUTOTUNE='yes'"):
        _choose()


def test_force_wins_and_ends(timed, monkeypatch):
    with backends.force(grad_weight="torch"):
        assert (_choose().backend, _choose().reason) == ("torch", "forced")
    monkeypatch.setenv("FST_BACKENDS", "grad_weight=torch")
    assert _choose().backend == "torch"
    assert not timed[1]
    with pytest.raises(RuntimeError, match="forced but cannot compute"):
        _choose(names=("strided",))
    monkeypatch.setenv("FST_BACKENDS", "grad_wait=torch")
    with pytest.raises(ValueError, match="Did you mean 'grad_weight'"):
        _choose()


def test_prefer_wins_where_it_can_and_force_over_it(timed):
    with backends.prefer(grad_weight="torch"):
        assert (_choose().backend, _choose().reason) == ("torch", "forced")
        assert _choose(names=("strided",)).backend == "strided"
        with backends.force(grad_weight="strided"):
            assert _choose().backend == "strided"
    assert _choose().reason.startswith("measured")
    with pytest.raises(ValueError, match="transposd"), backends.prefer(grad_weight="transposd"):
        pass


def test_a_record_takes_the_latest_decision_of_each_operation(timed):
    record: dispatch.Record = {}
    candidates = {"strided": lambda: "first", "torch": lambda: "second"}
    tensors = (torch.empty(2, 3),)
    with dispatch.recording(record):
        assert dispatch.compute("grad_weight", candidates, tensors) == "first"
        with backends.force(grad_weight="torch"):
            assert dispatch.compute("grad_weight", candidates, tensors) == "second"
        with dispatch.recording(None):
            dispatch.compute("prune_columns", {"torch": lambda: None}, tensors)
    dispatch.compute("prune_grad_output", {"torch": lambda: None}, tensors)
    assert record.keys() == {"grad_weight"}
    assert (record["grad_weight"].backend, record["grad_weight"].reason) == ("torch", "forced")
    with dispatch.recording(record):
        dispatch.compute("prune_grad_output", {"torch": lambda: None}, tensors, tunable=False)
    assert record["prune_grad_output"].reason == "not measured: it draws random numbers"


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


def test_a_removed_backend_says_where_it_is(monkeypatch):
    with pytest.raises(ValueError, match="'mma_sp' .* removed"), backends.force(output="mma_sp"):
        pass
    monkeypatch.setenv("FST_BACKENDS", "grad_input=mma_sp")
    with pytest.raises(ValueError, match="'mma_sp' .* removed"):
        _choose()


def test_an_unverified_backend_is_never_chosen_by_itself(timed, monkeypatch):
    kept = dict(registry._BACKENDS)
    monkeypatch.setattr(registry, "_BACKENDS", kept)
    new = backends.Backend("grad_weight", "new", "faster", False, lambda: "")
    backends.register_backend(new)
    timed[0]["new"] = 0.01
    decision = _choose(names=("strided", "new"))
    assert (decision.backend, timed[1]) == ("strided", [])
    with backends.force(grad_weight="new"):
        assert _choose(names=("strided", "new")).backend == "new"
    with pytest.raises(ValueError, match="is taken"):
        backends.register_backend(new)


def test_no_gpu_kernel_is_verified_and_the_table_says_so():
    for operation in backends.OPERATIONS:
        assert backends.backends(operation)[0].usable_by_default
    for_cpus = ("torch", "strided", "dense", "cpp")
    kernels = {b.operation: b for b in backends.backends() if b.name not in for_cpus}
    assert kernels.keys() == {"prune_weight", "prune_grad_output"}
    assert not any(b.verified for b in kernels.values())
    text = backends.describe()
    assert "unverified" in text


@pytest.mark.parametrize("name", ["mma", "triton"])
def test_an_impossible_name_in_the_environment_is_said_even_where_it_would_not_run(
    name, monkeypatch
):
    """`fst` has no pruned grad_output that such a backend could compute."""
    if not sources.triton_missing():
        pytest.skip("the backend can run here")
    monkeypatch.setenv("FST_BACKENDS", f"prune_grad_output={name}")
    images, weight = torch.randn(1, 8, 4, 4), torch.randn(8, 8, 3, 3)
    with pytest.raises((ValueError, RuntimeError), match=f"prune_grad_output='{name}'"):
        fst.sparse_conv2d(images, weight, strategy="fst")


def test_times_of_other_kernels_are_not_taken(monkeypatch):
    device = torch.device("cpu")
    before = cache.path(cache.environment(device))
    monkeypatch.setattr(cache, "cpp_checksum", lambda: 0)
    assert cache.path(cache.environment(device)) != before
