"""Random states in checkpoints, so that a resumed run continues bit for bit."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from mmengine.dist import all_gather_object, get_rank, get_world_size
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from fst.training.engine.checkpoint import restored_settings
from fst.training.engine.random_state import (
    get_random_state,
    isolated,
    mixed_seed,
    set_random_state,
)

_PLAIN = (int, float, str, bool)


@HOOKS.register_module()
class RandomStateHook(Hook):
    """The generators of every rank, kept in the checkpoint. FST's Runner always registers it.

    Validation leaves no trace in the generators: a run resumed after it has not validated.
    """

    priority = "LOWEST"

    def __init__(self) -> None:
        self._validation = ExitStack()
        self._collected: list[dict[str, Any]] = []
        self._to_restore: list[dict[str, Any]] = []

    def collect(self) -> None:
        """Gather the states of all ranks, which each of them must call; a save follows."""
        self._collected = all_gather_object(get_random_state())

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Add the states and settings; keep of the message hub what is plain, such as scores."""
        checkpoint["random_state"] = self._collected
        checkpoint["meta"]["restored_settings"] = restored_settings(runner.cfg)
        info = checkpoint["message_hub"]["runtime_info"]
        info = {k: v for k, v in info.items() if k != "cfg" and type(v) in _PLAIN}
        hub = {"log_scalars": {}, "runtime_info": info, "resumed_keys": dict.fromkeys(info, True)}
        checkpoint["message_hub"] = hub

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Remember the states for the moment when everything else is restored."""
        if runner._resume:
            self._to_restore = checkpoint.get("random_state") or []
            if len(self._to_restore) != get_world_size():
                self._to_restore = []
                runner.logger.warning(
                    "The checkpoint has no random states for this number of processes "
                    f"({get_world_size()}): the resumed run will differ from an uninterrupted one"
                )

    def before_train(self, runner: Any) -> None:
        """Restore them."""
        if self._to_restore:
            set_random_state(self._to_restore[get_rank()])
            self._to_restore = []

    def before_train_epoch(self, runner: Any) -> None:
        """Give the workers of each epoch (or resumed part of a run) and rank their own seeds."""
        generator = runner.train_dataloader.generator
        if generator is not None:
            generator.manual_seed(mixed_seed(runner.seed, runner.iter, get_rank()))

    def before_val(self, runner: Any) -> None:
        """Keep the states."""
        self._validation.enter_context(isolated())

    def after_val(self, runner: Any) -> None:
        """Restore them."""
        self._validation.close()
