"""A page for each registered strategy: docstrings, GEMMs, options, published numbers, configs."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain

from config_files import CONFIGS, GRIDS, ROOT, link, packaged_name, strategy_of
from pages import fence, linked, page, table, toctree

import fst
from fst.lab.ablation.grid import Grid, Setting, load_grid
from fst.rules.strategy import GEMMS, Strategy
from fst.strategies.registry import _RECIPES
from tests.strategy_settings import SETTINGS

INTRODUCTION = """\
Every strategy that is registered, as its own code describes it. Which one to take:
[choose](../choose.md). One of your own: [extend](../extend.md)."""
TESTED = """\
Each of these settings is compared with a slow float64 reference, trained, resumed, folded and
verified in the tests (`tests/strategy_settings.py`)."""


def pages() -> dict[str, str]:
    """Path under docs/ -> text."""
    names = fst.list_strategies()
    rows = [
        (f"[`{name}`]({name}.md)", _title(name), *_rules(fst.get_strategy(name))) for name in names
    ]
    index = page(
        "# Strategies",
        INTRODUCTION,
        table(("name", "what it is", *GEMMS), rows),
        toctree(names),
    )
    return {
        "strategies/index.md": index,
        **{f"strategies/{name}.md": _page(name) for name in names},
    }


def _page(name: str) -> str:
    recipe, strategy = _RECIPES[name], fst.get_strategy(name)
    return page(
        f"# {name}",
        _document(name),
        "## What it prunes",
        linked((inspect.getdoc(recipe) or "").partition("Args:\n")[0].strip()),
        table(("GEMM", "rule", "multiply-adds left", "how it is computed"), _gemms(strategy)),
        _around_steps(strategy),
        "## Use",
        _use(name, strategy),
        "## Options",
        _options(name),
        *_published(name),
        *_configs(name),
        "## Tested settings",
        TESTED,
        fence("python", "\n".join(_settings(name))),
    )


def _document(name: str) -> str:
    return linked(inspect.getdoc(sys.modules[_RECIPES[name].__module__]) or "")


def _title(name: str) -> str:
    return _document(name).split("\n")[0]


def _rules(strategy: Strategy) -> list[str]:
    return [str(strategy.rule(gemm) or "") for gemm in GEMMS]


def _gemms(strategy: Strategy) -> Iterator[tuple[str, ...]]:
    for gemm in GEMMS:
        rule = strategy.rule(gemm)
        if rule is None:
            yield gemm, "", "100 %", "dense"
        else:
            how = f"simulated: {rule.simulation}"
            if rule.samples:
                how = "accelerated where a layer's first step measures that it is faster"
            elif rule.acceleration:
                how = f"accelerated: {rule.acceleration}"
            yield gemm, str(rule), f"{rule.density:.0%}".replace("%", " %"), how


def _around_steps(strategy: Strategy) -> str:
    lines = []
    if strategy.decay:
        lines.append(f"- Decay: λ = {strategy.decay:g}, {strategy.decay_mode}, once per step.")
    if strategy.schedule is not None:
        kind = type(strategy.schedule)
        lines.append(
            f"- Around the optimizer's steps: {strategy.schedule} "
            f"({{py:class}}`{kind.__module__}.{kind.__qualname__}`)."
        )
    if strategy.min_in_channels > 1:
        lines.append(
            f"- Convolutions of fewer than {strategy.min_in_channels} input channels stay dense "
            "unless `include` names them."
        )
    return "\n".join(lines)


def _use(name: str, strategy: Strategy) -> str:
    lines = ["import fst", "", f'print(fst.convert(model, "{name}"))']
    if strategy.schedule is not None:
        needs = "".join(f", {argument}=..." for argument in strategy.schedule.needs)
        lines.append(f"fst.attach(model, optimizer{needs})    # before the first step")
    code = fence("python", "\n".join(lines))
    config = fence("python", f'sparsity = dict(strategy="{name}")')
    return f"{code}\n\nor, in a config:\n\n{config}"


def _options(name: str) -> str:
    recipe = _RECIPES[name]
    parameters = inspect.signature(recipe).parameters.values()
    if not parameters:
        return "It has none."
    tested = (row.build() for row in SETTINGS if row.name == name)
    meanings = _meanings([fst.get_strategy(name), *tested]) | _described(recipe)
    rows = [
        (
            f"`{option.name}`",
            f"`{_type(option.annotation)}`",
            f"`{option.default!r}`",
            meanings.get(option.name, ""),
        )
        for option in parameters
    ]
    return table(("option", "type", "default", "meaning"), rows)


def _type(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _meanings(strategies: Iterable[Strategy]) -> dict[str, str]:
    """Return the descriptions of attributes in the docstrings of the strategies' parts."""
    found: dict[str, str] = {}
    for part in chain.from_iterable(
        (s, *(s.rule(gemm) for gemm in GEMMS), s.schedule) for s in strategies
    ):
        for kind in type(part).__mro__ if part is not None else ():
            for names, text in _attributes(kind.__doc__ or ""):
                for name in set(names) - set(GEMMS):
                    found.setdefault(name, text)
    return found


