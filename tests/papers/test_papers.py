"""Every script of benchmarks/papers runs from end to end; what it writes has the paper's sense."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.pages import tables_of

pytest.importorskip("mmengine")

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks" / "papers"
MODEL = "--model fst:resnet9 --size 16 --batch-size 2 --classes 10".split()
pytestmark = [pytest.mark.slow, pytest.mark.system]


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Runs a script and returns its tables as rows by column."""

    def run(name, *arguments, figures=1):
        out = tmp_path / "out"
        monkeypatch.syspath_prepend(str(SCRIPTS))
        command = [str(SCRIPTS / f"{name}.py"), *map(str, arguments), "--out", str(out)]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as done:
            runpy.run_path(command[0], run_name="__main__")
        assert done.value.code == 0
        page = (out / "analysis.md").read_text()
        assert "    python " in page and page.count("![") == figures
        for file in re.findall(r"!\[.*\]\((.+)\)", page):
            assert (out / file).stat().st_size > 2000
        found = tables_of(out / "analysis.md")
        assert all(found)
        return found

    return run


def test_entropy(tables):
    (rows,) = tables("entropy", *MODEL, "--batches", "1", "--levels", "16")
    assert {row["input"] for row in rows} == {"images", "white noise"}
    assert all(0 <= row["H(X|X′)"] <= row["H(X)"] <= 4 for row in rows)


def test_saliency(tables, tmp_path):
    strategies = ("--strategies", "sdgp", "gg,n=1,m=4")
    total, layers = tables("saliency", *MODEL, *strategies, "--batches", "2", figures=3)
    assert [row["strategy"] for row in total] == ["sdgp", "gg,n=1,m=4"]
    assert all(0 < row["relative error"] < 1 for row in total)
    assert len(layers) == 16


def test_similarity(tables):
    (layers,) = tables("similarity", *MODEL, "--channels", "4")
    assert all(0 < row["error of grad_weight, not restored"] < 2 for row in layers)


def test_gradients(tables):
    (rows,) = tables("gradients", *MODEL)
    zeros = {row["rule"]: row["zeros"] for row in rows[:4]}
    assert zeros["dense"] < 0.5 <= zeros["magnitude"]
    assert all(row["L1 / dense"] == 1 for row in rows if row["rule"] == "dense")


def test_overhead(tables):
    measured, published = tables("overhead", *MODEL, "--repeats", "1")
    assert measured[0]["share of the step"] == published[0]["share of the step"] == 1
    assert all(row["ms"] > 0 for row in measured)
