"""The folder of one training run is read: its config, and the scalars that it logged."""

from __future__ import annotations

import ast
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        return "epoch" if self.config.get("train_cfg", {}).get("by_epoch") else "iteration"


def is_run(folder: Path) -> bool:
    """True if `fst train` has logged into this folder."""
    return any(folder.glob("*/vis_data/scalars.json"))


def find_runs(folder: Path) -> list[Path]:
    """Folders of runs at or below ``folder``, sorted by path."""
    return sorted({path.parents[2] for path in folder.rglob("vis_data/scalars.json")})


def read_run(folder: Path) -> RunLog:
    """Read the logs of all the starts of a run; later ones override what they repeat."""
    logs = sorted(folder.glob("*/vis_data/scalars.json"))
    if not logs:
        raise ValueError(f"{folder} holds no run of `fst train` (no */vis_data/scalars.json).")
    dumped = logs[-1].with_name("config.py")
    config = read_config(dumped) if dumped.is_file() else {}
    by_epoch = bool(config.get("train_cfg", {}).get("by_epoch"))
    validation: dict[str, Curve] = defaultdict(dict)
    lines: dict[int, tuple[int, Mapping[str, float]]] = {}
    for entry in (entry for path in logs for entry in _lines(path)):
        step = int(entry["step"])
        if "iter" in entry or "loss" in entry:
            lines[step] = (int(entry.get("epoch", 0)) if by_epoch else step, entry)
        elif "time" in entry:  # a validation; layers' densities have no time
            for name, value in entry.items():
                if name not in ("step", "time", "data_time") and _is_number(value):
                    validation[name][step] = float(value)
    values: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for x, entry in lines.values():
        for name, value in entry.items():
            if name not in ("epoch", "iter", "step") and _is_number(value):
                values[name][x].append(float(value))
    training = {
        name: {x: statistics.fmean(values) for x, values in sorted(curve.items())}
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
        if isinstance(entry, dict) and "step" in entry:
            yield entry


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def read_config(path: Path) -> dict[str, Any]:
    """The plain values of a config that mmengine has written, read without running it.

    Names whose values are more than ``dict(...)`` calls, lists and literals are left out.
    """
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8"), filename=str(path)).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = _plain(node.value)
            except ValueError:
                continue
    return found


def _plain(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        return {keyword.arg: _plain(keyword.value) for keyword in node.keywords}
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_plain, node.values), strict=True))
    if isinstance(node, (ast.List, ast.Tuple)):
        values = [_plain(element) for element in node.elts]
        return values if isinstance(node, ast.List) else tuple(values)
    return ast.literal_eval(node)


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts and lists as one dict with dotted names."""
    if isinstance(config, Mapping):
        items: Any = config.items()
    elif isinstance(config, (list, tuple)) and any(isinstance(v, Mapping) for v in config):
        items = enumerate(config)
    else:
        return {prefix: config}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
