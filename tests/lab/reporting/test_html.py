"""The page: complete, escaped, self-contained, well formed, readable on a phone."""

from html.parser import HTMLParser

import pytest

from fst.lab.reporting import cli
from fst.lab.reporting.document import Document, Figure, Table
from fst.lab.reporting.figures import draw_curves, figure, save
from fst.lab.reporting.html import page
from fst.lab.reporting.training import describe_runs
from tests.lab.reporting.test_runs import train_line, write_log

EVIL = "<script>alert('x')</script>&\"'"
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks nesting; collects tags, ids, references, and text outside of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.references = [], [], [], []
        self.text, self.labels = "", []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        values = dict(attributes)
        self.ids += [values["id"]] if "id" in values else []
        self.labels += values.get("aria-labelledby", "").split()
        self.references += [
            (name, value)
            for name, value in attributes
            if name in ("href", "src", "xlink:href", "srcset", "action", "data")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.text += data


def draw(folder, name):
    with figure(2.0) as (drawn, axis):
        axis.plot([0, 1], label=name)
        axis.fill_between([0, 1], [0, 1], alpha=0.1)
        axis.set_title(name)
        return save(drawn, folder, name)


def sections(folder):
    table = Table("Numbers", ["name", "value"], [["b", "2.0 ± 0.1"], [EVIL, 1.23456]], EVIL)
    figures = [Figure(f"Figure {name}", draw(folder, name), EVIL) for name in ("one", "two")]
    folded = Table("Folded", ["a"], [[1]], folded=True)
    document = Document(EVIL, "A.\n\nSee `x`.", EVIL, {"v": EVIL}, [folded, table], figures, [EVIL])
    return [(document, folder, "first"), (Document("Second"), folder, "second")]


def test_the_page_is_well_formed_and_complete(tmp_path):
    text = page("Title", sections(tmp_path), {"Command": EVIL, "Date": "today"})
    read = Page(text)
    assert read.tags.count("img") == 2
    assert read.tags.count("table") == 2 and "caption" in read.tags
    assert read.tags.count("details") == 1 and read.text.index("Folded") > read.text.index(
        "Numbers"
    )
    for part in ("Second", "Numbers", "2.0 ± 0.1", "1.235", "Figure two", "today", EVIL):
        assert part in read.text
    assert read.text.count(EVIL) >= 8
    assert len(read.ids) == len(set(read.ids))
    anchors = [value for _, value in read.references if value.startswith("#")]
    assert anchors and {anchor[1:] for anchor in anchors} <= set(read.ids)
    assert set(read.labels) <= set(read.ids)
    assert "<code>x</code>" in text and "`" not in read.text


def test_nothing_is_loaded_from_elsewhere(tmp_path):
    text = page("Title", sections(tmp_path), {})
    outside = [v for _, v in Page(text).references if not v.startswith(("#", "data:image/png;"))]
    assert not outside
    assert "http" not in text.replace("http-equiv", "")
    assert "@import" not in text and "default-src 'none'" in text
    assert "script" not in Page(text).tags


def test_curves_show_every_point():
    """The first epochs, far below the others, lie on the axes; one point alone has a marker."""
    rising = {1: 10.0, 2: 90.0, 3: 91.0, 4: 92.0}
    with figure(2.0) as (_, axis):
        draw_curves(axis, {"a": [rising], "b": [{1: 50.0}]}, "epoch", "accuracy")
    (left, right), (low, high) = axis.get_xlim(), axis.get_ylim()
    assert all(left <= x <= right and low <= y <= high for x, y in rising.items())
    assert [line.get_marker() for line in axis.get_lines()] == [".", "."]


def test_reports_do_not_cut_their_curves(tmp_path, monkeypatch):
    limits = []
    monkeypatch.setattr(
        "fst.lab.reporting.training.legend_below",
        lambda drawn, axis, columns: limits.append(axis.get_ylim()),
    )
    lines = [{"acc": value, "time": 1.0, "step": step} for step, value in ((1, 10.0), (9, 92.0))]
    write_log(tmp_path / "run", "1", lines)
    describe_runs([tmp_path / "run"], tmp_path)
    assert limits[0][0] <= 10.0 and limits[0][1] >= 92.0


def test_the_command_line(tmp_path, capsys):
    """One report from an analysis, a run inside its folder (left out) and two runs elsewhere."""
    ((document, folder, _), _) = sections(tmp_path)
    analysis = tmp_path / "analysis"
    analysis.mkdir()
    for file in folder.glob("*.png"):
        file.rename(analysis / file.name)
    document.save(analysis)
    write_log(analysis / "inside", "1", [train_line(1, 1, 7.25)])
    for name, loss in (("first<b>", 3.125), ("second", 2.0625)):
        lines = [train_line(1, 1, 4.0), train_line(2, 2, loss)]
        lines += [{"acc": 12.0, "time": 1.0, "step": 2}]
        write_log(tmp_path / "runs" / name, "1", lines)
    out = tmp_path / "report.html"
    assert cli.main([str(analysis), str(tmp_path / "runs"), "-o", str(out), "--title", EVIL]) == 0
    read = Page(out.read_text(encoding="utf-8"))
    assert "2 sections" in capsys.readouterr().out
    for part in ("first<b>", "second", "3.125", "2.062", "Training runs", "fst report"):
        assert part in read.text
    assert "inside" not in read.text
    assert read.tags.count("img") == 4  # two of the analysis; metric and loss of the runs
    assert read.text.rindex("Training runs") < read.text.rindex("Numbers")
    assert cli.main([str(tmp_path / "runs"), "-o", str(out)]) == 0
    assert capsys.readouterr().out.endswith("1 section\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "-o", "x.html"], "'nowhere' is no folder"),
        ([".", "-o", "x.html"], "holds neither a run"),
        ([".", "-o", "no/x.html"], "does not exist"),
    ],
)
def test_bad_arguments(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()
