"""Schedules that divide a training into phases, each with a strategy of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fst.basics.values import check_number
from fst.rules.schedule import DENSE, Layers, PrunedLayer, Run, Schedule


@dataclass(frozen=True)
class Phases(Schedule):
    """Dense steps at the beginning and at the end, and options that change in between.

    A phase is plain data in the layer's state, and so in checkpoints. Before the training, and
    after it where ``dense_tail`` is 0, layers prune as the strategy itself says.

    Attributes:
        dense_start, dense_tail: shares of the training in which nothing is pruned.
    """

    dense_start: float = 0.0
    dense_tail: float = 0.0
    needs: ClassVar[tuple[str, ...]] = ("total_steps",)

    def __post_init__(self) -> None:
        check_number("dense_start", self.dense_start, "[0, 1)")
        check_number("dense_tail", self.dense_tail, "[0, 1)")
        if self.dense_start + self.dense_tail >= 1:
            raise ValueError(
                f"dense_start={self.dense_start} and dense_tail={self.dense_tail} leave no step of "
                "the training to prune in: their sum must be below 1."
            )

    def remembered(self, phase: Any) -> tuple[str, ...]:
        return ("phase",)

    def borders(self, run: Run) -> tuple[int, int]:
        """The first step that prunes, and the first of the dense tail, counted from 0."""
        total = run.total_steps
        return round(self.dense_start * total), round((1 - self.dense_tail) * total)

    def attached(self, layers: Layers, run: Run) -> None:
        first, end = self.borders(run)
        if first >= end:
            raise ValueError(
                f"total_steps={run.total_steps}: no step lies between dense_start="
                f"{self.dense_start} and dense_tail={self.dense_tail} of {layers[0].strategy.name}."
            )

    def start(self, layers: Layers, run: Run) -> None:
        self._enter(layers, run, 0)

    def after_update(self, layers: Layers, run: Run, step: int) -> None:
        self._enter(layers, run, step)

    def _enter(self, layers: Layers, run: Run, done: int) -> None:
        first, end = self.borders(run)
        for layer in layers:
            is_dense = done < first or (self.dense_tail > 0 and done >= end)
            layer.set_phase(dict(DENSE) if is_dense else self.pruning(layer, run, done))

    def pruning(self, layer: PrunedLayer, run: Run, done: int) -> dict[str, Any] | None:
        """The phase of a layer after ``done`` steps, outside the dense ones; None: no change."""
        return None

    def strategy_in(self, strategy: Any, phase: Any) -> Any:
        """In a phase of `pruning`, ``strategy`` with these options of the rule of output."""
        if not phase or phase == DENSE:
            return super().strategy_in(strategy, phase)
        return replace(strategy, output=replace(strategy.output, **phase))

    def progress(self, run: Run, done: int, settled: float = 0.0) -> float:
        """Which share of the steps that prune is done, the last share ``settled`` of all steps
        not counted: 0 to 1.
        """
        length = self.length(run, settled)
        return min(1.0, (done - self.borders(run)[0]) / length) if length > 0 else 1.0

    def length(self, run: Run, settled: float) -> int:
        """The steps that prune, the last share ``settled`` of all steps not counted."""
        first, end = self.borders(run)
        return end - first - round(settled * run.total_steps)

    def __str__(self) -> str:
        parts = [
            f"dense for the {word} {share:.4g} of the training"
            for word, share in (("first", self.dense_start), ("last", self.dense_tail))
            if share
        ]
        return ", ".join(parts) or "pruned throughout"
