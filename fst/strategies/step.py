"""STEP: Adam trains dense until its second moment is steady; from then on the moment is held.

Paper: Lu et al., "STEP: Learning N:M Structured Sparsity Masks from Scratch with Precondition",
ICML 2023 (arXiv 2302.01172), with its AutoSwitch between two phases. No code of its authors is
known; the code read is that of others, github.com/huyz2023/2by4-pretrain, sparse/adamw_step.py, and
the paper's full text was not at hand. Z_t is the mean of |v_t − v_{t−1}| over all
pruned weights ("arithmetic"), or exp of the mean logarithm ("geometric"); the switch comes when the
mean of the last 1/(1 − β₂) values of Z is below Adam's ε, after the share ``earliest`` of the
steps, and at ``latest`` whatever Z is. Then Y = S(W)·X with a straight-through gradient, and

    W ← W − lr / (1 − β₁ᵗ) · m_t / (√v* + ε^(3/4))

v* being v at the switch, not corrected for its start. Weights that are not pruned follow Adam. That
code leaves the two shares to its user; 0.1 and 0.5 are this project's. Layers of another n:m
(``patterns`` of `fst.convert`) switch by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fst.basics.sharding import is_sharded
from fst.basics.values import check_number, one_of
from fst.rules.nm import NM, SameAsOutput
from fst.rules.schedule import DENSE, Layers, PrunedLayer, Run, Schedule
from fst.rules.strategy import Strategy
from fst.strategies.registry import register_strategy

MEANS = ("arithmetic", "geometric")


@dataclass(frozen=True)
class HeldMoment(Schedule):
    """Dense until Adam's second moment is steady, then pruned with that moment held.

    Attributes:
        earliest, latest: shares of the training between which the switch lies.
        mean: of the changes, "arithmetic" or "geometric".
    """

    earliest: float = 0.1
    latest: float = 0.5
    mean: str = "arithmetic"
    needs: ClassVar[tuple[str, ...]] = ("total_steps",)

    def __post_init__(self) -> None:
        check_number("earliest", self.earliest, "[0, 1)")
        check_number("latest", self.latest, "[0, 1)")
        one_of("mean", self.mean, MEANS)
        if self.earliest > self.latest:
            raise ValueError(f"earliest={self.earliest} must not exceed latest={self.latest}.")

    def attached(self, layers: Layers, run: Run) -> None:
        if not isinstance(run.optimizer, torch.optim.Adam | torch.optim.AdamW):
            raise ValueError(
                f"optimizer is a {type(run.optimizer).__name__}: strategy "
                f"{layers[0].strategy.name!r} holds the second moment of torch.optim.Adam or AdamW."
            )

        if any(is_sharded(layer.weight) for layer in layers):
            raise ValueError(
                f"strategy {layers[0].strategy.name!r} holds moments of whole weights: FSDP, which "
                "shards them, is not supported; use DistributedDataParallel."
            )

    def remembered(self, phase: Any) -> tuple[str, ...]:
        return ("phase",) if phase == DENSE else ("phase", "moment")

    def start(self, layers: Layers, run: Run) -> None:
        for layer in layers:
            layer.set_phase(dict(DENSE))

    def before_update(self, layers: Layers, run: Run, step: int) -> None:
        for layer in layers:
            run.check_gradient(layer.weight)
        kept = [_moment(layer, run) if self._is_dense(layers) else layer.weight for layer in layers]
        run.notes["before_step"] = [None if tensor is None else tensor.clone() for tensor in kept]

    def after_update(self, layers: Layers, run: Run, step: int) -> None:
        before = run.notes.pop("before_step")
        if not self._is_dense(layers):
            for layer, weight in zip(layers, before, strict=True):
                _update(layer, run, weight)
        elif self._switches(layers, run, step, before):
            for layer in layers:
                moment = _moment(layer, run, "max_exp_avg_sq")
                held = None if moment is None else moment.clone()  # None: never had a gradient
                layer.state.schedule_state["moment"] = held
                layer.set_phase(None)

    @staticmethod
    def _is_dense(layers: Layers) -> bool:
        return layers[0].state.schedule_state["phase"] == DENSE

    def _switches(self, layers: Layers, run: Run, step: int, before: list[Tensor | None]) -> bool:
        group = _group(layers[0], run)
        state, length = layers[0].state.schedule_state, round(1 / (1 - float(group["betas"][1])))
        changes = []
        for layer, old in zip(layers, before, strict=True):
            moment = _moment(layer, run)
            if moment is not None:
                changes.append((moment if old is None else moment - old).abs().flatten())
        if not changes:  # the layers have no gradient
            return False
        change = torch.cat(changes)
        latest = change.mean() if self.mean == "arithmetic" else change.log().mean().exp()
        earlier = [state["changes"].to(latest.device)] if "changes" in state else []
        state["changes"] = torch.cat([*earlier, latest[None]])[-length:]
        if step >= self.latest * run.total_steps:
            return True
        if step <= self.earliest * run.total_steps:
            return False
        return bool(state["changes"].mean() < group["eps"])

    def __str__(self) -> str:
        share = f"{self.earliest:g} to {self.latest:g} of the training"
        return f"dense until Adam's second moment is steady ({self.mean}, {share}), then held"


def _group(layer: PrunedLayer, run: Run) -> dict[str, Any]:
    groups = run.optimizer.param_groups
    return next(g for g in groups if any(p is layer.weight for p in g["params"]))


def _moment(layer: PrunedLayer, run: Run, first: str = "exp_avg_sq") -> Tensor | None:
    """Adam's second moment of the weight; None before its first step."""
    state = run.optimizer.state.get(layer.weight, {})
    return state.get(first, state.get("exp_avg_sq"))


def _update(layer: PrunedLayer, run: Run, weight: Tensor) -> None:
    """Make of Adam's step from ``weight`` one with the held moment, where one is held."""
    moment = layer.state.schedule_state["moment"]
    if layer.weight.grad is None or moment is None:
        return
    group, state = _group(layer, run), run.optimizer.state[layer.weight]
    rate, beta = group["lr"], group["betas"][0]
    decoupled = isinstance(run.optimizer, torch.optim.AdamW)
    if group.get("decoupled_weight_decay", decoupled):
        weight = weight * (1 - rate * group["weight_decay"])
    denominator = moment.to(weight.device).sqrt() + group["eps"] ** 0.75
    rate = rate / (1 - beta ** state["step"].to(weight.device))
    updated = weight - rate * state["exp_avg"] / denominator
    found = getattr(run.optimizer, "found_inf", None)
    if found is not None:  # a fused optimizer, which has left the weight as it was
        updated = torch.where(found.to(updated.device) > 0, layer.weight, updated)
    layer.weight.copy_(updated)


@register_strategy("step")
def step(
    n: int = 2,
    m: int = 4,
    earliest: float = 0.1,
    latest: float = 0.5,
    mean: str = "arithmetic",
    group_order: str = "channel",
) -> Strategy:
    """Dense under Adam, then Y = S(W)·X, dX = S(W)ᵀ·dY, straight-through dW, Adam's v held."""
    return Strategy(
        "step",
        output=NM("weight", n, m, group_order=group_order),
        grad_input=SameAsOutput(),
        schedule=HeldMoment(earliest, latest, mean),
    )
