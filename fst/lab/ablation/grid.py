"""A grid: a base config, the settings that change it, seeds, metrics, published numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import yaml
from mmengine.config import Config

from fst.basics.text import suggest
from fst.cli.options.paths import config_path

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
OWN = "<name>"  # under which an entry's name is put beside its keys, of which it is none
Keys = TypeVar("Keys", bound="_Keys")


class _Keys(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The keys that a mapping of a grid's file may have."""


class Metric(_Keys):
    """A scalar that the runs log: its value after the last epoch, times ``scale``, is compared."""

    key: str = msgspec.field(name=OWN)
    label: str
    scale: float = 1.0
    better: Literal["higher", "lower"] = "higher"


class Published(_Keys):
    """One column of published numbers; ``same_data`` if ours are measured on the same task."""

    name: str = msgspec.field(name=OWN)
    source: str
    same_data: bool = False


class Setting(_Keys):
    """One row of the table: what it changes in the base config, and its published numbers.

    ``sparsity`` replaces the base's as a whole, before ``options`` change it; None leaves it alone.
    In a grid's file it may be the path of a config, whose ``sparsity`` is taken. ``start_from``
    names the setting whose newest checkpoint of the same seed is loaded first. ``epochs`` counts
    instead of the grid's.
    """

    name: str = msgspec.field(name=OWN)
    label: str
    base: Path
    sparsity: dict[str, Any] | None = None
    options: dict[str, Any] = {}
    start_from: str | None = None
    epochs: Annotated[int, msgspec.Meta(ge=1)] | None = None
    published: dict[str, float] = {}
    note: str = ""


class _GridKeys(_Keys):
    title: str = ""
    description: str = ""
    extends: str | None = None
    base: str = ""
    options: dict[str, Any] = {}
    epochs: Annotated[int, msgspec.Meta(ge=1)] | None = None
    seeds: list[int] = msgspec.field(default_factory=lambda: [0])
    metrics: dict[str, dict[str, Any] | None] = {}
    baseline: str | msgspec.UnsetType | None = msgspec.UNSET
    published: dict[str, str | dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}


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
    keys = _typed(raw, _GridKeys, str(path))
    for name in ("title", "base", "metrics", "settings"):
        if not getattr(keys, name):
            raise ValueError(f"{path}: {name}={raw.get(name)!r} is missing or empty.")
    published = tuple(
        _typed(
            {"source": entry, OWN: name} if isinstance(entry, str) else {**entry, OWN: name},
            Published,
            f"{path}: published.{name}",
        )
        for name, entry in keys.published.items()
    )
    columns = [column.name for column in published]
    settings = {
        name: _setting(name, entry, keys.base, columns, path)
        for name, entry in keys.settings.items()
    }
    baseline = keys.baseline
    if baseline is msgspec.UNSET:
        baseline = "dense" if "dense" in settings else None
    grid = Grid(
        path=path,
        title=_line(keys.title),
        description=_line(keys.description),
        base=_base(keys.base, path),
        settings=settings,
        seeds=check_seeds(keys.seeds, f"{path}: seeds"),
        metrics=tuple(
            _typed({"label": key, **(entry or {}), OWN: key}, Metric, f"{path}: metrics.{key}")
            for key, entry in keys.metrics.items()
        ),
        options=keys.options,
        epochs=keys.epochs,
        baseline=baseline,
        published=published,
    )
    _check_references(grid)
    return grid


def check_seeds(seeds: Sequence[int], where: str) -> tuple[int, ...]:
    """The seeds as a tuple; refuses what is no list of different non-negative integers."""
    if not seeds or min(seeds) < 0 or len(set(seeds)) != len(seeds):
        raise ValueError(f"{where}={list(seeds)!r} must be different integers of 0 or more.")
    return tuple(seeds)


def _typed(raw: Any, kind: type[Keys], where: str) -> Keys:
    """The mapping as what its keys may be; an error names the key, its value, what is allowed."""
    try:
        return msgspec.convert(raw, kind, dec_hook=lambda kind, value: kind(value))  # of paths
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$")
        if unknown := re.search("unknown field `(.+)`", text):
            hint = suggest(unknown[1], kind.__struct_fields__)
            raise ValueError(f"{where}: {unknown[1]!r} is no key.{hint}") from error
        value, steps = raw, re.findall(r"\.(\w+)|\[(\d+)\]", place)
        for name, index in steps:
            value = value[name] if name else value[int(index)]
        raise ValueError(f"{where}{place.rstrip('`')}={value!r}: {text}.") from error


def _read(path: Path, heirs: tuple[Path, ...]) -> dict[str, Any]:
    """The keys of a file and of those that it extends, with whole paths."""
    if not path.is_file():
        raise FileNotFoundError(f"grid {str(path)!r} does not exist.")
    if path.resolve() in heirs:
        raise ValueError(f"{path}: extends={path.name!r} leads back to the file itself.")
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, RecursionError) as error:
        message = " ".join(str(error).split())
        raise ValueError(f"{path} is no valid YAML: {message}") from error
    keys = _typed(raw, _GridKeys, str(path))
    own = {}
    for name, entry in keys.settings.items():
        own[name] = _with_whole_base(entry, path)
        if isinstance(entry.get("sparsity"), str):
            own[name]["sparsity"] = _sparsity_of(path.parent / entry["sparsity"], path)
        # here, where the file is known that says it
        known = {"label": "", "base": "", **own[name], "published": {}, OWN: name}
        _typed(known, Setting, f"{path}: settings.{name}")
    raw = {**_with_whole_base(raw, path), "settings": own}
    if keys.extends is None:
        return raw
    parent = _read(path.parent / keys.extends, (*heirs, path.resolve()))
    settings = dict(parent["settings"])
    for name, entry in own.items():
        settings[name] = {**settings.get(name, {}), **entry}
    return {**parent, **raw, "settings": settings}


def _with_whole_base(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    return {**raw, "base": str(path.parent / raw["base"])} if raw.get("base") else dict(raw)


def _sparsity_of(config: Path, grid: Path) -> dict[str, Any]:
    if not config.is_file():
        raise FileNotFoundError(f"{grid}: config {str(config)!r} (sparsity) does not exist.")
    sparsity = Config.fromfile(config).get("sparsity")
    if sparsity is None:
        raise ValueError(f"{grid}: config {str(config)!r} has no sparsity.")
    return sparsity.to_dict()


def _base(base: str, grid: Path) -> Path:
    if not Path(base).is_file():
        raise FileNotFoundError(f"{grid}: base config {base!r} does not exist.")
    return Path(base)


def _line(text: str) -> str:
    return " ".join(text.split())


def _setting(
    name: str, entry: Mapping[str, Any], base: str, columns: Sequence[str], path: Path
) -> Setting:
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
    raw = {"label": name, "base": base, **entry, "published": published, OWN: name}
    setting = _typed(raw, Setting, where)
    _base(str(setting.base), path)
    return msgspec.structs.replace(setting, label=_line(setting.label), note=_line(setting.note))


def _check_references(grid: Grid) -> None:
    names = {f"settings.{s.name}.start_from": s.start_from for s in grid.settings.values()}
    names |= {"baseline": grid.baseline}
    for key, name in names.items():
        if name is not None and name not in grid.settings:
            raise ValueError(
                f"{grid.path}: {key}={name!r} is no setting.{suggest(name, grid.settings)}"
            )
    for name in grid.settings:
        seen = {name}
        while (name := grid.settings[name].start_from) is not None:
            if name in seen:
                raise ValueError(f"{grid.path}: settings.{name}.start_from leads back to itself.")
            seen.add(name)
