"""benchmarks/choices.py: learning rates side by side."""

import runpy
import shutil
from pathlib import Path

import pytest

from fst.lab.reporting.document import load_document

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
    document = load_document(out)
    (table,) = document.tables
    assert table.columns == [
        "setting",
        "0.05",
        "0.1",
        "change from dense, each at its best",
        "seeds",
    ]
    assert table.rows[0] == ["dense", "**91.00**", "91.00", "", "1"]
    assert table.rows[1] == ["better", "**94.00**", "94.00", "+3.00", "1"]
    assert (out / document.figures[0].file).stat().st_size > 2000
    with pytest.raises(SystemExit):
        script["main"]([str(tmp_path), "--out", str(out)])
    assert "must end in _RATE" in capsys.readouterr().err
