"""Losses, logged without waiting for the GPU every time; one that is not finite stops the run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from mmengine.hooks import LoggerHook, RuntimeInfoHook
from mmengine.registry import HOOKS

from fst.basics.values import check_integer
from fst.training.engine.checkpoint import POINTER

MAX_HISTORY = 10_000


def is_logged(runner: Any, batch_idx: int) -> bool:
    """True if a line is logged after this iteration of the training."""
    loggers = [hook for hook in runner._hooks if isinstance(hook, LoggerHook)]
    if any(hook.end_of_epoch(runner.train_dataloader, batch_idx) for hook in loggers):
        return True
    return any(hook.every_n_inner_iters(batch_idx, hook.interval) for hook in loggers)


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
        self._pending: list[tuple[int, int, dict[str, Any]]] = []
        self._last_finite: tuple[int, float] | None = None

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """Collect the outputs, and fetch them when it is time."""
        if outputs is None:
            return
        outputs = {k: v.detach() if torch.is_tensor(v) else v for k, v in outputs.items()}
        self._pending.append((runner.iter, batch_idx, outputs))
        on_gpu = any(torch.is_tensor(v) and v.is_cuda for v in outputs.values())
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
                raise FloatingPointError(
                    f"{name} is not finite at epoch {runner.epoch + 1}, although the loss still "
                    f"was; {self._where_it_stands(runner)}"
                )

    def _flush(self, runner: Any) -> None:
        pending, self._pending = self._pending, []
        tensors = [
            v.float().reshape(()) for _, _, o in pending for v in o.values() if torch.is_tensor(v)
        ]
        tensors = [t.to(tensors[0].device, non_blocking=True) for t in tensors]
        numbers = iter(torch.stack(tensors).tolist() if tensors else ())
        for iteration, batch_idx, outputs in pending:
            values = {k: next(numbers) if torch.is_tensor(v) else v for k, v in outputs.items()}
            self._check(runner, iteration, batch_idx, values)
            for name, value in values.items():
                runner.message_hub.update_scalar(f"train/{name}", value)
        for history in runner.message_hub.log_scalars.values():
            history.max_length = MAX_HISTORY  # its update copies the whole history

    def _check(self, runner: Any, iteration: int, batch_idx: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            if "loss" in name and not math.isfinite(value):
                raise FloatingPointError(
                    f"{name} is {value} at epoch {runner.epoch + 1}, iteration {iteration + 1} "
                    f"(number {batch_idx + 1} of the epoch); {self._where_it_stands(runner)}"
                )
        if "loss" in values:
            self._last_finite = (iteration, values["loss"])

    def _where_it_stands(self, runner: Any) -> str:
        last = "no loss before it was finite"
        if self._last_finite is not None:
            iteration, value = self._last_finite
            last = f"the last finite loss was {value:.6g}, at iteration {iteration + 1}"
        pointer = Path(runner.work_dir) / POINTER  # written after each complete save
        kept = "none was saved yet"
        if pointer.is_file():
            kept = pointer.read_text(encoding="utf-8").strip()
        return f"{last}. Training stopped; the newest checkpoint: {kept}"
