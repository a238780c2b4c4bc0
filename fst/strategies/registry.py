"""Strategies by name."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from fst.basics.text import suggest
from fst.rules.rule import Rule
from fst.rules.strategy import Strategy

Recipe = TypeVar("Recipe", bound=Callable[..., Strategy])
_RECIPES: dict[str, Callable[..., Strategy]] = {}
_DEFAULTS: dict[str, Strategy] = {}


def register_strategy(name: str) -> Callable[[Recipe], Recipe]:
    """Register a function that returns a `Strategy`. Its keyword arguments are the options.

    Raises:
        ValueError: the name is taken by another function, or an argument has no default.
    """

    def register(recipe: Recipe) -> Recipe:
        taken = _RECIPES.get(name)
        if taken is not None and _origin(taken) != _origin(recipe):
            raise ValueError(f"name={name!r} is already registered by {taken.__module__}.")
        for parameter in inspect.signature(recipe).parameters.values():
            if parameter.default is inspect.Parameter.empty:
                raise ValueError(
                    f"strategy {name!r}: argument {parameter.name!r} needs a default value."
                )
        _DEFAULTS[name] = recipe()
        _RECIPES[name] = recipe
        return recipe

    return register


def _origin(recipe: Callable[..., Strategy]) -> tuple[str, str]:
    return recipe.__module__, recipe.__qualname__


def list_strategies() -> list[str]:
    """Names of all registered strategies, sorted."""
    return sorted(_RECIPES)


def recipe_of(name: str) -> Callable[..., Strategy]:
    """The function that a registered strategy is made by."""
    return _RECIPES[name]


def options_of(name: str) -> list[str]:
    """Names of the options of a registered strategy."""
    return list(inspect.signature(_RECIPES[name]).parameters)


def registered(name: object) -> str:
    """The registered name that ``name`` is, but for case, dashes and underscores.

    Raises:
        ValueError: unknown name; the nearest known one is suggested.
    """
    if isinstance(name, str) and name in _DEFAULTS:
        return name
    alike = [known for known in _DEFAULTS if _plain(known) == _plain(name)]
    if len(alike) != 1:
        raise ValueError(f"strategy={name!r} is unknown.{suggest(name, _DEFAULTS)}")
    return alike[0]


def _plain(name: object) -> str:
    return str(name).lower().replace("-", "").replace("_", "")


def named_options(text: str) -> tuple[str, dict[str, Any]]:
    """The parts of NAME or NAME,OPTION=VALUE,...: values are Python's, or plain words."""
    name, *parts = re.split(r",\s*(?=\w+=)", text)
    return name, {option: _literal(value) for option, value in (p.split("=", 1) for p in parts)}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def get_strategy(name: str | Strategy, **overrides: Any) -> Strategy:
    """The strategy of that name, with the options given instead of its defaults.

    The name may carry options itself, and differ in case, dashes and underscores.

    Example:
        ``get_strategy("sdgp", n=2, m=8)``, ``get_strategy("SDGP,n=2,m=8")``

    Raises:
        ValueError: unknown name or option (the nearest known one is suggested), bad value, or an
            option that is given twice.
    """
    if isinstance(name, Strategy):
        if overrides:
            raise ValueError(
                f"overrides {sorted(overrides)} cannot be applied to a finished Strategy; "
                "pass its name, or use dataclasses.replace."
            )
        return name
    if isinstance(name, str) and "," in name:
        name, carried = named_options(name)
        if twice := sorted(carried.keys() & overrides.keys()):
            raise ValueError(f"strategy {name!r}: {twice} are given in its name and beside it.")
        overrides |= carried
    name = registered(name)
    default = _DEFAULTS[name]
    if not overrides:
        return default
    recipe = _RECIPES[name]
    options = options_of(name)
    for option in overrides:
        if option not in options:
            raise ValueError(
                f"strategy {name!r} has no option {option!r}.{suggest(option, options)}"
            )
    _check_types(name, recipe, overrides)
    return recipe(**overrides)


def grad_weight_of(name: str | None) -> Rule | None:
    """The rule of grad_weight that the strategy ``name`` has, with the options in it; None of None.

    Raises:
        ValueError: as of `get_strategy`, or that strategy's grad_weight is dense.
    """
    rule = None if name is None else get_strategy(name).grad_weight
    if name is not None and rule is None:
        raise ValueError(f"grad_weight={name!r}: grad_weight of this strategy is dense.")
    return rule


def _check_types(name: str, recipe: Callable[..., Strategy], overrides: dict[str, Any]) -> None:
    try:
        hints = get_type_hints(recipe)
    except NameError:  # a name that is imported for type checkers alone
        return
    for option, value in overrides.items():
        allowed = hints.get(option, Any)
        if not _fits(value, allowed):
            text = inspect.formatannotation(allowed)
            raise ValueError(f"strategy {name!r}: {option}={value!r} must be of type {text}.")


def _fits(value: object, allowed: Any) -> bool:
    """True if a value, perhaps from YAML or JSON, is of an annotated or unknown type."""
    if allowed is Any:
        return True
    origin, parts = get_origin(allowed), get_args(allowed)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is tuple and Ellipsis not in parts:
        if not isinstance(value, tuple | list) or len(value) != len(parts):
            return False
        return all(map(_fits, value, parts))
    if allowed in (int, float):
        return isinstance(value, int | allowed) and not isinstance(value, bool)
    kind = origin or allowed
    return not isinstance(kind, type) or isinstance(value, kind)


def default_strategy(name: str) -> Strategy:
    """`get_strategy` without overrides; torch.compile can trace it for a registered name."""
    if isinstance(name, str) and name in _DEFAULTS:
        return _DEFAULTS[name]
    return get_strategy(name)
