"""A loss or a weight that is not finite stops the run."""

from __future__ import annotations

import math
from typing import Any

import torch
from mmengine.hooks import RuntimeInfoHook
from mmengine.registry import HOOKS

from fst.training.engine.checkpoint import checkpoint_files

MAX_HISTORY = 10_000


@HOOKS.register_module()
class LossMonitorHook(RuntimeInfoHook):
    """mmengine's RuntimeInfoHook, which checks that losses and saved weights are finite.

    FST's Runner puts it in the place of `RuntimeInfoHook`.
    """

    _last_finite = "no loss before it was finite"

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """As mmengine's.

        Raises:
            FloatingPointError: a loss is not finite.
        """
        super().after_train_iter(runner, batch_idx, data_batch, outputs)
        for name in outputs or ():
            history = runner.message_hub.get_scalar(f"train/{name}")
            history.max_length = MAX_HISTORY  # its update copies the whole history
            value = history.current()
            if "loss" in name and not math.isfinite(value):
                self._stop(runner, f"{name} is {value}", runner.iter + 1)
            if name == "loss":
                self._last_finite = f"the last was {value:.6g}, at iteration {runner.iter + 1}"

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Refuse to save weights that are not finite."""
        for name, value in checkpoint["state_dict"].items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                what = f"{name} is not finite, although the loss still was"
                self._stop(runner, what, runner.iter)

    def _stop(self, runner: Any, what: str, iteration: int) -> None:
        saved = checkpoint_files(runner.work_dir)
        raise FloatingPointError(
            f"{what} at epoch {runner.epoch + 1}, iteration {iteration}; {self._last_finite}. "
            f"Training stopped; the newest checkpoint: {saved[-1][1] if saved else 'none'}"
        )
