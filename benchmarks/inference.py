"""Packed models beside dense engines on this CPU: the page docs/results/inference.md.

    python benchmarks/inference.py                       # all cases; go on where it was stopped
    python benchmarks/inference.py --cases resnet18:16   # one

Each case is measured by `fst bench --infer` in a process of its own, which writes OUT/CASE.json. A
case whose file is there is not measured again. The page is written anew after each case. The extra
`bench` brings the engines. ATEN_CPU_CAPABILITY binds torch and this library's kernels alone, not
the engines: compare instruction sets on processors that have them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fst.basics.text import counted_as
from fst.files.checkpoint import write_text_atomically
from fst.lab.benchmark.inference import CANDIDATES, ORT_INT8, OWN, PACKED, RIVALS, Inference
from fst.lab.document import Document, Table, markdown

ROOT = Path(__file__).resolve().parents[1]
SSD300 = "fst::configs/detection/dense_ssd300_voc0712.py"
CASES = ("resnet18:16", "resnet18:1", "resnet50:16", "vgg16:4", "mobilenet_v2:16", f"{SSD300}:1")


@dataclass(frozen=True)
class Case:
    """A network with a batch size, NAME:BATCH as the command line has it."""

    text: str

    @property
    def name(self) -> str:
        """Of the network, as `fst bench --infer` takes it."""
        return self.text.rpartition(":")[0]

    @property
    def batch(self) -> str:
        """Images."""
        return self.text.rpartition(":")[2]

    @property
    def title(self) -> str:
        """In the page's tables."""
        return f"{Path(self.name).stem.removeprefix('dense_')}, batch {self.batch}"

    def file(self, folder: Path) -> Path:
        """Path of the measurement."""
        return folder / f"{Path(self.name).stem.replace(':', '_')}_{self.batch}.json"


def measure(case: Case, options: argparse.Namespace) -> None:
    """Write the case's file."""
    out = case.file(options.out).with_suffix("")
    command = [sys.executable, "-m", "fst", "bench", "--infer", case.name, "--batch", case.batch]
    command += ["--threads", *map(str, options.threads), "--out", str(out)]
    command += ["--size", str(options.size)] if options.size else []
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    took = f"{time.perf_counter() - begin:.0f} s"
    print(f"{case.text}: {took}" + (f", exit status {done.returncode}" if done.returncode else ""))


def page(cases: list[Case], folder: Path, command: str) -> Document:
    """Of the cases that are measured."""
    files = {case: case.file(folder) for case in cases if case.file(folder).is_file()}
    read = {case: json.loads(file.read_text()) for case, file in files.items()}
    found = [
        (case, Inference.from_json(one)) for case, data in read.items() for one in data["found"]
    ]
    headers = [data["header"] for data in read.values()]
    tables = [
        Table(
            "Beside the fastest float32 rival",
            ["case", "fastest rival", "rival, ms", "packed, ms", "ratio", "outputs differ by"],
            [row for case, one in found for row in _packed_rows(case, one)],
            "`ratio` is the rival's time / the packed network's, medians. Outputs: the largest "
            "difference from those of the plain model with the same weights, relative to the "
            f"largest value. Rivals: {'; '.join(RIVALS)}.",
        ),
        Table(
            "All times",
            ["case", *CANDIDATES],
            [[_named(case, one), *_medians(one)] for case, one in found],
            "Milliseconds of a batch, medians of rounds in which all candidates take turns. Images "
            "of 224 pixels (SSD300: 300) and weights are random; 2:4 and 1:4 are SR-STE's, in all "
            f"layers. `{OWN}`: packed, of weights without zeros, all layers by FST's kernels.",
        ),
    ]
    made_with = {key: str(value) for key, value in (headers[0] if headers else {}).items()}
    for name in ("command", "model", "threads"):
        made_with.pop(name, None)
    made_with["commit"] = _commits(read)
    made = ", ".join(f"{name} {value}" for name, value in made_with.items())
    notes = [f"{case.text}: not measured" for case in cases if case not in files]
    notes += sorted({f"{n}: not run. {why}" for _, one in found for n, why in one.missing.items()})
    title = "Inference on a CPU: packed models beside dense engines"
    return Document(title, "\n".join(_wins(found)), command, made, tables, [], notes)


def _commits(read: dict[Case, Any]) -> str:
    """Which cases were measured at which commit."""
    titles: dict[str, list[str]] = {}
    for case, data in read.items():
        titles.setdefault(data["header"].get("commit", "unknown"), []).append(case.title)
    if len(titles) < 2:
        return next(iter(titles), "unknown")
    return "; ".join(f"{commit} ({', '.join(of)})" for commit, of in titles.items())


def _packed_rows(case: Case, one: Inference) -> Iterator[list[str]]:
    for name in filter(one.times.__contains__, PACKED):
        times = (one.times[one.best_rival].median, one.times[name].median)
        yield [
            *(f"{_named(case, one)}, {name}", one.best_rival),
            *(f"{ms:.1f}" for ms in times),
            *(f"{one.gain(name):.2f}", f"{one.differences[name]:.0e}"),
        ]


def _named(case: Case, one: Inference) -> str:
    return f"{case.title}, {counted_as(one.threads, 'thread', 'threads')}"


def _medians(one: Inference) -> list[str]:
    return [f"{one.times[n].median:.1f}" if n in one.times else "-" for n in CANDIDATES]


def _wins(found: list[tuple[Case, Inference]]) -> list[str]:
    """Describe in words where dense rivals are faster than packed models."""
    lines = []
    for kind, rivals in (("int8", [ORT_INT8]), ("float32", list(RIVALS))):
        for name in PACKED:
            cases = [
                _named(case, one)
                for case, one in found
                if name in one.times
                and any(one.gain(r) > one.gain(name) for r in rivals if r in one.times)
            ]
            where = "; ".join(cases) or "nowhere"
            lines.append(f"- Dense {kind} is faster than {name} here: {where}.")
    return lines


def _case(text: str) -> Case:
    """For argparse."""
    name, _, batch = text.rpartition(":")
    if not name or not batch.isdecimal() or int(batch) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME:BATCH, such as resnet18:16")
    return Case(text)


def main(words: list[str] | None = None) -> None:
    """Measure the cases that are not yet there, and write the page.

    Raises:
        SystemExit: cases that failed, which the page names.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", nargs="+", type=_case, default=[*map(Case, CASES)], metavar="NAME:BATCH"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--size", type=int, help="of the images (224; detectors: the config's)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/out/inference")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/results/inference.md")
    options = parser.parse_args(words)
    options.out = options.out.resolve()
    options.page.parent.mkdir(parents=True, exist_ok=True)
    cases = options.cases
    given = sys.argv[1:] if words is None else words
    command = shlex.join(["python", "benchmarks/inference.py", *given])
    for case in cases:
        if not case.file(options.out).is_file():
            measure(case, options)
        write_text_atomically(markdown(page(cases, options.out, command)), options.page)
    if failed := [case.text for case in cases if not case.file(options.out).is_file()]:
        sys.exit(f"not measured, see above: {', '.join(failed)}")


if __name__ == "__main__":
    main()
