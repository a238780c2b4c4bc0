"""FST in Hugging Face's accelerate: what its checkpoints need to resume exactly."""

from __future__ import annotations

from typing import Any

from torch import nn

import fst


class SparsityState:
    """A model's `fst.sparsity_state` as an object that is saved and loaded.

    ``accelerator.register_for_checkpointing(SparsityState(model))``: `save_state` and `load_state`
    then take masks and step counts along; anything else that calls `state_dict` and
    `load_state_dict` can hold it too.

    Args:
        model: converted, as it was before ``accelerator.prepare``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""
        return fst.sparsity_state(self.model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: it belongs to other layers or to another strategy.
        """
        fst.load_sparsity_state(self.model, state)
