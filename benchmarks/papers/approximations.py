"""Approximations of a gradient: by a strategy, or by pruning grad_output along any axis."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model_under_test import one_step
from probe import PROBE, GradientProbe, insert_probe
from torch import nn

import fst
from fst.rules.nm import NM
from fst.rules.strategy import Strategy
from fst.strategies.registry import named_options

REFERENCES = ("forward", "dense")


@dataclass(frozen=True)
class Approximation:
    """A way to compute gradients, and the exact way that it approximates.

    Attributes:
        label: as the user wrote it.
        rule: a strategy (see `one_step`) or a probe.
    """

    label: str
    rule: Strategy | GradientProbe

    def prepare(self, model: nn.Module, selectors: Mapping[str, Any], seed: int = 0) -> None:
        """Make ``model`` (dense) compute its gradients this way."""
        if isinstance(self.rule, Strategy):
            fst.convert(model, one_step(self.rule), **selectors)
            fst.seed_random_rules(model, seed)
            _keep_masks(model, model)
        else:
            insert_probe(model, self.rule)

    def prepare_reference(
        self,
        model: nn.Module,
        selectors: Mapping[str, Any],
        reference: str = "forward",
        seed: int = 0,
    ) -> None:
        """Make ``model`` compute exact gradients: "forward" prunes the forward pass as the
        approximation does and nothing else, "dense" prunes nothing.
        """
        if reference not in REFERENCES:
            raise ValueError(f"reference={reference!r} must be one of {', '.join(REFERENCES)}.")
        rule = self.rule.output if isinstance(self.rule, Strategy) else None
        if rule is not None and reference == "forward":
            pruned = copy.deepcopy(model)
            self.prepare(pruned, selectors, seed)
            least = self.rule.min_in_channels
            forward = Strategy("forward", output=NM("weight"), min_in_channels=least)
            fst.convert(model, forward, **selectors)
            _keep_masks(model, pruned)


def _keep_masks(model: nn.Module, pruned: nn.Module) -> None:
    """Prune the weights of ``model`` by the masks that ``pruned`` has now, in every step."""
    layers = fst.sparse_layers(model)
    for name, source in fst.sparse_layers(pruned).items():
        mask = source.output_mask()
        if mask is not None:
            layers[name].keep(mask.view(source.weight_as_conv().shape))


def parse(text: str) -> Approximation:
    """From "NAME" or "NAME,option=value,...": a registered strategy, or "dy".

    The options of "dy" (see `GradientProbe`) are n, m, rule, rescale, axis and gemm.

    Raises:
        ValueError: unknown name, option or value.
    """
    name, values = named_options(text)
    if name != PROBE:
        return Approximation(text, fst.get_strategy(name, **values))
    where = {option: values.pop(option) for option in ("axis", "gemm") if option in values}
    try:
        rule = NM("grad_output", **values)
    except TypeError as error:
        known = "n, m, rule, rescale, axis, gemm"
        raise ValueError(f"{text!r}: {error}; the options of {PROBE!r} are {known}.") from error
    return Approximation(text, GradientProbe(rule, **where))
