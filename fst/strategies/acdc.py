"""AC/DC: sparse and dense phases in turn; ends with an N:M model, and with a dense one before it.

Paper: Peste et al., "AC/DC: Alternating Compressed/DeCompressed Training of Deep Neural Networks",
NeurIPS 2021 (arXiv 2106.12379). Official code: github.com/IST-DASLab/ACDC; its 2:4 recipe for
ResNet-50 (configs/neurips/iht_imagenet_resnet50_cosinelr_sp_2_4_ep100.yaml) has 100 epochs: dense
up to epoch 10, then 5 sparse and 5 dense ones in turn up to 75, dense to 85, then sparse. The
mask is chosen by magnitude when a sparse phase begins, and kept in it; pruned weights return as
zeros. Here their momentum is zero in sparse phases too, as in the project's other kept masks; the
official code resets momentum at their return, if asked to (``--reset_momentum_after_recycling``).
The recipe prunes the classifier too: ask for it with ``include`` of `fst.convert`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from fst.basics.values import check_number
from fst.rules.nm import NM, SameAsOutput
from fst.rules.schedule import DENSE, HeldMasks, Layers, Run, hold_at_zero
from fst.rules.strategy import Strategy
from fst.strategies.registry import register_strategy


@dataclass(frozen=True)
class Alternation(HeldMasks):
    """Dense, then sparse and dense phases in turn, dense, and sparse to the end.

    Attributes:
        warmup: share of the training before the first sparse phase.
        period: share of one phase of those in turn.
        last_dense, last_sparse: shares of the two last phases.
    """

    warmup: float = 0.1
    period: float = 0.05
    last_dense: float = 0.1
    last_sparse: float = 0.15
    needs: ClassVar[tuple[str, ...]] = ("total_steps",)

    def __post_init__(self) -> None:
        for name in ("warmup", "last_dense"):
            check_number(name, getattr(self, name), "[0, 1)")
        for name in ("period", "last_sparse"):
            check_number(name, getattr(self, name), "(0, 1]")
        used = self.warmup + self.last_dense + self.last_sparse
        if used > 1 + 1e-9:
            raise ValueError(
                f"warmup={self.warmup}, last_dense={self.last_dense} and last_sparse="
                f"{self.last_sparse} are {used:.4g} of the training together, more than all of it."
            )

    def is_sparse(self, done: int, total_steps: float) -> bool:
        """True if the step after ``done`` steps belongs to a sparse phase."""
        if done >= round((1 - self.last_sparse) * total_steps):
            return True
        if done >= round((1 - self.last_sparse - self.last_dense) * total_steps):
            return False
        turn = int((done - round(self.warmup * total_steps)) / (self.period * total_steps) + 1e-9)
        return done >= round(self.warmup * total_steps) and turn % 2 == 0

    def attached(self, layers: Layers, run: Run) -> None:
        for name in ("period", "last_sparse"):
            share = getattr(self, name)
            if share * run.total_steps < 1:
                raise ValueError(
                    f"total_steps={run.total_steps}: {name}={share} of them is less than one step."
                )

    def remembered(self, phase: Any) -> tuple[str, ...]:
        return ("phase", *super().remembered(phase))

    def start(self, layers: Layers, run: Run) -> None:
        self._enter(layers, run, 0)

    def before_update(self, layers: Layers, run: Run, step: int) -> None:
        if self._prunes(layers):
            super().before_update(layers, run, step)

    def after_update(self, layers: Layers, run: Run, step: int) -> None:
        if self._prunes(layers):
            super().after_update(layers, run, step)
        self._enter(layers, run, step)

    def _enter(self, layers: Layers, run: Run, done: int) -> None:
        sparse = self.is_sparse(done, run.total_steps)
        if sparse == self._prunes(layers):
            return
        for layer in layers:
            layer.set_phase(None if sparse else dict(DENSE))
            if sparse:
                layer.set_mask(layer.rule_mask())
            else:
                layer.state.kept_mask = None
        if sparse:
            hold_at_zero(layers, run)

    @staticmethod
    def _prunes(layers: Layers) -> bool | None:
        """True if the current phase is sparse; None before the first one."""
        state = layers[0].state.schedule_state
        return state["phase"] != DENSE if "phase" in state else None

    def __str__(self) -> str:
        return (
            f"dense for {self.warmup:g} of the training, then sparse and dense for {self.period:g} "
            f"in turn, dense for {self.last_dense:g}, sparse for the last {self.last_sparse:g}"
        )


@register_strategy("acdc")
def acdc(
    n: int = 2,
    m: int = 4,
    warmup: float = 0.1,
    period: float = 0.05,
    last_dense: float = 0.1,
    last_sparse: float = 0.15,
    group_order: str = "channel",
) -> Strategy:
    """In sparse phases Y = (M∘W)·X, dX = (M∘W)ᵀ·dY, dW and momentum masked; else all dense."""
    return Strategy(
        "acdc",
        output=NM("weight", n, m, group_order=group_order),
        grad_input=SameAsOutput(),
        schedule=Alternation(warmup, period, last_dense, last_sparse),
    )
