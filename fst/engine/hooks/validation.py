"""The validation that a killed run still owes."""

from __future__ import annotations

from typing import Any

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import EpochBasedTrainLoop


@HOOKS.register_module()
class ValidateOnResumeHook(Hook):
    """Validates a resumed run before it goes on, where its checkpoint was saved just before that.

    FST's Runner always registers it. Without it, a run killed between its last save and the
    validation would never be validated at its end.
    """

    priority = "LOWEST"  # the last to act: everything else is restored

    def __init__(self) -> None:
        self._validated = True

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Take note of whether the checkpoint was saved after its validation."""
        self._validated = not runner._resume or bool(checkpoint["meta"].get("validated"))

    def before_train(self, runner: Any) -> None:
        """Validate, if mmengine's loop would have done so at this step."""
        loop = runner.train_loop
        by_epoch = isinstance(loop, EpochBasedTrainLoop)
        step, end = (loop.epoch, loop.max_epochs) if by_epoch else (loop.iter, loop.max_iters)
        if self._validated or runner.val_loop is None or step < max(loop.val_begin, 1):
            return
        loop._decide_current_val_interval()
        if step % loop.val_interval == 0 or step == end:
            runner.val_loop.run()
