"""The format of analyses: written and read back, and what is refused."""

import subprocess

import pytest

from fst.cli import environment
from fst.cli.environment import machine, versions
from fst.lab.reporting.document import Document, Figure, Table, load_document
from fst.lab.reporting.markdown import markdown

DOCUMENT = Document(
    title="A title",
    description="Words.",
    command="python tools/x.py",
    versions={"torch": "2"},
    tables=[Table("T", ["a", "b"], [["x", 1.23456], [None, 3]], "caption")],
    figures=[Figure("F", "f.png", "seen")],
    notes=["a note"],
)


def test_written_and_read_back(tmp_path):
    DOCUMENT.save(tmp_path)
    assert load_document(tmp_path) == DOCUMENT
    assert [path.name for path in tmp_path.glob("*.tmp")] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "truncated"),
        ("{}", "missing required field `title`"),
        ("[]", "Expected `object`"),
        ('{"title": "x", "tables": ["T"]}', "`object`, got `str`.*tables"),
        ('{"title": "x", "notes": [{}]}', "`str`, got `object`.*notes"),
    ],
)
def test_other_files_of_that_name_are_refused(tmp_path, text, message):
    (tmp_path / "analysis.json").write_text(text)
    with pytest.raises(ValueError, match=f"analysis.json was not written by .*{message}"):
        load_document(tmp_path)


def test_markdown():
    text = markdown(DOCUMENT)
    assert "# A title" in text and "    python tools/x.py" in text and "![F](f.png)" in text
    assert "| x   | 1.235 |" in text and "|     | 3     |" in text and "- a note" in text


def test_environment():
    assert {"fst", "python", "torch"} <= set(versions())


def test_the_commit_of_a_checkout_else_the_version_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    version = versions()["fst"]
    assert environment.code() == f"fst {version}" and "commit" not in versions()
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]

    def git(*words):
        command = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    revision = git("rev-parse", "--short", "HEAD")
    assert environment.code() == f"fst {version}, commit {revision}"
    (tmp_path / "file").write_text("2")
    assert versions()["commit"] == f"{revision} with changes"
    assert "cores" in machine()
