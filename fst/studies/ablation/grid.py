"""A grid: a base config, the settings that change it, seeds, metrics, published numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from mmengine.config import Config

from fst.basics.text import suggest
from fst.basics.values import is_integer, is_number
from fst.engine.packaged import config_path

GRID_KEYS = (
    "title description extends base options epochs seeds metrics baseline published settings "
    "heatmap"
).split()
SETTING_KEYS = "label base sparsity options start_from published note".split()
METRIC_KEYS = ("label", "scale", "better")
SOURCE_KEYS = ("source", "same_data")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Metric:
    """A scalar that the runs log: its value after the last epoch, times ``scale``, is compared."""

    key: str
    label: str
    scale: float = 1.0
    better: str = "higher"


@dataclass(frozen=True)
class Published:
    """One column of published numbers; ``same_data`` if ours are measured on the same task."""

    name: str
    source: str
    same_data: bool = False


@dataclass(frozen=True)
class Setting:
    """One row of the table: what it changes in the base config, and its published numbers.

    ``sparsity`` replaces the base's as a whole, before ``options`` change it; None leaves it alone.
    In a grid's file it may be the path of a config, whose ``sparsity`` is taken. ``start_from``
    names the setting whose newest checkpoint of the same seed is loaded first.
    """

    name: str
    label: str
    base: Path
    sparsity: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    start_from: str | None = None
    published: dict[str, float] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Grid:
    """A checked grid file."""

    path: Path
    title: str
    description: str
    base: Path
    settings: dict[str, Setting]
    seeds: tuple[int, ...]
    metrics: tuple[Metric, ...]
    options: dict[str, Any] = field(default_factory=dict)
    epochs: int | None = None
    baseline: str | None = None
    published: tuple[Published, ...] = ()
    heatmap: tuple[str, ...] = ()

    @property
    def metric(self) -> Metric:
        """The first metric: the one that is compared with the published numbers."""
        return self.metrics[0]

    def chain(self, name: str) -> list[str]:
        """``name`` and the settings that it starts from, the first to train first."""
        chain = [name]
        while (earlier := self.settings[chain[0]].start_from) is not None:
            chain.insert(0, earlier)
        return chain

    def select(self, only: Iterable[str] | None) -> list[str]:
        """Names of the settings to run: all, or ``only`` and what they start from.

        Raises:
            ValueError: an unknown name.
        """
        if only is None:
            return list(self.settings)
        wanted: set[str] = set()
        for name in only:
            if name not in self.settings:
                raise ValueError(f"--only {name!r} is no setting.{suggest(name, self.settings)}")
            wanted.update(self.chain(name))
        return [name for name in self.settings if name in wanted]


def load_grid(path: str | Path) -> Grid:
    """Read and check a grid file, or one of the package's, and the files that it extends.

    A file with ``extends`` takes every key that it does not set from there; ``settings`` are merged
    by name and key. Paths are relative to the file that names them.

    Raises:
        FileNotFoundError: there is no such file, or no such base config.
        ValueError: an unknown key, or a bad value.
    """
    path = Path(config_path(str(path)))
    raw = _read(path, ())
    where = str(path)
    published = tuple(
        Published(str(name), **_published(columns, f"{where}: published.{name}"))
        for name, columns in _mapping(raw.get("published", {}), f"{where}: published").items()
    )
    columns = [column.name for column in published]
    base = raw.get("base")
    settings = {
        str(name): _setting(str(name), entry, base, columns, f"{where}: settings.{name}")
        for name, entry in _mapping(raw.get("settings"), f"{where}: settings").items()
    }
    if not settings:
        raise ValueError(
            f"{where}: settings={raw.get('settings')!r} must name at least one setting."
        )
    grid = Grid(
        path=path,
        title=_text(raw.get("title"), f"{where}: title"),
        description=_text(raw.get("description", ""), f"{where}: description"),
        base=_base(base, where),
        settings=settings,
        seeds=check_seeds(raw.get("seeds", [0]), f"{where}: seeds"),
        metrics=_metrics(raw.get("metrics"), f"{where}: metrics"),
        options=_mapping(raw.get("options", {}), f"{where}: options"),
        epochs=_epochs(raw.get("epochs"), f"{where}: epochs"),
        baseline=raw.get("baseline", "dense" if "dense" in settings else None),
        published=published,
        heatmap=tuple(map(str, _sequence(raw.get("heatmap", ()), f"{where}: heatmap"))),
    )
    _check_references(grid)
    return grid


def check_seeds(seeds: Any, where: str) -> tuple[int, ...]:
    """The seeds as a tuple; refuses what is no list of different non-negative integers."""
    seeds = _sequence(seeds, where)
    good = [s for s in seeds if is_integer(s) and s >= 0]
    if not seeds or len(good) != len(seeds) or len(set(seeds)) != len(seeds):
        raise ValueError(f"{where}={list(seeds)!r} must be different integers of 0 or more.")
    return tuple(seeds)


def _read(path: Path, heirs: tuple[Path, ...]) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"grid {str(path)!r} does not exist.")
    if path.resolve() in heirs:
        raise ValueError(f"{path}: extends={path.name!r} leads back to the file itself.")
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        message = " ".join(str(error).split())
        raise ValueError(f"{path} is no valid YAML: {message}") from error
    raw = _known(raw, GRID_KEYS, str(path))
    _resolve_base(raw, path)
    for name, entry in _mapping(raw.get("settings", {}), f"{path}: settings").items():
        entry = raw["settings"][name] = _known(entry, SETTING_KEYS, f"{path}: settings.{name}")
        _resolve_base(entry, path)
        if isinstance(entry.get("sparsity"), str):
            entry["sparsity"] = _sparsity_of(path.parent / entry["sparsity"], path)
    if "extends" not in raw:
        return raw
    parent = _read(path.parent / str(raw.pop("extends")), (*heirs, path.resolve()))
    own = raw.get("settings", {})
    settings = dict(parent.get("settings", {}))
    for name, entry in own.items():
        settings[name] = {**settings.get(name, {}), **entry}
    return {**parent, **raw, "settings": settings}


def _resolve_base(raw: dict[str, Any], path: Path) -> None:
    if "base" in raw:
        raw["base"] = path.parent / _text(raw["base"], f"{path}: base")


def _sparsity_of(config: Path, grid: Path) -> dict[str, Any]:
    if not config.is_file():
        raise FileNotFoundError(f"{grid}: config {str(config)!r} (sparsity) does not exist.")
    sparsity = Config.fromfile(config).get("sparsity")
    if sparsity is None:
        raise ValueError(f"{grid}: config {str(config)!r} has no sparsity.")
    return sparsity.to_dict()


def _base(base: Path | None, where: str) -> Path:
    if base is None:
        raise ValueError(f"{where}: base is missing: the config that the settings change.")
    if not base.is_file():
        raise FileNotFoundError(f"{where}: base config {str(base)!r} does not exist.")
    return base


def _setting(
    name: str, entry: Mapping[str, Any], base: Path | None, columns: Sequence[str], where: str
) -> Setting:
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{where}: the name becomes a folder: use letters, digits, '_', '-' and '.'; "
            "a label can be any text."
        )
    published = entry.get("published", {})
    if not isinstance(published, Mapping):
        if len(columns) != 1:
            raise ValueError(f"{where}.published={published!r} must name its column: {columns}.")
        published = {columns[0]: published}
    for column, value in published.items():
        if column not in columns:
            raise ValueError(
                f"{where}.published: {column!r} is no column of the grid's `published`."
                f"{suggest(column, columns)}"
            )
        _number(value, f"{where}.published.{column}")
    sparsity = entry.get("sparsity")
    return Setting(
        name=name,
        label=_text(entry.get("label", name), f"{where}.label"),
        base=_base(entry.get("base", base), where),
        sparsity=None if sparsity is None else _mapping(sparsity, f"{where}.sparsity"),
        options=_mapping(entry.get("options", {}), f"{where}.options"),
        start_from=entry.get("start_from"),
        published={str(column): float(value) for column, value in published.items()},
        note=_text(entry.get("note", ""), f"{where}.note"),
    )


def _check_references(grid: Grid) -> None:
    names = {f"settings.{s.name}.start_from": s.start_from for s in grid.settings.values()}
    names |= {"baseline": grid.baseline}
    names |= {f"heatmap[{i}]": name for i, name in enumerate(grid.heatmap)}
    for key, name in names.items():
        if name is not None and (not isinstance(name, str) or name not in grid.settings):
            raise ValueError(
                f"{grid.path}: {key}={name!r} is no setting.{suggest(name, grid.settings)}"
            )
    for name in grid.settings:
        seen = {name}
        while (name := grid.settings[name].start_from) is not None:
            if name in seen:
                raise ValueError(f"{grid.path}: settings.{name}.start_from leads back to itself.")
            seen.add(name)
    for name in grid.heatmap:
        missing = {"n", "m"} - set(grid.settings[name].sparsity or {})
        if missing:
            raise ValueError(
                f"{grid.path}: heatmap names {name!r}, whose sparsity has no {sorted(missing)}."
            )


def _metrics(raw: Any, where: str) -> tuple[Metric, ...]:
    metrics = []
    for key, entry in _mapping(raw, where).items():
        entry = _known(entry or {}, METRIC_KEYS, f"{where}.{key}")
        better = entry.get("better", "higher")
        if better not in ("higher", "lower"):
            raise ValueError(f"{where}.{key}.better={better!r} must be 'higher' or 'lower'.")
        label = _text(entry.get("label", str(key)), f"{where}.{key}.label")
        scale = _number(entry.get("scale", 1.0), f"{where}.{key}.scale")
        metrics.append(Metric(str(key), label, scale, better))
    if not metrics:
        raise ValueError(f"{where}={raw!r} must name a logged scalar, such as accuracy/top1.")
    return tuple(metrics)


def _published(raw: Any, where: str) -> dict[str, Any]:
    entry = _known({"source": raw} if isinstance(raw, str) else raw, SOURCE_KEYS, where)
    same = entry.get("same_data", False)
    if not isinstance(same, bool):
        raise ValueError(f"{where}.same_data={same!r} must be true or false.")
    return {"source": _text(entry.get("source"), f"{where}.source"), "same_data": same}


def _known(raw: Any, known: Sequence[str], where: str) -> dict[str, Any]:
    raw = _mapping(raw, where)
    for key in raw:
        if key not in known:
            raise ValueError(f"{where}: {key!r} is no key.{suggest(key, known)}")
    return raw


def _mapping(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise ValueError(f"{where}={raw!r} must be a mapping (key: value).")
    return dict(raw)


def _sequence(raw: Any, where: str) -> Sequence[Any]:
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        raise ValueError(f"{where}={raw!r} must be a list.")
    return raw


def _text(raw: Any, where: str) -> str:
    if not isinstance(raw, str):
        raise ValueError(f"{where}={raw!r} must be a text.")
    return " ".join(raw.split())


def _number(raw: Any, where: str) -> float:
    if not is_number(raw):
        raise ValueError(f"{where}={raw!r} must be a number.")
    return float(raw)


def _epochs(raw: Any, where: str) -> int | None:
    if raw is not None and (not is_integer(raw) or raw < 1):
        raise ValueError(f"{where}={raw!r} must be a positive integer.")
    return raw
