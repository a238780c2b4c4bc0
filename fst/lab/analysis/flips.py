"""How often masks flip while a config's training begins, dense and under some λ."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from torch import Tensor

import fst
from fst.engine.config import read_sparsity
from fst.engine.model import built_wrappers
from fst.engine.runner import Runner
from fst.rules.strategy import Strategy
from fst.strategies.registry import options_of

DENSE = None  # in the place of λ: the training that prunes nothing


class FlipHook(Hook):
    """Flip rates of the masks that a strategy's rule chooses for the weights of a run.

    Every so many steps as the rule keeps a mask, the share of all masks' elements that have changed
    since the last look, for each step in between (Hu et al., ICML 2024). The masks are those of the
    weights that the optimizer has, whatever the run computes with. It ends the run.

    Args:
        strategy: whose rule of the weight in output.
        choice: the other arguments of `fst.convert`.
        steps: optimizer steps to look at.

    Attributes:
        rates: after how many steps -> flip rate.
    """

    priority = "VERY_HIGH"  # before the model is converted

    def __init__(self, strategy: Strategy, choice: dict[str, Any], steps: int) -> None:
        self.strategy, self.choice, self.steps = strategy, choice, steps
        self.rates: dict[int, float] = {}
        self._step = 0
        self._masks: list[Tensor] = []

    def before_run(self, runner: Runner) -> None:
        """Make a converted copy, which holds the rule and the names of the layers."""
        root = fst.engine.SparsityHook.root(runner)
        self._copy = copy.deepcopy(root)
        fst.convert(self._copy, self.strategy, **self.choice)

    def before_train(self, runner: Runner) -> None:
        """Look at the first masks, and from now on after optimizer steps."""
        self._root = fst.engine.SparsityHook.root(runner)
        wrapper = built_wrappers(runner.optim_wrapper)[0]
        steps = math.ceil(runner.max_iters / wrapper._accumulative_counts)
        if steps < self.steps:
            raise ValueError(f"steps={self.steps}: the training has {steps} optimizer steps only.")
        self._look()
        wrapper.optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, *_: Any) -> None:
        self._step += 1
        rule = self.strategy.output
        if self._step % rule.keeps_mask_for == 0:
            self._look()
        if self._step >= self.steps:
            raise _SeenEnough

    @torch.no_grad()
    def _look(self) -> None:
        rule, masks = self.strategy.output, []
        for name, layer in fst.sparse_layers(self._copy).items():
            layer.weight.copy_(self._root.get_submodule(name).weight)
            masks.append(layer.rule_mask())
        if self._masks:
            flips = sum((new != old).sum() for new, old in zip(masks, self._masks, strict=True))
            size = sum(mask.numel() for mask in masks) * rule.keeps_mask_for
            self.rates[self._step] = float(flips) / size
        self._masks = masks


class _SeenEnough(Exception):
    """Ends a run."""


def flip_rates(
    config: Config, decays: Iterable[float], steps: int
) -> dict[float | None, dict[int, float]]:
    """Flip rates in the first steps of a config's training, dense and for each λ.

    Each training starts from the same seed. Nothing of it is validated or kept.

    Args:
        config: with a strategy that has an option ``decay``.
        decays: λ.
        steps: optimizer steps of each training.

    Returns:
        `DENSE` or λ -> after how many steps -> flip rate.

    Raises:
        ValueError: the config's strategy has no mask by magnitude or no λ, or the steps are more
            than the training has.
    """
    strategy, choice = read_sparsity(config)
    name = "none" if strategy is None else strategy.name
    if strategy is None or strategy.output is None or "decay" not in options_of(name):
        raise ValueError(f"sparsity.strategy={name!r} has no decay λ of pruned weights.")
    if strategy.draws_masks:
        raise ValueError(f"sparsity.strategy={name!r} draws masks at random: all of them flip.")
    if steps < 2 * strategy.output.keeps_mask_for:
        raise ValueError(
            f"steps={steps}: masks are kept for {strategy.output.keeps_mask_for} steps; look at "
            "twice as many at least."
        )
    found: dict[float | None, dict[int, float]] = {}
    for decay in (DENSE, *decays):
        changed = copy.deepcopy(config)
        changed.sparsity = None if decay is DENSE else {**config.sparsity, "decay": decay}
        found[decay] = _trained(changed, FlipHook(strategy, choice, steps))
    return found


def _trained(config: Config, hook: FlipHook) -> dict[int, float]:
    for part in ("cfg", "dataloader", "evaluator"):
        config[f"val_{part}"] = config[f"test_{part}"] = None
    hooks = dict(config.get("default_hooks") or {})
    config.default_hooks = {**hooks, "checkpoint": None, "logger": None}
    config.log_level = "ERROR"
    config.resume = False
    with tempfile.TemporaryDirectory() as folder:
        config.work_dir = folder
        config.experiment_name = Path(folder).name
        runner = Runner.from_cfg(config)
        runner.register_hook(hook)
        try:
            runner.train()
        except _SeenEnough:
            pass
        runner.visualizer.close()
    return hook.rates
