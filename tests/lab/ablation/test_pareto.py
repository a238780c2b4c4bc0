"""benchmarks/pareto.py: accuracy and the times of each setting."""

import runpy
from pathlib import Path

import pytest

from fst.ops import cpp
from tests.pages import tables_of

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "pareto.py"


@pytest.fixture
def script(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))  # scripts import each other
    return runpy.run_path(str(SCRIPT))


def test_the_front_is_what_no_cheaper_setting_reaches(script):
    best = [(0.25, 67.0), (0.5, 72.0), (1.0, 73.0)]
    assert script["front"]([(1.0, 71.0), *best, (0.5, 70.0), (0.6, 72.0)]) == best


def test_accuracy_and_the_times_of_networks(script, write_grid, ablate, tmp_path):
    """Times lie in the work dir: the runs may come later, and elsewhere."""
    if cpp.missing():
        pytest.skip(cpp.missing())
    wide = {"sparsity": {"strategy": "srste", "n": 1}, "options": {"model.architecture.width": 8}}
    settings = {"dense": {"sparsity": {"strategy": "dense"}}, "good_wide": wide}
    grid, work, out = write_grid(settings=settings), tmp_path / "work", tmp_path / "out"
    command = [str(grid), "--work-dir", str(work), "--out", str(out)]
    command += ["--size", "16", "--batch-size", "2", "--repeats", "2"]
    assert script["main"]([*command, "--measure-only"]) == 0
    assert not out.exists()
    measured = (work / "packed.json").read_text()
    assert ablate(grid) == 0
    assert script["main"](command) == 0
    assert (work / "packed.json").read_text() == measured
    rows = {row["setting"]: row for row in tables_of(out / "analysis.md")[0]}
    assert rows["dense"]["time of the packed network"] == 1
    assert rows["good_wide"]["change from dense"] == "+3.00 ± 0.00 (n = 2)"
    assert 0.5 < float(rows["good_wide"]["multiply-adds of inference"]) < 1.5
    (tmp_path / "later.yaml").write_text(
        grid.read_text() + "  later: {sparsity: {strategy: srste}}\n"
    )
    with pytest.raises(SystemExit):
        script["main"]([str(tmp_path / "later.yaml"), *command[1:]])
