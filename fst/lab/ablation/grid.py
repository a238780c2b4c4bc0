"""A grid: a base config, the settings that change it, seeds, metrics, published numbers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import yaml
from mmengine.config import Config

from fst.basics.text import suggest
from fst.cli.options.paths import config_path

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
Kind = TypeVar("Kind")
Count = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True)
class Metric:
    """A scalar that the runs log: its value after the last epoch, times ``scale``, is compared."""

    key: str
    label: str
    scale: float = 1.0


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
    names a setting above, whose newest checkpoint of the same seed is loaded first. ``epochs``
    counts instead of the grid's.
    """

    name: str
    label: str
    base: Path
    sparsity: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    start_from: str | None = None
    epochs: Count | None = None
    published: dict[str, float] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Grid:
    """A checked grid file. The first metric is compared with the published numbers."""

    path: Path
    title: str
    settings: dict[str, Setting]
    metrics: tuple[Metric, ...]
    description: str = ""
    seeds: tuple[int, ...] = (0,)
    options: dict[str, Any] = field(default_factory=dict)
    epochs: Count | None = None
    baseline: str | None = None
    published: tuple[Published, ...] = ()

    @property
    def metric(self) -> Metric:
        """The first metric."""
        return self.metrics[0]

    def select(self, only: Iterable[str] | None) -> list[str]:
        """Names of the settings to run: all, or ``only`` and what they start from.

        Raises:
            ValueError: an unknown name.
        """
        wanted = set(self.settings if only is None else only)
        for name in wanted:
            _check_known("--only", name, self.settings)
        for name in reversed(self.settings):
            if name in wanted and (source := self.settings[name].start_from) is not None:
                wanted.add(source)
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
    raw = _read(path)
    for name in ("title", "metrics", "settings"):
        if not raw.get(name):
            raise ValueError(f"{path}: {name}={raw.get(name)!r} is missing or empty.")
    base = raw.pop("base", "")
    published = [
        _made(
            Published,
            f"{path}: published.{name}",
            {"source": e} if isinstance(e, str) else e,
            name=name,
        )
        for name, e in _mapping(raw, "published", path).items()
    ]
    columns = [column.name for column in published]
    settings = {
        name: _setting(name, {"base": base, **entry}, columns, path)
        for name, entry in raw["settings"].items()
    }
    metrics = [
        _made(Metric, f"{path}: metrics.{key}", {"label": key, **(entry or {})}, key=key)
        for key, entry in _mapping(raw, "metrics", path).items()
    ]
    raw.setdefault("baseline", "dense" if "dense" in settings else None)
    made = {"path": path, "published": published, "settings": settings, "metrics": metrics}
    grid = _made(Grid, str(path), {k: v for k, v in raw.items() if k not in made}, **made)
    check_seeds(grid.seeds, f"{path}: seeds")
    if grid.baseline is not None:
        _check_known(f"{path}: baseline", grid.baseline, settings)
    for index, (name, setting) in enumerate(settings.items()):
        if setting.start_from is not None:
            above = list(settings)[:index]
            _check_known(f"{path}: settings.{name}.start_from", setting.start_from, above)
    return grid


def check_seeds(seeds: Sequence[int], where: str) -> tuple[int, ...]:
    """The seeds as a tuple; refuses what is no list of different non-negative integers."""
    if not seeds or min(seeds) < 0 or len(set(seeds)) != len(seeds):
        raise ValueError(f"{where}={list(seeds)!r} must be different integers of 0 or more.")
    return tuple(seeds)


def _check_known(where: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ValueError(f"{where}={name!r} is no such setting.{suggest(name, known)}")


def _made(kind: type[Kind], where: str, raw: Mapping[str, Any], **given: Any) -> Kind:
    """A dataclass of the keys of a file; an error names the key, its value, what is allowed."""
    known = {item.name for item in fields(kind)} - given.keys()  # type: ignore[arg-type]
    for key in raw:
        if key not in known:
            raise ValueError(f"{where}: {key!r} is no key.{suggest(key, known)}")
    try:
        return msgspec.convert({**raw, **given}, kind, dec_hook=lambda kind, value: kind(value))
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$.")
        key = re.split(r"\W", place)[0]
        value = f"{key}={raw[key]!r}: " if key else ""
        raise ValueError(f"{where}: {value}{text}.") from error


def _mapping(raw: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    found = raw.get(key) or {}
    if not isinstance(found, dict):
        raise ValueError(f"{path}: {key}={found!r} must map names to their keys.")
    return found


def _read(path: Path, heirs: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The keys of a file and of those that it extends; bases as whole paths, sparsity as values."""
    if not path.is_file():
        raise FileNotFoundError(f"grid {str(path)!r} does not exist.")
    if path.resolve() in heirs:
        raise ValueError(f"{path}: extends={path.name!r} leads back to the file itself.")
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, RecursionError) as error:
        message = " ".join(str(error).split())
        raise ValueError(f"{path} is no valid YAML: {message}") from error
    raw = _placed(_mapping({"grid": raw}, "grid", path), path)
    own = {n: _placed(e or {}, path) for n, e in _mapping(raw, "settings", path).items()}
    parent = {}
    if raw.get("extends") is not None:
        parent = _read(path.parent / raw.pop("extends"), (*heirs, path.resolve()))
    settings = dict(parent.get("settings", {}))
    for name, entry in own.items():
        settings[name] = {**settings.get(name, {}), **entry}
    return {**parent, **raw, "settings": settings}


def _placed(entry: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """An entry of a file with its base as a whole path, and the sparsity of the config it names."""
    placed = dict(entry)
    if entry.get("base"):
        placed["base"] = str(path.parent / entry["base"])
    if isinstance(entry.get("sparsity"), str):
        config = Config.fromfile(path.parent / entry["sparsity"])
        if "sparsity" not in config:
            raise ValueError(f"{path}: the config sparsity={entry['sparsity']!r} has no sparsity.")
        placed["sparsity"] = config.sparsity.to_dict()
    return placed


def _setting(name: str, entry: dict[str, Any], columns: Sequence[str], path: Path) -> Setting:
    where = f"{path}: settings.{name}"
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
    for column in published:
        if column not in columns:
            raise ValueError(
                f"{where}.published: {column!r} is no column of the grid's `published`."
                f"{suggest(column, columns)}"
            )
    return _made(Setting, where, {"label": name, **entry, "published": published}, name=name)
