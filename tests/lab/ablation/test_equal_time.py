"""Equal time: as many epochs as fit, on curves over seconds that were measured in turns."""

import csv
import json

import pytest

from fst.backends.timing import Timing
from fst.lab.ablation import cli, equal_time
from fst.lab.ablation.equal_time import EqualTime
from fst.lab.ablation.folders import RunFolder
from fst.lab.reporting.document import load_document

SETTINGS = {
    "dense": {"sparsity": {"strategy": "dense"}},
    "good": {"sparsity": {"strategy": "sampled"}},
    "slow": {"sparsity": {"strategy": "fst"}},
}
STEPS = {"dense": 3.0, "good": 2.0, "slow": 100.0}
PLACE = {"device": "CPU, some", "threads": 2, "autotuner": "on"}


def write_times(work_dir, steps):
    """As an earlier command leaves them: two iterations in each epoch."""
    work_dir.mkdir(exist_ok=True)
    content = {
        "baseline": "dense",
        "steps": {name: [t, t, t] for name, t in steps.items()},
        "iterations": dict.fromkeys(steps, 2),
        "machine": PLACE,
    }
    (work_dir / equal_time.FILE).write_text(json.dumps(content))


def test_whole_epochs_nearest_to_the_time_of_the_baseline():
    steps = {
        "dense": 3.0,
        "half": 1.5,
        "near": 2.9,
        "a_little_slower": 3.01,
        "same": 3.0,
        "slow": 100.0,
    }
    steps = {name: Timing(t, t, t) for name, t in steps.items()}
    times = EqualTime("dense", steps, {**dict.fromkeys(steps, 10), "half": 20}, {})
    assert times.seconds("dense") == 0.03 and times.seconds("half") == 0.03
    found = {name: times.epochs(name, 30) for name in steps}
    assert found == {
        "dense": 30,
        "half": 30,
        "near": 31,
        "a_little_slower": 30,
        "same": 30,
        "slow": 1,
    }


def test_each_setting_gets_the_baselines_seconds(write_grid, ablate, tmp_path, capsys):
    """The stand-in logs one validation, of step 1: 90 + seed, and 3 more for 'good'."""
    write_times(tmp_path / "work", STEPS)
    grid = write_grid(settings=SETTINGS)
    with pytest.raises(SystemExit):
        ablate(grid, "--epochs", "20")
    assert "give --equal-time" in capsys.readouterr().err
    assert ablate(grid, "--epochs", "20", "--equal-time") == 0
    lengths = {}
    for name in SETTINGS:
        folder = RunFolder.of(tmp_path / "work", name, 0)
        lengths[name] = folder.read("run.json")["length"]
        config = folder.config.read_text()
        assert f"'val_interval': {max(1, lengths[name] // 10)}" in config
        assert f"'T_max': {lengths[name]}" in config
    assert lengths == {"dense": 20, "good": 30, "slow": 1}
    document = load_document(tmp_path / "work")
    table = next(table for table in document.tables if table.title == "At equal time")
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert [rows[name]["epochs"] for name in SETTINGS] == [20, 30, 1]
    assert rows["dense"]["seconds"] == "0"  # 0.12
    column = "seconds to dense's 90.50"
    assert rows["good"][column] == "0 (2 of 2 runs)"
    assert rows["dense"][column] == "0 (1 of 2 runs)"
    assert "CPU, some, 2 threads" in table.caption
    assert document.figures[0].file == "over_time.png"
    assert (tmp_path / "work" / "over_time.png").is_file()
    with open(tmp_path / "work" / "curves.csv") as file:
        assert {row["setting"] for row in csv.DictReader(file)} == set(SETTINGS)
    longer = write_grid(settings={**SETTINGS, "later": {}})
    assert ablate(longer, "--report-only", "--equal-time") == 0
    assert load_document(tmp_path / "work").tables[1].rows == table.rows


@pytest.mark.parametrize(
    ("keys", "arguments", "message"),
    [
        ({"settings": SETTINGS}, ["--only", "good"], "needs the baseline among the settings"),
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
    write_grid, ablate, tmp_path, capsys, keys, arguments, message
):
    write_times(tmp_path / "work", STEPS)
    with pytest.raises(SystemExit) as stop:
        ablate(write_grid(**keys), "--equal-time", *arguments)
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_steps_are_timed_once_and_tiny_trainings_run(write_grid, tmp_path, capsys):
    """Real steps and trainings, of 64 digits."""
    settings = {name: SETTINGS[name] for name in ("dense", "good")}
    grid = write_grid(settings=settings, seeds=[0])
    command = [str(grid), "--work-dir", str(tmp_path / "work"), "--equal-time", "--epochs", "2"]
    assert cli.main([*command, "--dry-run"]) == 0
    assert "step, ms" in capsys.readouterr().out
    measured = (tmp_path / "work" / equal_time.FILE).read_text()
    times = equal_time.read(tmp_path / "work")
    assert all(timing.median > 0 for timing in times.steps.values())
    assert times.iterations == {"dense": 2, "good": 2}
    assert cli.main(command) == 0
    assert (tmp_path / "work" / equal_time.FILE).read_text() == measured
    table = load_document(tmp_path / "work").tables[1]
    epochs = {row[0]: row[2] for row in table.rows}
    assert epochs == {"dense": 2, "good": times.epochs("good", 2)}
