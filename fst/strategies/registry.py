"""Strategies by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from fst.basics.text import suggest
from fst.rules.strategy import Strategy

Recipe = TypeVar("Recipe", bound=Callable[..., Strategy])
_RECIPES: dict[str, Callable[..., Strategy]] = {}
_DEFAULTS: dict[str, Strategy] = {}


def register_strategy(name: str) -> Callable[[Recipe], Recipe]:
    """Register a function that returns a `Strategy`; its keyword arguments are the overrides.

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


def get_strategy(name: str | Strategy, **overrides: Any) -> Strategy:
    """The strategy of that name, with the options given instead of its defaults.

    Example:
        ``get_strategy("sdgp", n=2, m=8, rule="magnitude")``

    Raises:
        ValueError: unknown name or option (the nearest known one is suggested), or bad value.
    """
    if isinstance(name, Strategy):
        if overrides:
            raise ValueError(
                f"overrides {sorted(overrides)} cannot be applied to a finished Strategy; "
                "pass its name, or use dataclasses.replace."
            )
        return name
    default = default_strategy(name)
    if not overrides:
        return default
    recipe = _RECIPES[name]
    options = inspect.signature(recipe).parameters
    for option in overrides:
        if option not in options:
            raise ValueError(
                f"strategy {name!r} has no option {option!r}.{suggest(option, options)}"
            )
    return recipe(**overrides)


def default_strategy(name: str) -> Strategy:
    """`get_strategy` without overrides, written so that torch.compile can trace it."""
    if name not in _DEFAULTS:
        raise ValueError(f"strategy={name!r} is unknown.{suggest(name, _DEFAULTS)}")
    return _DEFAULTS[name]