def _described(recipe: Callable[..., Strategy]) -> dict[str, str]:
    """Return the descriptions of options in the recipe's docstring."""
    return {name: text for names, text in _attributes(recipe.__doc__ or "") for name in names}


def _attributes(document: str) -> Iterator[tuple[list[str], str]]:
    """The names and texts of a docstring's section "Attributes" or "Args"."""
    section = re.search(
        r"(?:Attributes|Args):\n(.*?)(?:\n\n|\Z)", inspect.cleandoc(document), re.DOTALL
    )
    if section:
        for entry in re.split(r"\n {4}(?! )", "\n" + section[1])[1:]:
            names, _, text = entry.partition(": ")
            yield re.split(r",\s*", names), " ".join(text.split())


@cache
def _grids() -> tuple[Grid, ...]:
    return tuple(map(load_grid, GRIDS))


def _strategy_of_setting(setting: Setting) -> str | None:
    if setting.sparsity is not None:
        return setting.sparsity["strategy"]
    return strategy_of(setting.base)


def _published(name: str) -> Iterator[str]:
    """The papers' numbers, from the grids that repeat the papers' own tables."""
    shown: set[tuple[str, str, float]] = set()
    parts = []
    for grid in sorted(_grids(), key=lambda grid: -len(_numbers(grid, name))):
        numbers = _numbers(grid, name)
        if not numbers <= shown:
            shown |= numbers
            columns = [column.name for column in grid.published]
            rows = [
                (row.label, *(str(row.published.get(column, "")) for column in columns), row.note)
                for row in grid.settings.values()
                if row.published and _strategy_of_setting(row) in (name, grid.baseline)
            ]
            sources = "; ".join(column.source for column in grid.published)
            parts += [table(("setting", *columns, "note"), rows)]
            parts += [f"{sources}. Repeat it: `fst ablate` with {link(grid.path)}."]
    if parts:
        yield "## Published numbers"
        yield "The papers' own, on the papers' tasks; not measured here."
        yield from parts


def _numbers(grid: Grid, name: str) -> set[tuple[str, str, float]]:
    """Return a paper's numbers of a strategy (setting, column, number), if the grid is its task."""
    if not any(column.same_data for column in grid.published):
        return set()
    return {
        (setting.label, *number)
        for setting in grid.settings.values()
        if _strategy_of_setting(setting) == name
        for number in setting.published.items()
    }


def _configs(name: str) -> Iterator[str]:
    own = [path for path in CONFIGS if strategy_of(path) == name]
    if own:
        yield "## Configs"
        yield "\n".join(f"- `{packaged_name(path)}`" for path in own)
    measured = [
        (grid.title, grid.path.stem)
        for grid in _grids()
        if (ROOT / "docs" / "results" / f"{grid.path.stem}.md").is_file()
        and any(_strategy_of_setting(setting) == name for setting in grid.settings.values())
    ]
    if measured:
        yield "## Measured here"
        yield "\n".join(f"- [{title}](../results/{stem}.md)" for title, stem in measured)


def _settings(name: str) -> Iterator[str]:
    for row in SETTINGS:
        if row.name == name:
            options = "".join(f", {key}={value!r}" for key, value in row.overrides.items())
            yield f'fst.get_strategy("{name}"{options})'
