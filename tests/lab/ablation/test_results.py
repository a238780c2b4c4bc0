"""Means, intervals, and the table made of them, on made-up runs."""

import math
import statistics

import pytest

from fst.lab.ablation.grid import load_grid
from fst.lab.ablation.results import Results, RunResult, Summary, write
from fst.lab.logs import RunLog
from tests.pages import tables_of

CONFIG = {"train_cfg": {"by_epoch": True}}


def sdgp(n, m):
    return {"sparsity": {"strategy": "sdgp", "n": n, "m": m}}


def make(write_grid, values, **keys):
    """Results with the final accuracies given, one per seed."""
    grid = load_grid(write_grid(**keys))
    runs = []
    for name, finals in values.items():
        for seed, final in enumerate(finals):
            log = RunLog(CONFIG, {"accuracy/top1": {1: 10.0, 2: final}}, {"loss": {1: 2.0, 2: 1.0}})
            made = {"epochs": "2", "made with": f"torch 9.{seed}"}
            runs.append(RunResult(name, seed, log, made))
    return Results(grid, tuple(runs))


def test_summary():
    """Student's t, two-sided, 95 %, from printed tables: 12.706 (1), 4.303 (2), 2.776 (4)."""
    for values, times in (((1.0, 2.0), 12.706), ((90.0, 92.0, 94.0), 4.303), (range(5), 2.776)):
        made = Summary(tuple(map(float, values)))
        expected = times * statistics.stdev(values) / math.sqrt(len(values))
        assert made.interval == pytest.approx(expected, rel=1e-3)
    assert str(Summary((90.0, 92.0, 94.0))) == "92.00 ± 4.97"
    assert math.isnan(Summary((90.0,)).interval)
    assert str(Summary((90.0,))) == "90.00"
    assert str(Summary(())) == "–"


def test_the_last_epoch_counts_not_the_best(write_grid, tmp_path):
    results = make(write_grid, {"a": (5.0,)}, settings={"a": sdgp(2, 4)})
    results.runs[0].log.training["loss"][3] = 1.5
    (row,) = write(results, tmp_path, "a command").tables[0].rows
    assert (row[0], str(row[1])) == ("a", "5.00") and "1.500" in row


def test_table(write_grid, tmp_path):
    settings = {
        "dense": {"sparsity": {"strategy": "dense"}, "published": 71.0},
        "a": {**sdgp(2, 4), "label": "A|B", "published": 70.5, "note": "a note"},
        "b": sdgp(1, 4),
    }
    published = {"P": {"source": "a paper", "same_data": True}}
    values = {"dense": (90.0, 92.0), "a": (89.0, 90.0)}
    results = make(write_grid, values, settings=settings, published=published)
    write(results, tmp_path, "a command")
    (table,) = tables_of(tmp_path / "results.md")
    rows = {row["setting"]: row for row in table}
    assert rows["A|B"]["top-1 %"] == "89.50 ± 6.35"
    assert rows["A|B"]["change from dense"] == "−1.50 ± 6.35 (n = 2)"
    assert rows["A|B"]["published, P"] == 70.5
    assert rows["A|B"]["change from dense, P"] == "−0.50"
    assert rows["A|B"]["measured − P"] == 19
    assert rows["b"]["top-1 %"] == "–" and rows["b"]["published, P"] is None
    assert rows["dense"]["change from dense"] is rows["dense"]["change from dense, P"] is None
    text = (tmp_path / "results.md").read_text()
    assert "±: half of a 95% interval" in text and "torch 9.0 and torch 9.1." in text
    assert "- A|B: a note" in text and "    a command" in text
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_changes_are_those_of_the_same_seeds(write_grid, tmp_path):
    settings = {name: sdgp(2, 4) for name in ("a", "b", "c")}
    values = {"a": (90.0, 70.0), "b": (89.0,), "c": ()}
    results = make(write_grid, values, settings=settings, baseline="a")
    rows = write(results, tmp_path, "a command").tables[0].rows
    assert [row[3] for row in rows] == [None, "−1.00 (one seed: no interval)", None]
