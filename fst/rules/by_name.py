"""A rule of grad_weight from plain data, as configs and plans have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fst.basics.text import suggest
from fst.rules.alternating import Alternating
from fst.rules.bands import Bands
from fst.rules.rule import Rule
from fst.rules.sampled import Sampled

RULES: dict[str, type[Rule]] = {"alternating": Alternating, "bands": Bands, "sampled": Sampled}


def grad_weight_rule(options: Mapping[str, Any] | None) -> Rule | None:
    """The rule that ``options`` describe: ``{"rule": "sampled", "keep": 4}``; None for dense.

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
    known = [field.name for field in fields(RULES[name]) if field.name != "operand"]
    for option in given:
        if option not in known:
            raise ValueError(
                f"grad_weight: rule {name!r} has no option {option!r}.{suggest(option, known)}"
            )
    return RULES[name](**given)


def chosen_rule(choice: Rule | Mapping[str, Any]) -> Rule:
    """A rule to choose from, which its options may stand for.

    Raises:
        ValueError: as `grad_weight_rule`.
        TypeError: it is neither, or a rule that no options stand for.
    """
    rule = grad_weight_rule(choice) if isinstance(choice, Mapping) else choice
    if not isinstance(rule, Rule) or type(rule) not in RULES.values():
        kinds = ", ".join(kind.__name__ for kind in RULES.values())
        raise TypeError(f"choices: {rule!r} must be one of {kinds}, or options as in a plan.")
    return rule


def planned_rules(plan: Mapping[str, Mapping[str, Any] | None] | None) -> dict[str, Rule | None]:
    """The rule of each layer that a plan names.

    Raises:
        ValueError: as `grad_weight_rule`; the message names the layer.
        TypeError: ``plan`` is no mapping from names to options.
    """
    if plan is None:
        return {}
    if not isinstance(plan, Mapping):
        raise TypeError(f"plan={plan!r} must be a mapping from layers to options, or None.")
    rules = {}
    for name, options in plan.items():
        try:
            rules[name] = grad_weight_rule(options)
        except (TypeError, ValueError) as error:
            raise type(error)(f"plan, layer {name!r}: {error}") from error
    return rules


def options_of(rule: Rule | None) -> dict[str, Any] | None:
    """What `grad_weight_rule` makes ``rule`` of again."""
    if rule is None:
        return None
    (name,) = (name for name, kind in RULES.items() if type(rule) is kind)
    values = {f.name: getattr(rule, f.name) for f in fields(rule) if f.name != "operand"}
    return {"rule": name, **{k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}}
