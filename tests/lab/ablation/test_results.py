"""Means, intervals, orderings, and the table and heat map made of them, on made-up runs."""

import json
import math
import statistics

import pytest

from fst.lab.ablation import plots
from fst.lab.ablation.grid import load_grid
from fst.lab.ablation.plots import draw
from fst.lab.ablation.results import Results, RunResult, Summary
from fst.lab.ablation.table import write
from fst.lab.reporting.document import load_document
from fst.lab.reporting.runs import RunLog

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
            made = {"length": 2, "earlier": 0, "versions": {"torch": "9.9"}}
            runs.append(RunResult(name, seed, "finished", log, made))
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


def test_orderings(write_grid):
    """b is published as the best and is the worst here, by more than the seeds; a and c tie."""
    settings = {
        "a": {**sdgp(2, 4), "published": 70},
        "b": {**sdgp(2, 4), "published": 75},
        "c": {**sdgp(2, 4), "published": 70},
        "d": sdgp(2, 4),
    }
    values = {"a": (90, 91), "b": (80, 81), "c": (95, 60), "d": (1, 1)}
    results = make(write_grid, values, settings=settings, published={"P": "paper"})
    (ordering,) = results.orderings()
    assert ordering.pairs == 2  # a-b and b-c; d is not published
    (reversal,) = ordering.reversals
    assert (reversal.published_better, reversal.ours_better) == ("b", "a")
    assert (reversal.published_gap, reversal.our_gap) == (5, 10)
    assert reversal.beyond_noise  # 10 with both seeds


@pytest.mark.parametrize(("gap", "beyond"), [(2.4, False), (2.6, True)])
def test_what_the_paired_interval_reaches_is_noise(write_grid, gap, beyond):
    """Differences of gap − 1, gap, gap + 1: their interval is 4.303/√3 = 2.48."""
    settings = {"a": {**sdgp(2, 4), "published": 2}, "b": {**sdgp(2, 4), "published": 1}}
    values = {"a": (50.0, 60.0, 70.0), "b": (49.0 + gap, 60.0 + gap, 71.0 + gap)}
    results = make(write_grid, values, settings=settings, published={"P": "paper"})
    assert results.orderings()[0].reversals[0].beyond_noise == beyond


def test_the_largest_reversal_comes_first(write_grid):
    names = ("a", "b", "c")
    settings = {n: {**sdgp(2, 4), "published": 3 - i} for i, n in enumerate(names)}
    values = {"a": (50.0,), "b": (51.0,), "c": (55.0,)}
    results = make(write_grid, values, settings=settings, published={"P": "paper"})
    assert [r.our_gap for r in results.orderings()[0].reversals] == [5, 4, 1]


def test_the_last_epoch_counts_not_the_best(write_grid, tmp_path):
    results = make(write_grid, {"a": (5.0,)}, settings={"a": sdgp(2, 4)})
    results.runs[0].log.training["loss"][3] = 1.5
    (row,) = write(results, tmp_path, "a command").tables[0].rows
    assert row[:2] == ["a", "5.00"] and "1.500" in row


def test_a_metric_of_which_less_is_better(write_grid):
    settings = {"a": {**sdgp(2, 4), "published": 1}, "b": {**sdgp(2, 4), "published": 2}}
    metrics = {"accuracy/top1": {"better": "lower", "scale": 0.01}}
    keys = {"settings": settings, "published": {"P": "paper"}, "metrics": metrics}
    (same,) = make(write_grid, {"a": (10,), "b": (20,)}, **keys).orderings()
    (other,) = make(write_grid, {"a": (20,), "b": (10,)}, **keys).orderings()
    assert not same.reversals
    assert other.reversals[0].our_gap == pytest.approx(0.1)
    assert other.reversals[0].beyond_noise is None


def test_table(write_grid, tmp_path):
    settings = {
        "dense": {"sparsity": {"strategy": "dense"}, "published": 71.0},
        "a": {**sdgp(2, 4), "label": "A|B", "published": 70.5, "note": "a note"},
        "b": sdgp(1, 4),
    }
    published = {"P": {"source": "a paper", "same_data": True}}
    values = {"dense": (90.0, 92.0), "a": (89.0, 90.0)}
    results = make(write_grid, values, settings=settings, published=published)
    document = write(results, tmp_path, "a command")
    table = document.tables[0]
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert rows["A|B"]["top-1 %"] == "89.50 ± 6.35"
    assert rows["A|B"]["change from dense"] == "−1.50 ± 6.35 (n = 2)"
    assert rows["A|B"]["published, P"] == "70.5"
    assert rows["A|B"]["change from dense, P"] == "−0.50"
    assert rows["A|B"]["measured − P"] == "+19.00"
    assert rows["b"]["top-1 %"] == "–" and rows["b"]["published, P"] is None
    assert rows["dense"]["change from dense"] is rows["dense"]["change from dense, P"] is None
    assert document.versions["torch"] == "9.9"
    assert "±: half of a 95% interval" in table.caption
    assert load_document(tmp_path) == document
    made = json.loads((tmp_path / "results.json").read_text())["settings"]
    spread = {"std": pytest.approx(0.5**0.5), "interval": pytest.approx(6.353, rel=1e-3)}
    assert made["a"]["changes"]["accuracy/top1"] == {"mean": -1.5, **spread, "n": 2}
    assert made["dense"]["changes"] == {}
    text = (tmp_path / "results.md").read_text()
    assert "A\\|B" in text and "- A|B: a note" in text and "    a command" in text
    assert (tmp_path / "curves.csv").read_text().splitlines()[1:3] == [
        "dense,0,loss,1,2",
        "dense,0,loss,2,1",
    ]


def test_changes_are_those_of_the_same_seeds(write_grid, tmp_path):
    settings = {name: sdgp(2, 4) for name in ("a", "b", "c")}
    values = {"a": (90.0, 70.0), "b": (89.0,), "c": ()}
    results = make(write_grid, values, settings=settings, baseline="a")
    rows = write(results, tmp_path, "a command").tables[0].rows
    assert [row[3] for row in rows] == [None, "−1.00 (one seed: no interval)", None]


def test_heat_map(write_grid, tmp_path, monkeypatch):
    """Cells of the grid are labelled with their value, those that cannot be with N/A."""
    settings = {f"r{n}_{m}": sdgp(n, m) for n, m in ((1, 4), (2, 4), (1, 8))}
    values = {"r1_4": (94.11, 94.11), "r2_4": (95.25, 95.25)}
    results = make(write_grid, values, settings=settings, heatmap=list(settings))
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, _, name: drawn.append(figure) or name)
    assert draw(results, tmp_path)[-1].file == "heatmap"
    cells = {text.get_text() for text in drawn[-1].axes[0].texts}
    assert cells == {"94.11 ± 0.00", "95.25 ± 0.00", "–", "N/A"}
