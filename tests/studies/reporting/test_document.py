"""The format of analyses: written and read back, and what is refused."""

import json

import pytest

from fst.studies.reporting.document import Document, Figure, Table, load_document
from fst.studies.reporting.environment import machine, versions
from fst.studies.reporting.markdown import markdown

DOCUMENT = Document(
    title="A title",
    description="Words.",
    command="python tools/x.py",
    versions={"torch": "2"},
    tables=[Table("T", ["a", "b"], [["x", 1.23456], [None, 3]], "caption")],
    figures=[Figure("F", "f.svg", "seen")],
    notes=["a note"],
)


def test_written_and_read_back(tmp_path):
    (tmp_path / "f.svg").write_text("<svg/>")
    DOCUMENT.save(tmp_path)
    assert load_document(tmp_path) == DOCUMENT
    assert [path.name for path in tmp_path.glob("*.tmp")] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"titel": "x"}, "'titel' is no key. Did you mean 'title'"),
        ({"tables": [{"title": "T", "columns": ["a"], "rows": [[1, 2]]}]}, "must have 1 cells"),
        ({"tables": [{"title": "T", "columns": ["a"]}]}, r"tables\[0\].*rows"),
        ({"tables": ["T"]}, r"tables\[0\] must be an object"),
        ({"figures": [{"title": "F", "file": "../f.svg"}]}, "must be an SVG beside it"),
        ({"figures": [{"title": "F", "file": "f.png"}]}, "must be an SVG beside it"),
        ({"figures": [{"title": "F", "file": "g.svg"}]}, "does not exist"),
    ],
)
def test_bad_documents_are_refused(tmp_path, change, message):
    (tmp_path / "analysis.json").write_text(json.dumps({"title": "x", **change}))
    with pytest.raises(ValueError, match=message):
        load_document(tmp_path)


def test_no_json_and_no_title(tmp_path):
    for text, message in (("{", "no valid JSON"), ("{}", "title"), ("[]", "must be an object")):
        (tmp_path / "analysis.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_document(tmp_path)


def test_markdown():
    text = markdown(DOCUMENT)
    assert "# A title" in text and "    python tools/x.py" in text and "![F](f.png)" in text
    assert "| x   | 1.235 |" in text and "|     | 3     |" in text and "- a note" in text


def test_environment():
    assert {"fst", "python", "torch"} <= set(versions())
    assert "cores" in machine()
