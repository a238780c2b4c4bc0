"""benchmarks/choices.py: learning rates side by side."""

import runpy
import shutil
from pathlib import Path

import pytest

from tests.pages import tables_of

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "choices.py"


def test_rates_are_compared_over_the_seeds_that_each_has(write_grid, ablate, tmp_path, capsys):
    script = runpy.run_path(str(SCRIPT))
    settings = {
        "dense": {"sparsity": {"strategy": "dense"}},
        "good": {"label": "better", "sparsity": {"strategy": "srste"}},
        "late": {"sparsity": {"strategy": "sdgp"}},
    }
    folders = [tmp_path / "small_0.1", tmp_path / "small_0.05"]
    for folder, seeds in zip(folders, ([0, 1], [1, 2]), strict=True):
        grid = write_grid(f"{folder.name}.yaml", settings=settings, seeds=seeds)
        assert ablate(grid, "--work-dir", str(folder), "--only", "dense", "good") == 0
        shutil.copy(tmp_path / "base.py", folder)
        shutil.copy(grid, folder / "equal_time.yaml")
    out = tmp_path / "out"
    assert script["main"]([*map(str, folders), "--out", str(out)]) == 0
    (table,) = tables_of(out / "analysis.md")
    at_best = "change from dense, each at its best"
    assert table == [
        {"setting": "dense", "0.05": "**91.00**", "0.1": 91, at_best: None, "seeds": 1},
        {"setting": "better", "0.05": "**94.00**", "0.1": 94, at_best: 3, "seeds": 1},
    ]
    assert (out / "choices.png").stat().st_size > 2000
    with pytest.raises(SystemExit):
        script["main"]([str(tmp_path), "--out", str(out)])
    assert "must end in _RATE" in capsys.readouterr().err
