"""benchmarks/pareto.py: multiply-adds of each setting, and its time."""

import runpy
from pathlib import Path

import pytest

from fst.lab.reporting.document import load_document

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "pareto.py"


def test_accuracy_and_cost(write_grid, ablate, tmp_path):
    pytest.importorskip("matplotlib")
    script = runpy.run_path(str(SCRIPT))
    settings = {
        "dense": {"sparsity": {"strategy": "dense"}},
        "half": {"sparsity": {"strategy": "sampled"}},
    }
    grid, work, out = write_grid(settings=settings, seeds=[0]), tmp_path / "work", tmp_path / "out"
    assert ablate(grid) == 0
    arguments = ["--size", "16", "--batch-size", "4", "--repeats", "2", "--out", str(out)]
    assert script["main"]([str(grid), "--work-dir", str(work), *arguments]) == 0
    (table,) = load_document(out).tables
    shares = {row[0]: row[3] for row in table.rows}
    assert shares == {"dense": 1, "half": 0.5}
    assert all(row[4] > 0 for row in table.rows)
    command = [str(grid), "--work-dir", str(work), *arguments, "--only", "half"]
    assert script["main"](command) == 0
    assert [row[0] for row in load_document(out).tables[0].rows] == ["half"]
    with pytest.raises(SystemExit):
        script["main"]([str(grid), "--work-dir", str(tmp_path / "none"), *arguments])
    best = [(0.25, 67.0), (0.5, 72.0), (1.0, 73.0)]
    assert script["front"]([(1.0, 71.0), *best, (0.5, 70.0), (0.6, 72.0)]) == best
