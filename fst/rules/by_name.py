"""A rule of grad_weight from plain data, as configs have it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from fst.basics.text import suggest
from fst.rules.alternating import Alternating
from fst.rules.masks import RESCALES
from fst.rules.nm import NM
from fst.rules.rule import Rule
from fst.rules.sampled import Sampled

NOT_OF_MVUE = {"rescale": RESCALES[0], "group_order": "channel"}
# the class, and the fields that are no options
RULES: dict[str, tuple[type[Rule], dict[str, str]]] = {
    "alternating": (Alternating, {"operand": "input"}),
    "mvue": (NM, {"operand": "grad_output", "rule": "mvue", **NOT_OF_MVUE}),
    "sampled": (Sampled, {"operand": "grad_output"}),
}

LEFT = {
    "noise": "It has left, because its bound did not hold (docs/negative.md); keep= sets the share."
}


def unknown_option(option: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown option: that it has left, or the known ones."""
    return f" {LEFT[option]}" if option in LEFT else suggest(option, known)


def grad_weight_rule(options: Mapping[str, Any] | None) -> Rule | None:
    """The rule that ``options`` describe: ``{"rule": "sampled", "keep": 0.25}``; None for dense.

    Raises:
        ValueError: unknown rule or option, or bad value.
        TypeError: ``options`` are no mapping.
    """
    if options is None:
        return None
    if not isinstance(options, Mapping):
        raise TypeError(f"grad_weight={options!r} must be a mapping of options, or None (dense).")
    given = dict(options)
    name = given.pop("rule", None)
    if name not in RULES:
        raise ValueError(f"grad_weight: rule={name!r} is unknown.{suggest(name, RULES)}")
    kind, fixed = RULES[name]
    known = [field.name for field in fields(kind) if field.name not in fixed]
    for option in given:
        if option not in known:
            hint = unknown_option(option, known)
            raise ValueError(f"grad_weight: rule {name!r} has no option {option!r}.{hint}")
    return kind(**fixed, **given)
