"""Table of runs named STRATEGY-seedN below a folder: accuracy and loss, mean ± standard deviation.

    python benchmarks/tabulate.py OUT

Prints the table as Markdown and writes the last scalars of each run to OUT/runs.json.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path


def last_scalars(run: Path) -> dict[str, float]:
    """The last value of each scalar that a run logged."""
    found: dict[str, float] = {}
    for path in sorted(run.glob("*/vis_data/scalars.json")):
        for line in path.read_text().splitlines():
            found.update(json.loads(line))
    return found


def spread(values: list[float]) -> str:
    """Mean, and the standard deviation if there are several values."""
    mean = statistics.mean(values)
    return f"{mean:.2f} ± {statistics.stdev(values):.2f}" if len(values) > 1 else f"{mean:.2f}"


def main(out: Path) -> None:
    """Print and write."""
    found = {folder.name: last_scalars(folder) for folder in sorted(out.glob("*-seed*/"))}
    found = {name: scalars for name, scalars in found.items() if "accuracy/top1" in scalars}
    (out / "runs.json").write_text(json.dumps(found, indent=1))
    runs: dict[str, list[dict[str, float]]] = defaultdict(list)
    for name, scalars in found.items():
        runs[name.split("-seed")[0]].append(scalars)
    print("| strategy | seeds | top-1 % | training loss | density of S(W) |")
    print("| --- | --- | --- | --- | --- |")
    for strategy, scalars in runs.items():
        accuracy = spread([s["accuracy/top1"] for s in scalars])
        loss = spread([s["loss"] for s in scalars])
        density = f"{scalars[0]['density']:.3f}" if "density" in scalars[0] else "dense"
        print(f"| {strategy} | {len(scalars)} | {accuracy} | {loss} | {density} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
