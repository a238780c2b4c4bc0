"""benchmarks/changes.py: changes of several grids, paired by seed."""

import runpy
from pathlib import Path

import pytest

from tests.pages import tables_of

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "changes.py"


def test_changes_are_paired_by_seed(write_grid, ablate, tmp_path, capsys):
    script = runpy.run_path(str(SCRIPT))
    settings = {
        "dense": {"sparsity": {"strategy": "dense"}},
        "pruned": {"sparsity": {"strategy": "srste"}},
        "sampled": {"sparsity": {"strategy": "sampled"}},
    }
    grid, work, out = write_grid(settings=settings, seeds=[0, 1]), tmp_path / "work", tmp_path / "o"
    assert ablate(grid) == 0
    command = [f"{grid}={work}", "--second", "pruned", "--out", str(out)]
    assert script["main"](command) == 0
    rows = {row["setting"]: row for row in tables_of(out / "analysis.md")[0]}
    values = {name: [float(v) for v in row["seeds"].split(" / ")] for name, row in rows.items()}
    for name, before in (("pruned", "dense"), ("sampled", "pruned")):
        differences = [a - b for a, b in zip(values[name], values[before], strict=True)]
        mean, spread = rows[name][f"change from {before}"].replace("−", "-").split(" ± ")
        assert float(mean) == pytest.approx(sum(differences) / 2, abs=0.011)
        # Student's t of one degree of freedom is 12.71 at 95 %
        half = 12.706 * abs(differences[0] - differences[1]) / 2
        assert float(spread) == pytest.approx(half, abs=0.1)
    assert rows["dense"]["change from dense"] is rows["pruned"]["change from pruned"] is None
    assert (out / "changes.png").stat().st_size > 2000
    with pytest.raises(SystemExit):
        script["main"]([str(grid), "--out", str(out)])
    assert "must be GRID=WORK_DIR" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        script["main"]([f"{grid}={tmp_path}", "--out", str(out)])
    assert "no finished run of the baseline 'dense'" in capsys.readouterr().err
    for wrong in (["--only", "prund"], ["--second", "prund"]):
        with pytest.raises(SystemExit):
            script["main"]([f"{grid}={work}", *wrong, "--out", str(out)])
        assert "'prund' is no setting of these grids. Did you mean" in capsys.readouterr().err
    assert script["main"]([f"{grid}={work}", "--only", "sampled", "--out", str(out)]) == 0
    rows = tables_of(out / "analysis.md")[0]
    assert [row["setting"] for row in rows] == ["dense", "sampled"] and len(rows[0]) == 4
