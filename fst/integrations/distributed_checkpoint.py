"""FST in `torch.distributed.checkpoint`: what sharded models need to resume exactly."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import nn

import fst


class SparsityState:
    """A model's `fst.sparsity_state`, to save and load with model and optimizer.

    ``dcp.save({"model": ..., "optimizer": ..., "sparsity": SparsityState(model)})``, and the same
    with ``dcp.load``. Masks and step counts are equal on all ranks, so that any number of ranks can
    resume. Strategies that remember batches (`resprop`, `sparsetrain`) remember others on each
    rank: as many ranks as saved must resume.

    Args:
        model: converted; sharded or not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as one opaque entry: DCP loads only tensors that exist before."""
        buffer = io.BytesIO()
        torch.save(fst.sparsity_state(self.model), buffer)
        return {self._key(): buffer.getvalue()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: it belongs to other layers or to another strategy.
        """
        buffer = io.BytesIO(state[self._key()])
        fst.load_sparsity_state(self.model, torch.load(buffer, weights_only=True))

    def _key(self) -> str:
        layers = fst.sparse_layers(self.model).values()
        if not any(layer.strategy.has_memory for layer in layers):
            return "all_ranks"
        if not torch.distributed.is_initialized():
            return "rank0_of_1"
        return f"rank{torch.distributed.get_rank()}_of_{torch.distributed.get_world_size()}"
