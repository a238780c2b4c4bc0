"""Running grids: success, failure, resumption, changed configs."""

import os
import signal

import pytest

from fst.cli import main
from fst.lab.ablation import runs
from tests.pages import tables_of
from tests.programs import python

DENSE, FST = {"sparsity": {"strategy": "dense"}}, {"sparsity": {"strategy": "fst"}}


@pytest.fixture
def rows(tmp_path):
    """Reads the rows of results.md by setting."""

    def read():
        (table,) = tables_of(tmp_path / "work" / "results.md")
        return {row["setting"]: row for row in table}

    return read


def test_a_failing_setting_leaves_the_others_alone(write_grid, ablate, tmp_path, capsys, rows):
    settings = {
        "fails": DENSE,
        "after": {"start_from": "fails"},
        "dense": DENSE,
        "good": {**FST, "start_from": "dense"},
    }
    assert ablate(write_grid(settings=settings)) == 1
    printed = capsys.readouterr().out
    assert "fails, seed 0 failed with exit status 1: the loss is <not> [finite]" in printed
    assert "after, seed 1 not started: fails, seed 1, which it starts from, failed" in printed
    made = rows()
    assert made["dense"]["top-1 %"] == "90.50 ± 6.35" and made["good"]["epochs"] == "1 + 1"
    assert made["good"]["change from dense"] == "+3.00 ± 0.00 (n = 2)"
    assert (made["fails"]["runs"], made["fails"]["top-1 %"]) == (0, "–")
    assert not (tmp_path / "work" / "after").exists()


def test_a_run_starts_from_the_same_seed_of_another_setting(write_grid, ablate, tmp_path, calls):
    settings = {"dense": DENSE, "good": {**FST, "start_from": "dense"}}
    assert ablate(write_grid(settings=settings), "--jobs", "3") == 0
    start = tmp_path / "work" / "dense" / "seed1" / "epoch_1.pth"
    assert calls("good", seed=1)[0]["argv"] == ["--cfg-options", f"load_from={start}"]
    assert calls("dense", seed=1)[0]["argv"] == []


def test_a_finished_run_is_kept_and_a_failed_one_goes_on(write_grid, ablate, calls, tmp_path, rows):
    grid = write_grid(settings={"fails": DENSE, "dense": DENSE})
    ablate(grid)
    checkpoint = tmp_path / "work" / "dense" / "seed0" / "epoch_1.pth"
    (tmp_path / "work" / "fails" / "seed0" / "epoch_1.pth").write_bytes(checkpoint.read_bytes())
    assert ablate(grid) == 1
    assert len(calls("dense")) == len(calls("dense", seed=1)) == 1
    assert [call["argv"] for call in calls("fails")] == [[], ["--resume"]]
    assert [call["argv"] for call in calls("fails", seed=1)] == [[], []]
    assert ablate(grid, "--only", "dense") == 0
    assert list(rows()) == ["dense"]


def test_cores_are_shared_out(write_grid, ablate, calls, monkeypatch):
    monkeypatch.setattr("fst.lab.ablation.cli.cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ablate(write_grid(seeds=[0]), "--jobs", "3")
    assert calls("dense")[0]["threads"] == "2"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    ablate(write_grid(seeds=[1]), "--jobs", "3")
    assert calls("dense", seed=1)[0]["threads"] == "5"


@pytest.mark.parametrize("arguments", [[], ["--report-only"], ["--dry-run"]])
def test_a_run_of_another_config_is_refused(write_grid, ablate, capsys, arguments):
    ablate(write_grid(seeds=[0]))
    grid = write_grid(seeds=[0], options={"optim_wrapper.optimizer.lr": 0.5})
    with pytest.raises(SystemExit) as stop:
        ablate(grid, *arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "dense/seed0 was trained with another config; give another --work-dir" in error
    assert "- optim_wrapper = {'optimizer': {'type': 'SGD', 'lr': 0.05}}\n" in error
    assert "+ optim_wrapper = {'optimizer': {'type': 'SGD', 'lr': 0.5}}\n" in error


def test_dry_run_and_report_only(write_grid, ablate, tmp_path, capsys, rows):
    grid, page = write_grid(), tmp_path / "work" / "results.md"
    assert ablate(grid, "--dry-run") == 0
    assert "2 runs, all configs are valid" in capsys.readouterr().out
    assert not (tmp_path / "work").exists()
    assert ablate(grid, "--report-only") == 1
    assert rows()["dense"]["runs"] == 0
    options = ["--seeds", "0", "3", "--epochs", "2"]
    assert ablate(grid, *options) == 0
    first = page.read_text()
    assert ablate(grid, *options, "--report-only") == 0
    assert page.read_text() == first and "--epochs 2" in first
    assert rows()["dense"]["epochs"] == 2


def test_a_metric_that_is_not_logged_has_no_number(write_grid, ablate, rows):
    assert ablate(write_grid(metrics={"pascal_voc/mAP": {}}), "--seeds", "0") == 0
    assert rows()["dense"]["pascal_voc/mAP"] == "–"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "dens"], "--only='dens' is no such setting. Did you mean 'dense'"),
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
    assert f"Not a directory: '{tmp_path}/work" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_training_and_the_same_command_goes_on(
    write_grid, tmp_path, capsys, monkeypatch, number, status
):
    """The training signals its parent and waits for its own end."""
    press = f"import os, time; os.kill({os.getpid()}, {number:d}); print('on', flush=True)"
    monkeypatch.setattr(runs, "TRAIN", ["-c", f"{press}; time.sleep(600)"])
    with pytest.raises(SystemExit) as stop:
        main(["ablate", str(write_grid(seeds=[0])), "--work-dir", str(tmp_path / "work")])
    assert stop.value.code == status
    assert capsys.readouterr().err == "stopped; the same command goes on from here\n"


@pytest.mark.system
def test_a_real_grid(write_grid, tmp_path, rows):
    """Two settings, two seeds, one epoch of two steps; the second starts from the first."""
    settings = {"dense": DENSE, "fst": {**FST, "start_from": "dense", "published": 71.0}}
    grid, work = write_grid(settings=settings, published={"Paper": "a table"}), tmp_path / "work"
    python("tools/ablate.py", grid, "--work-dir", work, "--jobs", "2")
    made = rows()
    assert made["dense"]["runs"] == made["fst"]["runs"] == 2 and made["fst"]["epochs"] == "1 + 1"
    log = (work / "fst" / "seed1" / "log.txt").read_text()
    assert f"Loaded checkpoint {work / 'dense' / 'seed1'}/epoch_1.pth" in log
    text = (work / "results.md").read_text()
    assert "torch" in text and f"fst ablate {grid}" in text
    assert (work / "curves.png").stat().st_size > 1000
