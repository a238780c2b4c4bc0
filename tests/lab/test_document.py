"""Pages in Markdown, and the environment that they name."""

import math
import subprocess

from fst.cli import environment
from fst.cli.environment import machine, versions
from fst.lab.document import Document, Figure, Table, markdown

DOCUMENT = Document(
    title="A title",
    description="Words.",
    command="python tools/x.py",
    made_with="torch 2",
    tables=[Table("T", ["a", "b"], [["x|y", 1.23456], [math.nan, 3], [None, "z"]], "caption")],
    figures=[Figure("F", "f.png", "seen")],
    notes=["a note"],
)


def test_markdown():
    text = markdown(DOCUMENT)
    assert "# A title" in text and "    python tools/x.py" in text and "![F](f.png)" in text
    assert "| x\\|y | 1.235 |" in text and "|      | 3     |" in text and "- a note" in text


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
