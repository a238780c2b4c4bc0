"""Checkpoints that survive a kill at any moment."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mmengine.dist import is_main_process
from mmengine.hooks import CheckpointHook
from mmengine.registry import HOOKS
from mmengine.runner import EpochBasedTrainLoop

from fst.basics.text import nearest
from fst.files.checkpoint import discard_unfinished


@HOOKS.register_module()
class CrashSafeCheckpointHook(CheckpointHook):
    """mmengine's CheckpointHook, which leaves whole files whenever it is killed.

    FST's Runner puts it in the place of `CheckpointHook`; arguments are the same. Outdated files go
    after the new one is complete. The best one is ``best_<metric>.pth``, by default of the first
    metric, and is replaced in one step.
    """

    def __init__(
        self, *args: Any, save_best: str | list[str] | None = "auto", **kwargs: Any
    ) -> None:
        super().__init__(*args, save_best=save_best, **kwargs)

    def before_train(self, runner: Any) -> None:
        """Also removes what a killed run left half-written or had no time to remove."""
        super().before_train(runner)
        if is_main_process():
            Path(self.out_dir).mkdir(parents=True, exist_ok=True)
            discard_unfinished(self.out_dir)
            self._remove_outdated(runner.epoch if self.by_epoch else runner.iter)
        if runner._resume and runner.val_loop is not None:
            self._make_up_validation(runner)

    @staticmethod
    def _make_up_validation(runner: Any) -> None:
        """Validate where the checkpoint was written just before a validation.

        What a validation changes is not in such a checkpoint: learning rates that wait for a
        plateau, the best score, and the last epoch's metrics.
        """
        loop = runner.train_loop
        loop._decide_current_val_interval()
        step, last = loop.iter, loop.max_iters
        if isinstance(loop, EpochBasedTrainLoop):
            step, last = loop.epoch, loop.max_epochs
        if step >= loop.val_begin and (step % loop.val_interval == 0 or step == last):
            runner.val_loop.run()

    def _save_checkpoint_with_step(self, runner: Any, step: int, meta: dict[str, Any]) -> None:
        name = self.filename_tmpl.format(step)
        self.last_ckpt = str(Path(self.out_dir) / name)
        runner.save_checkpoint(
            self.out_dir,
            name,
            save_optimizer=self.save_optimizer,
            save_param_scheduler=self.save_param_scheduler,
            meta={**meta, "by_epoch": self.by_epoch},
            by_epoch=self.by_epoch,
            **self.args,
        )
        if is_main_process():
            self._remove_outdated(step)

    def _remove_outdated(self, newest: int) -> None:
        if self.max_keep_ckpts <= 0:
            return
        pattern = re.escape(self.filename_tmpl).replace(r"\{\}", r"(\d+)")
        named = [(re.fullmatch(pattern, path.name), path) for path in Path(self.out_dir).iterdir()]
        own = sorted((int(n[1]), path) for n, path in named if n and int(n[1]) <= newest)
        for _, path in own[: -self.max_keep_ckpts]:
            path.unlink()

    def _save_best_checkpoint(self, runner: Any, metrics: dict[str, float]) -> None:
        if not self.save_best or self.out_dir is None:  # or not in a training
            return
        if self.save_best == ["auto"]:
            try:
                self._init_rule(self.rules, [next(iter(metrics))])
            except ValueError as error:  # a metric whose name does not tell what is better
                runner.logger.warning(f"No best checkpoint is kept. {error}")
                self.save_best = None
                return
        for key, rule in zip(self.key_indicators, self.rules, strict=True):
            if key not in metrics:
                raise ValueError(f"save_best={key!r} is no metric.{nearest(key, metrics)}")
            hub, known, score = runner.message_hub, f"best_score_{key}", float(metrics[key])
            best = hub.runtime_info.get(known, self.init_value_map[rule])
            if not self.is_better_than[key](score, best):
                continue
            hub.update_info(known, score)
            name = f"best_{key.replace('/', '_')}.pth"
            meta = {"epoch": runner.epoch, "iter": runner.iter}
            runner.save_checkpoint(
                self.out_dir, name, save_optimizer=False, save_param_scheduler=False, meta=meta
            )
            step = f"epoch {runner.epoch}" if self.by_epoch else f"iteration {runner.iter}"
            path = Path(self.out_dir) / name
            runner.logger.info(f"Best checkpoint: {path} ({key} {score:.4f}, {step})")
