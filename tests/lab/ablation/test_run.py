"""Running grids: success, failure, interruption, resumption, changed configs."""

import json
import os
from pathlib import Path

import pytest

from fst.lab.ablation import cli
from fst.lab.ablation.folders import RunFolder
from fst.lab.reporting.document import load_document

DENSE, FST = {"sparsity": {"strategy": "dense"}}, {"sparsity": {"strategy": "fst"}}


def results(tmp_path):
    return json.loads((tmp_path / "work" / "results.json").read_text())


def test_a_failing_setting_leaves_the_others_alone(write_grid, ablate, tmp_path, capsys, calls):
    settings = {
        "fails": DENSE,
        "after": {"start_from": "fails"},
        "dense": DENSE,
        "good": {**FST, "start_from": "dense"},
    }
    assert ablate(write_grid(settings=settings)) == 1
    printed = capsys.readouterr().out
    assert "fails, seed 0 failed: exit status 1" in printed
    assert "the loss is <not> [finite]" in printed
    assert "not started: 'fails', which it needs, failed" in printed
    made = results(tmp_path)["settings"]
    assert made["dense"]["metrics"]["accuracy/top1"]["mean"] == 90.5
    assert made["good"]["metrics"]["accuracy/top1"] == {
        "mean": 93.5,
        "std": pytest.approx(0.5**0.5),
        "interval": pytest.approx(6.353, rel=1e-3),
        "n": 2,
    }
    assert {run["state"] for run in made["fails"]["runs"].values()} == {"failed"}
    config = (tmp_path / "work" / "good" / "seed1" / "config.py").read_text()
    start = tmp_path / "work" / "dense" / "seed1" / "epoch_1.pth"
    assert f"load_from = '{start}'" in config.replace("\n", "")
    assert not calls("after")


@pytest.mark.system
def test_a_finished_run_is_kept_and_a_failed_one_tried_again(write_grid, ablate, calls, tmp_path):
    grid = write_grid(settings={"fails": DENSE, "dense": DENSE})
    ablate(grid)
    assert ablate(grid) == 1
    assert len(calls("dense")) == len(calls("dense", seed=1)) == 1
    assert len(calls("fails")) == 2
    assert ablate(grid, "--only", "dense", "--jobs", "2") == 0
    assert "fails" in results(tmp_path)["settings"]  # the report covers what was run before
    assert ablate(grid, "--report-only", "--only", "dense") == 0
    assert list(results(tmp_path)["settings"]) == ["dense"]


def test_a_run_records_the_commits_that_trained_it(write_grid, ablate, tmp_path, monkeypatch):
    """Those of every attempt; without a checkout the version alone."""
    grid = write_grid(settings={"fails": DENSE, "dense": DENSE}, seeds=[0])
    monkeypatch.setattr("fst.lab.ablation.run.commit", lambda: "1234567")
    ablate(grid)
    monkeypatch.setattr("fst.lab.ablation.run.commit", lambda: "89abcde with changes")
    ablate(grid)
    runs = results(tmp_path)["settings"]
    assert runs["dense"]["runs"]["0"]["commit"] == "1234567"
    folder = RunFolder.of(tmp_path / "work", "fails", 0)
    assert folder.read("run.json")["commits"] == ["1234567", "89abcde with changes"]
    assert "1234567" in load_document(tmp_path / "work").versions["commit"]


def test_cores_are_shared_out(write_grid, ablate, calls, monkeypatch):
    monkeypatch.setattr("fst.lab.ablation.cli.cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ablate(write_grid(seeds=[0]), "--jobs", "3")
    assert calls("dense")[0]["threads"] == "2"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    ablate(write_grid(seeds=[1]), "--jobs", "3")
    assert calls("dense", seed=1)[0]["threads"] == "5"


def test_a_changed_config_is_refused_or_run_again(write_grid, ablate, calls, tmp_path, capsys):
    ablate(write_grid(seeds=[0]))
    grid = write_grid(seeds=[0], options={"optim_wrapper.optimizer.lr": 0.5})
    with pytest.raises(SystemExit) as stop:
        ablate(grid)
    assert stop.value.code == 2
    assert "optim_wrapper.optimizer.lr: 0.05 -> 0.5" in capsys.readouterr().err.replace("\n", "")
    assert ablate(grid, "--rerun") == 0
    assert (tmp_path / "work" / "dense" / "seed0.old1" / "finished.json").is_file()
    assert len(calls("dense")) == 1


def test_a_folder_in_which_a_process_trains_is_left_alone(write_grid, ablate, tmp_path, capsys):
    ablate(write_grid(seeds=[0]))
    folder = RunFolder.of(tmp_path / "work", "dense", 0)
    config = folder.config.read_text()
    grid = write_grid(seeds=[0], options={"optim_wrapper.optimizer.lr": 0.5})
    with folder.lock():
        with pytest.raises(SystemExit) as stop:
            ablate(grid, "--rerun")
        assert stop.value.code == 2
        assert f"another process is training in {folder.path}" in capsys.readouterr().err
        (folder.path / "run.json").unlink()  # as before the other process has written it
        assert ablate(grid) == 1
    assert [path.name for path in folder.path.parent.iterdir()] == ["seed0"]
    assert folder.config.read_text() == config


def counted(tmp_path):
    """The seeds of each setting that count, and the notes on those that do not."""
    notes = load_document(tmp_path / "work").notes
    settings = results(tmp_path)["settings"].items()
    return {
        name: [int(seed) for seed, run in made["runs"].items() if run["state"] == "finished"]
        for name, made in settings
    }, [note.partition(" (")[0] for note in notes if "another config" in note]


OTHER_RATE = "optim_wrapper.optimizer.lr=1"
LEFT_OUT = "trained with another config, left out"


@pytest.mark.parametrize(
    ("first", "then", "kept", "left_out"),
    [
        (["--epochs", "9"], ["--epochs", "2", "--seeds", "1", "2", "--rerun"], [1, 2], [0]),
        (["--epochs", "9"], ["--report-only", "--epochs", "2"], [], [0, 1]),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                (["--epochs", "9"], ["--epochs", "9", "--seeds", "2"], [0, 1, 2], []),
                (["--epochs", "9"], ["--report-only"], [0, 1], []),
                (["--epochs", "9"], ["--report-only", "--seeds", "1"], [1], []),
                ([], ["--report-only", "--cfg-options", OTHER_RATE], [], [0, 1]),
            )
        ),
    ],
)
def test_runs_of_another_config_do_not_count(
    write_grid, ablate, tmp_path, first, then, kept, left_out
):
    grid = write_grid()
    ablate(grid, *first)
    assert ablate(grid, *then) == 0
    notes = [f"dense, seed {seed}: {LEFT_OUT}" for seed in left_out]
    assert counted(tmp_path) == ({"dense": kept}, notes)


