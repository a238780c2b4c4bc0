"""The log of a training: scalars over its epochs or iterations."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmengine.config import Config

Curve = dict[int, float]


@dataclass(frozen=True)
class RunLog:
    """The log of a run, interruptions joined.

    ``validation`` has a curve for each metric, ``training`` for each scalar of the training (its
    mean over the lines of an epoch); x is the epoch, or the iteration where the loop counts these.
    """

    config: dict[str, Any]
    validation: dict[str, Curve]
    training: dict[str, Curve]

    @property
    def x_label(self) -> str:
        """Label of the curves' x-axis."""
        return "epoch" if self.config["train_cfg"]["by_epoch"] else "iteration"


def read_run(folder: Path) -> RunLog:
    """Read the logs of all the starts of a run; later ones override what they repeat.

    Raises:
        ValueError: the folder holds no run.
    """
    logs = sorted(folder.glob("*/vis_data/scalars.json"))
    if not logs:
        raise ValueError(f"{folder} holds no run of `fst train` (no */vis_data/scalars.json).")
    config = Config.fromfile(logs[-1].with_name("config.py")).to_dict()
    validation: dict[str, Curve] = defaultdict(dict)
    lines: dict[int, dict[str, Any]] = {}
    for entry in (entry for path in logs for entry in _lines(path)):
        if "iter" in entry or "loss" in entry:
            lines[entry["step"]] = entry
        elif "time" in entry:  # a validation; layers' densities have no time
            for name in entry.keys() - {"step", "time", "data_time"}:
                if _is_finite(entry[name]):
                    validation[name][entry["step"]] = entry[name]
    values: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for step, entry in lines.items():
        x = entry["epoch"] if config["train_cfg"]["by_epoch"] else step
        for name in entry.keys() - {"epoch", "iter", "step"}:
            if _is_finite(entry[name]):
                values[name][x].append(entry[name])
    training = {
        name: {x: statistics.fmean(found) for x, found in sorted(curve.items())}
        for name, curve in values.items()
    }
    return RunLog(config, {n: dict(sorted(c.items())) for n, c in validation.items()}, training)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # the process was killed while it wrote
                return
            raise ValueError(f"{path}, line {number}: {error}") from error
        if "step" in entry:
            yield entry


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
