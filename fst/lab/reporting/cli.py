"""The command line of `fst report`."""

from __future__ import annotations

import argparse
import datetime
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fst.basics.arguments import user_errors
from fst.basics.text import counted_as
from fst.cli.environment import versions
from fst.cli.options import lab as command_lines
from fst.cli.options.parsing import takes
from fst.files.checkpoint import write_text_atomically
from fst.lab.arguments import command_of
from fst.lab.reporting.document import FILE_NAME, load_document
from fst.lab.reporting.html import page
from fst.lab.reporting.runs import find_runs, is_run
from fst.lab.reporting.training import describe_runs


@takes(command_lines.report)
def main(arguments: argparse.Namespace) -> int:
    """Write the report; exit status 2 for bad input."""
    made = {
        "Date": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "Command": command_of("report", arguments),
        "Versions": ", ".join(f"{name} {value}" for name, value in versions().items()),
    }
    with user_errors(arguments):
        if not arguments.out.parent.is_dir():
            raise FileNotFoundError(f"--out: the folder of {str(arguments.out)!r} does not exist.")
        documents, runs = find_sources(arguments.sources)
        with tempfile.TemporaryDirectory() as drawings:
            sections = [(load_document(folder), folder, folder.name) for folder in documents]
            if runs:
                sections.insert(0, (describe_runs(runs, Path(drawings)), Path(drawings), ""))
            text = page(arguments.title, sections, made)
        write_text_atomically(text, arguments.out)
    print(f"wrote {arguments.out}: {counted_as(len(sections), 'section', 'sections')}")
    return 0


def find_sources(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Folders with an analysis.json, and folders of runs that belong to none of these.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: a folder in which there is nothing to report on.
    """
    documents: list[Path] = []
    runs: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise FileNotFoundError(f"{str(path)!r} is no folder.")
        found = [file.parent for file in sorted(path.rglob(FILE_NAME))]
        loose = [path] if is_run(path) else find_runs(path)
        loose = [run for run in loose if not any(run.is_relative_to(folder) for folder in found)]
        if not found and not loose:
            raise ValueError(
                f"{str(path)!r} holds neither a run of `fst train` (*/vis_data/scalars.json) "
                f"nor an ablation or analysis ({FILE_NAME})."
            )
        documents += [folder for folder in found if folder not in documents]
        runs += [run for run in loose if run not in runs]
    return documents, runs
