"""benchmarks/equal_time.py: as many epochs as fit, and curves over the seconds of timed steps."""

import json
import os
import runpy
import subprocess
from pathlib import Path

import pytest

from fst.backends.timing import Timing
from fst.cli.environment import machine
from tests.pages import tables_of

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = runpy.run_path(str(ROOT / "benchmarks" / "equal_time.py"))
SETTINGS = {
    "dense": {"sparsity": {"strategy": "dense"}},
    "good": {"sparsity": {"strategy": "sampled"}},
    "slow": {"sparsity": {"strategy": "fst"}},
}
STEPS = {"dense": 3.0, "good": 2.0, "slow": 100.0}
PLACE = {"device": "CPU, some", "threads": 2, "autotuner": "on"}


@pytest.fixture
def equal_time(tmp_path, stand_in):
    """Runs the script in tmp_path/work with the stand-in for trainings."""

    def run(grid, *arguments):
        words = [str(grid), "--work-dir", str(tmp_path / "work"), *arguments]
        return SCRIPT["main"](words)

    return run


def result(work_dir, setting, seed=0):
    """What a run has recorded at its end."""
    return json.loads((work_dir / setting / f"seed{seed}" / "result.json").read_text())


def write_times(work_dir, steps):
    """As an earlier command leaves them: two iterations in each epoch."""
    work_dir.mkdir(exist_ok=True)
    content = {
        "steps": {name: [t, t, t] for name, t in steps.items()},
        "iterations": dict.fromkeys(steps, 2),
        "machine": PLACE,
    }
    (work_dir / "equal_time.json").write_text(json.dumps(content))


def test_whole_epochs_nearest_to_the_seconds():
    steps = {
        "dense": 3.0,
        "half": 1.5,
        "near": 2.9,
        "a_little_slower": 3.01,
        "slow": 100.0,
    }
    timings = {name: Timing(t, t, t) for name, t in steps.items()}
    times = SCRIPT["Times"](timings, {**dict.fromkeys(steps, 10), "half": 20}, {})
    assert times.seconds("dense") == 0.03 and times.seconds("half") == 0.03
    found = {name: times.epochs(name, 30 * 0.03) for name in steps}
    assert found == {"dense": 30, "half": 30, "near": 31, "a_little_slower": 30, "slow": 1}


@pytest.mark.parametrize(
    "budget",
    [["--epochs", "20"], pytest.param(["--seconds", "0.12"], marks=pytest.mark.system)],
)
def test_each_setting_gets_the_same_seconds(write_grid, equal_time, tmp_path, budget):
    """The stand-in logs one validation, of step 1: 90 + seed, and 3 more for 'good'."""
    work = tmp_path / "work"
    write_times(work, STEPS)
    grid = write_grid(settings=SETTINGS)
    assert equal_time(grid, *budget) == 0
    lengths = {}
    for name in SETTINGS:
        lengths[name] = int(result(work, name)["epochs"])
        config = (work / name / "seed0.py").read_text()
        assert f"'val_interval': {max(1, lengths[name] // 10)}" in config
        assert f"'T_max': {lengths[name]}" in config
    assert lengths == {"dense": 20, "good": 30, "slow": 1}
    (table,) = tables_of(work / "over_time.md")
    rows = {row["setting"]: row for row in table}
    assert [rows[name]["epochs"] for name in SETTINGS] == [20, 30, 1]
    column = "seconds to dense's 90.50"
    assert rows["good"]["change from dense"] == "+3.00 ± 0.00 (n = 2)"
    assert rows["good"][column] == "0 (2 of 2 runs)"
    assert rows["dense"][column] == "0 (1 of 2 runs)"
    assert (work / "over_time.png").is_file()
    assert f"machine {machine()}" in result(work, "good")["made with"]
    (work / "over_time.md").unlink()
    assert equal_time(grid, *budget, "--report-only") == 0
    assert "0 (2 of 2 runs)" in (work / "over_time.md").read_text()


@pytest.mark.parametrize(
    ("keys", "arguments", "message"),
    [
        ({"settings": SETTINGS}, ["--only", "good"], "the baseline must be among the settings"),
        ({"settings": SETTINGS}, ["--seconds", "0"], "--seconds=0.0"),
        ({"settings": SETTINGS}, ["--epochs", "0"], "--epochs: '0'"),
        ({"settings": SETTINGS}, ["--times", "no/such.json"], "--times='no/such.json' does not"),
        ({"settings": {**SETTINGS, "later": {}}}, [], "has no times of ['later']"),
        (
            {"settings": {**SETTINGS, "after": {"start_from": "dense"}}},
            [],
            "['after'] start from other settings' trainings",
        ),
        (
            {"settings": SETTINGS, "options": {"train_cfg": {"_delete_": True, "max_iters": 4}}},
            [],
            "'dense' counts iterations, not epochs",
        ),
    ],
)
def test_what_cannot_have_equal_time(
    write_grid, equal_time, tmp_path, capsys, keys, arguments, message
):
    write_times(tmp_path / "work", STEPS)
    with pytest.raises(SystemExit) as stop:
        equal_time(write_grid(**keys), *arguments)
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_steps_are_timed_on_the_data_of_the_config(write_grid, equal_time, tmp_path, capsys):
    """Two batches an epoch, of 64 digits; --dry-run times and trains nothing."""
    settings = {name: SETTINGS[name] for name in ("dense", "good")}
    grid = write_grid(settings=settings)
    assert equal_time(grid, "--epochs", "9", "--dry-run") == 0
    assert "runs, all configs are valid" in capsys.readouterr().out
    found = json.loads((tmp_path / "work" / "equal_time.json").read_text())
    assert found["iterations"] == {"dense": 2, "good": 2}
    assert all(low > 0 for _, low, _ in found["steps"].values())
    assert not (tmp_path / "work" / "dense").exists()


@pytest.mark.parametrize("what", ["times", "choices", "train", "frontier", "pages"])
def test_the_script_of_all_trainings_names_grids_that_exist(what):
    """With echo in the place of Python."""
    script = ROOT / "benchmarks" / "equal_time.sh"
    done = subprocess.run(
        [script, what], env={**os.environ, "PYTHON": "echo"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    files = [ROOT / word for word in words if word.endswith((".yaml", ".py"))]
    assert len(files) >= 3 and all(file.is_file() for file in files)
    asked = subprocess.run([script, "nothing"], capture_output=True, text=True)
    assert asked.returncode == 2 and asked.stdout.startswith("usage")


def test_times_of_another_folder(write_grid, equal_time, tmp_path):
    """Choices on a validation split have the epochs of the trainings that they are for."""
    write_times(tmp_path / "measured", STEPS)
    times = str(tmp_path / "measured" / "equal_time.json")
    settings = {name: SETTINGS[name] for name in ("dense", "good")}
    grid = write_grid(settings=settings, seeds=[100])
    assert equal_time(grid, "--epochs", "20", "--times", times) == 0
    assert result(tmp_path / "work", "good", 100)["epochs"] == "30"
    assert not (tmp_path / "work" / "equal_time.json").exists()