@pytest.mark.exhaustive
def test_settings_of_another_config_do_not_count(write_grid, ablate, tmp_path, capsys):
    """Among them one whose schedule the options of the last command do not fit."""
    warm = {"param_scheduler": [{"type": "LinearLR", "end": 3}], "train_cfg.max_epochs": 4}
    settings = {"dense": DENSE, "fst": FST, "warm": {**DENSE, "options": warm}}
    ablate(write_grid(seeds=[0], settings=settings))
    grid = write_grid(seeds=[0], settings={**settings, "later": {**FST, "start_from": "dense"}})
    assert ablate(grid, "--only", "later") == 0
    found = {"dense": [0], "fst": [0], "warm": [0], "later": [0]}
    assert counted(tmp_path) == (found, [])
    assert ablate(grid, "--only", "fst", "--epochs", "2", "--rerun") == 0
    notes = [f"{name}, seed 0: {LEFT_OUT}" for name in ("dense", "warm", "later")]
    assert counted(tmp_path) == ({**dict.fromkeys(found, []), "fst": [0]}, notes)
    assert "epochs=2 is too few" in capsys.readouterr().out


def test_dry_run_and_report_only(write_grid, ablate, tmp_path, capsys, calls):
    grid = write_grid()
    assert ablate(grid, "--dry-run") == 0
    assert "2 runs, all configs are valid" in capsys.readouterr().out
    assert not (tmp_path / "work").exists()
    with pytest.raises(SystemExit):
        ablate(grid, "--report-only")
    ablate(grid, "--seeds", "0", "3", "--epochs", "2")
    first = {name: (tmp_path / "work" / name).read_text() for name in ("results.md", "curves.csv")}
    for name in first:
        (tmp_path / "work" / name).unlink()
    assert ablate(grid, "--report-only") == 0
    assert first == {name: (tmp_path / "work" / name).read_text() for name in first}
    assert len(calls("dense", seed=3)) == 1


def test_a_metric_that_is_not_logged_fails(write_grid, ablate, capsys):
    grid = write_grid(metrics={"pascal_voc/mAP": {}})
    assert ablate(grid, "--seeds", "0") == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "'pascal_voc/mAP' was not logged, only ['accuracy/top1']" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "dens"], "Did you mean 'dense'"),
        (["--cfg-options", "trian_cfg.max_epochs=1"], "Did you mean 'train_cfg'"),
        (["--jobs", "0"], "is not an integer >= 1"),
        (["--seeds", "1", "1"], "must be different integers"),
    ],
)
def test_bad_arguments(write_grid, ablate, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        ablate(write_grid(), *arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_work_dir_that_is_no_folder(write_grid, ablate, tmp_path, capsys):
    (tmp_path / "work").touch()
    with pytest.raises(SystemExit) as stop:
        ablate(write_grid())
    assert stop.value.code == 2
    assert "is no folder; name another one with --work-dir" in capsys.readouterr().err


@pytest.mark.system
def test_a_real_grid(write_grid, tmp_path, monkeypatch):
    """Two settings, two seeds, one epoch of two steps; the second starts from the first."""
    repository = Path(__file__).resolve().parents[3]
    path = os.pathsep.join([str(repository), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = {"dense": DENSE, "fst": {**FST, "start_from": "dense", "published": 71.0}}
    grid = write_grid(settings=settings, published={"Paper": "a table"})
    status = cli.main([str(grid), "--work-dir", str(tmp_path / "work"), "--jobs", "2"])
    log = (tmp_path / "work" / "dense" / "seed0" / "log.txt").read_text()
    assert status == 0, log
    made = results(tmp_path)["settings"]
    for name in settings:
        values = [run["accuracy/top1"] for run in made[name]["runs"].values()]
        assert len(values) == 2 and all(0 <= value <= 100 for value in values)
    log = (tmp_path / "work" / "fst" / "seed1" / "log.txt").read_text()
    assert f"Loaded checkpoint {tmp_path / 'work' / 'dense' / 'seed1'}/epoch_1.pth" in log
    text = (tmp_path / "work" / "results.md").read_text()
    assert "| 1 + 1 " in text and "torch" in text and "fst ablate" in text
    for name in ("curves.png", "summary.png", "analysis.json", "curves.csv"):
        assert (tmp_path / "work" / name).stat().st_size > 100
