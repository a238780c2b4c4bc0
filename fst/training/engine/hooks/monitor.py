"""Losses, logged without waiting for the GPU every time; one that is not finite stops the run."""

from __future__ import annotations

import math
from typing import Any

import torch
from mmengine.hooks import LoggerHook, RuntimeInfoHook
from mmengine.registry import HOOKS

from fst.basics.values import check_integer
from fst.training.engine.checkpoint import checkpoint_files

MAX_HISTORY = 10_000


def is_logged(runner: Any, batch_idx: int) -> bool:
    """True if a line is logged after this iteration of the training."""
    return any(
        hook.end_of_epoch(runner.train_dataloader, batch_idx)
        or hook.every_n_inner_iters(batch_idx, hook.interval)
        for hook in runner._hooks
        if isinstance(hook, LoggerHook)
    )


@HOOKS.register_module()
class LossMonitorHook(RuntimeInfoHook):
    """mmengine's RuntimeInfoHook, which fetches losses in batches and checks that they are finite.

    FST's Runner puts it in the place of `RuntimeInfoHook`. On a CPU it looks at every iteration, on
    a GPU every ``interval`` iterations, when a line is logged, and before a checkpoint is saved.

    Args:
        interval: Largest number of iterations between two looks at the device.
    """

    def __init__(self, interval: int = 20) -> None:
        check_integer("interval", interval, 1)
        self.interval = interval
        self._pending: list[tuple[int, dict[str, Any]]] = []
        self._last_finite = "no loss before it was finite"

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """Collect the outputs, and fetch them when it is time."""
        outputs = {name: torch.as_tensor(v).detach() for name, v in (outputs or {}).items()}
        self._pending.append((runner.iter + 1, outputs))
        on_gpu = any(value.is_cuda for value in outputs.values())
        if not on_gpu or len(self._pending) >= self.interval or is_logged(runner, batch_idx):
            self._flush(runner)

    def after_train_epoch(self, runner: Any) -> None:
        """Fetch the rest, before a checkpoint is saved."""
        self._flush(runner)

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Refuse to save weights that are not finite."""
        self._flush(runner)
        for name, value in checkpoint["state_dict"].items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                what = f"{name} is not finite, although the loss still was"
                self._stop(runner, what, runner.iter)

    def _flush(self, runner: Any) -> None:
        pending, self._pending = self._pending, []
        tensors = [v.float().reshape(()) for _, outputs in pending for v in outputs.values()]
        tensors = [value.to(tensors[0].device, non_blocking=True) for value in tensors]
        numbers = iter(torch.stack(tensors).tolist() if tensors else ())
        for iteration, outputs in pending:
            for name, value in zip(outputs, numbers, strict=False):
                if "loss" in name and not math.isfinite(value):
                    self._stop(runner, f"{name} is {value}", iteration)
                if name == "loss":
                    self._last_finite = f"the last was {value:.6g}, at iteration {iteration}"
                runner.message_hub.update_scalar(f"train/{name}", value)
        for history in runner.message_hub.log_scalars.values():
            history.max_length = MAX_HISTORY  # its update copies the whole history

    def _stop(self, runner: Any, what: str, iteration: int) -> None:
        saved = checkpoint_files(runner.work_dir)
        raise FloatingPointError(
            f"{what} at epoch {runner.epoch + 1}, iteration {iteration}; {self._last_finite}. "
            f"Training stopped; the newest checkpoint: {saved[-1][1] if saved else 'none'}"
        )
