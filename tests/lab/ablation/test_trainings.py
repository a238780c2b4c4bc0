"""benchmarks/trainings.py: as many trainings as fit into some seconds; the rest goes on later."""

from __future__ import annotations

import importlib
import json
import textwrap
from pathlib import Path

import pytest

from fst.lab.ablation import runs

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
SETTINGS = {"dense": {"sparsity": {"strategy": "dense"}}, "good": {"sparsity": {"strategy": "fst"}}}
SLEEPS = """
import pathlib, shutil, sys, time
shutil.copy(pathlib.Path(__file__).with_name("some.pth"), pathlib.Path(sys.argv[3], "epoch_1.pth"))
time.sleep(60)
"""


@pytest.fixture
def trainings(monkeypatch, tmp_path, write_grid):
    """Runs the script in tmp_path/work, where a step takes 1 s, and an epoch two of them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("trainings")
    times = {name: [1e3, 1e3, 1e3] for name in SETTINGS}
    known = {"steps": times, "iterations": dict.fromkeys(SETTINGS, 2), "machine": {}}
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "steps.json").write_text(json.dumps(known))
    grid = write_grid(settings=SETTINGS)

    def run(training: Path, seconds: float) -> int:
        monkeypatch.setattr(runs, "TRAIN", [str(training)])
        words = [str(grid), "--work-dir", str(tmp_path / "work"), "--seconds", str(seconds)]
        return script.main(words)

    return run


def test_as_many_run_at_once_as_fit(trainings, stand_in, tmp_path, capsys, calls):
    assert trainings(stand_in, 60) == 0
    printed = capsys.readouterr().out
    assert "4 of 4 trainings fit: dense, seed 0; good, seed 0; dense, seed 1" in printed
    assert "0 trainings are left" in printed
    assert calls("good", seed=1)[0]["threads"] == "1"
    assert "good" in (tmp_path / "work" / "results.md").read_text()


def test_a_training_that_was_stopped_goes_on(trainings, stand_in, tmp_path, capsys, calls):
    sleeps = tmp_path / "sleeps.py"
    sleeps.write_text(textwrap.dedent(SLEEPS))
    assert trainings(sleeps, 5) == 0
    printed = capsys.readouterr().out
    assert "2 of 4 trainings fit: dense, seed 0; good, seed 0\n" in printed
    assert "stopped after 5 s\n4 trainings are left: the same command goes on" in printed
    assert trainings(stand_in, 60) == 0
    assert [call["argv"] for call in calls("dense")] == [["--resume"]]
    assert [call["argv"] for call in calls("dense", seed=1)] == [[]]
