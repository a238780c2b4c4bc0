"""The state of a layer: persistent (in copies and checkpoints), and transient."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst.backends.record import Record
from fst.basics.sharding import own_rank
from fst.ops.plan import CallPlan
from fst.ops.prune import PrunedWeight
from fst.rules.strategy import Strategy

Frozen = dict[Any, PrunedWeight]


class LayerPlan(NamedTuple):
    """The way in which a layer computes calls of one form.

    Attributes:
        plan: of the op.
        held: the layer's strategy, whose identity is part of the form.
        is_plain: whether the op takes the input, and the layer returns the result, as they are.
        multiplies_own: whether the weight is pruned as it is stored.
        remembers_mask: whether the decay waits for the optimizer's step.
        decay: λ that the op adds to grad_weight: only a computed weight has no step of its own.
        remembers: whether gradients of earlier steps are kept for later ones.
        keeps_mask: whether a mask may be kept for several steps.
    """

    plan: CallPlan
    held: Strategy
    is_plain: bool
    multiplies_own: bool
    remembers_mask: bool
    decay: float
    remembers: bool
    keeps_mask: bool


@dataclass
class LayerState:
    """State that holds from step to step.

    Attributes:
        step: steps of the optimizer that holds the weight.
        kept_mask: mask of the weight, as a convolution's, if it is kept for several steps.
        schedule_state: what the strategy's schedule remembers of this layer, by name.
        memories: what a rule of grad_output remembers, by the call's number within a step.
        seed: (seed, rank) of random rules; the rank is the process's, and not part of checkpoints.
        mask_step: the step for which the kept mask was chosen, if that step is under way.
        record: which backends were chosen, and why.
    """

    step: int = 0
    kept_mask: Tensor | None = None
    schedule_state: dict[str, Any] = field(default_factory=dict)
    memories: dict[int, dict[str, Any]] = field(default_factory=dict)
    seed: tuple[int, int] | None = None
    mask_step: int | None = None
    record: Record = field(default_factory=Record)

    def end_step(self, calls: int) -> None:
        """Count a step of the optimizer that had ``calls`` training calls."""
        self.step += 1
        self.record.begin(self.step)
        if self.memories:
            self.memories = {call: kept for call, kept in self.memories.items() if call < calls}

    def saved(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {
            "step": self.step,
            "kept_mask": _moved(self.kept_mask, "cpu"),
            "schedule_state": _moved(self.schedule_state, "cpu"),
            "memories": _moved(self.memories, "cpu"),
            "seed": self.seed and self.seed[0],
            "record": self.record.saved(),
        }

    def restore(self, saved: Mapping[str, Any], device: torch.device) -> str:
        """Take up what `saved` returned; returns what `fst.backends.Record.restore` does."""
        self.step = saved["step"]
        self.kept_mask, self.mask_step = _moved(saved["kept_mask"], device), None
        self.schedule_state = _moved(saved.get("schedule_state", {}), device)
        self.memories = _moved(saved.get("memories", {}), device)
        if (seed := saved.get("seed")) is not None:
            self.seed = seed, self.seed[1] if self.seed else own_rank()
        other = self.record.restore(saved.get("record", {}), device)
        self.record.begin(self.step)
        return other


def seeded(*what: object, device: torch.device) -> torch.Generator:
    """A generator whose seed is a digest of plain data."""
    digest = hashlib.blake2b(repr(what).encode(), digest_size=7)
    kind = "cpu" if device.type == "meta" else device  # "meta" has no generator
    return torch.Generator(kind).manual_seed(int.from_bytes(digest.digest(), "big"))


def _moved(value: Any, device: torch.device | str) -> Any:
    """``value`` with the tensors in it, in dictionaries too, on ``device``."""
    if isinstance(value, Mapping):
        return {key: _moved(entry, device) for key, entry in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


class FrozenBlock:
    """A block of `fst.frozen`: S(W) of its layers, which it forgets all at once when it ends."""

    def __init__(self) -> None:
        self._layers: dict[int, Frozen] | None = {}

    def weights_of(self, transient: TransientState) -> Frozen | None:
        """S(W) of the layer with this `TransientState`; None after the block."""
        layers = self._layers
        return None if layers is None else layers.setdefault(id(transient), {})

    def end(self) -> None:
        """No layer is frozen any more; a single assignment, so that no interrupt leaves some."""
        self._layers = None


@dataclass
class TransientState:
    """Transient state of a step or of an attachment: not copied, and not saved but for ``calls``.

    Attributes:
        calls: training calls since the last step that had a gradient of the weight; random rules
            draw by it, also where the weight is frozen and has no steps.
        plans: form of a call -> how it is computed.
        pruning: form of a pruning outside of calls, and how it is computed.
        prunes_nothing: a strategy under which the layer is a dense one.
        decay_mask: weight, its version and its mask in the last training call, for the decay of
            this step.
        stepping: the optimizer whose step is under way.
        has_gradient: whether there is a gradient in that step.
        acted: whether the attachment's optimizer took part in that step.
        start: starts the schedules of the model's attachment; None where it has none.
        frozen_block: the last block of `fst.frozen` that the layer was in.
        loaded_step: the step in which the weight was saved that `load_state_dict` has set since the
            last step; 0 if the state_dict does not say, None if it has set none.
        has_loaded_state: whether `fst.load_sparsity_state` has set the state since then.
        too_small: a strategy, and whether the layer's groups are too small for it to prune.
    """

    calls: int = 0
    plans: dict[Any, LayerPlan] = field(default_factory=dict)
    pruning: tuple[tuple[Any, ...], CallPlan] | None = None
    prunes_nothing: Strategy | None = None
    decay_mask: tuple[Tensor, int, Tensor | None] | None = None
    stepping: weakref.ref[torch.optim.Optimizer] | None = None
    has_gradient: bool = False
    acted: bool = False
    start: Callable[[], None] | None = None
    frozen_block: FrozenBlock | None = None
    loaded_step: int | None = None
    has_loaded_state: bool = False
    too_small: tuple[Strategy, bool] | None = None

    @property
    def frozen(self) -> Frozen | None:
        """S(W) by dtype and inference mode, inside `fst.frozen`; None outside."""
        return None if self.frozen_block is None else self.frozen_block.weights_of(self)

    def forget_calls(self) -> None:
        """There was no training call since the last step."""
        self.calls, self.decay_mask = 0, None
