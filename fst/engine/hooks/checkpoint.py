"""Checkpoints that survive a kill at any moment."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from mmengine.dist import is_main_process, master_only
from mmengine.hooks import CheckpointHook
from mmengine.registry import HOOKS

from fst.checkpoint import write_text_atomically


@HOOKS.register_module()
class CrashSafeCheckpointHook(CheckpointHook):
    """mmengine's CheckpointHook, which deletes outdated files only after the new one is complete.

    FST's Runner puts it in the place of `CheckpointHook`; arguments are the same.
    """

    @master_only
    def _clear_partial_files(self) -> None:
        for path in Path(self.out_dir).glob("*.pth.tmp"):
            path.unlink(missing_ok=True)

    def before_train(self, runner: Any) -> None:
        """Also removes what a killed run left half-written."""
        super().before_train(runner)
        self._clear_partial_files()

    def _save_checkpoint_with_step(self, runner: Any, step: int, meta: dict[str, Any]) -> None:
        outdated: list[int] = []
        if self.max_keep_ckpts > 0 and (not self.keep_ckpt_ids or self.keep_ckpt_ids[-1] != step):
            steps = [*self.keep_ckpt_ids, step]
            outdated, kept = steps[: -self.max_keep_ckpts], steps[-self.max_keep_ckpts :]
            self.keep_ckpt_ids = deque(kept, self.max_keep_ckpts)
            runner.message_hub.update_info("keep_ckpt_ids", kept)
        self.last_ckpt = str(Path(self.out_dir) / self.filename_tmpl.format(step))
        runner.message_hub.update_info("last_ckpt", self.last_ckpt)
        runner.save_checkpoint(
            self.out_dir,
            self.filename_tmpl.format(step),
            save_optimizer=self.save_optimizer,
            save_param_scheduler=self.save_param_scheduler,
            meta=meta,
            by_epoch=self.by_epoch,
            **self.args,
        )
        if is_main_process():
            write_text_atomically(self.last_ckpt, Path(runner.work_dir) / "last_checkpoint")
            for old in outdated:
                (Path(self.out_dir) / self.filename_tmpl.format(old)).unlink(missing_ok=True)

    def _save_best_checkpoint(self, runner: Any, metrics: dict[str, float]) -> None:
        # mmengine deletes the previous best file before it writes the new one: hide it meanwhile
        if not self.save_best:
            return
        single = len(self.key_indicators) == 1
        before = {None: self.best_ckpt_path} if single else dict(self.best_ckpt_path_dict)
        self._set_best(dict.fromkeys(before))
        super()._save_best_checkpoint(runner, metrics)
        after = {None: self.best_ckpt_path} if single else dict(self.best_ckpt_path_dict)
        self._set_best({key: after[key] or before[key] for key in before})
        if is_main_process():
            for key, path in before.items():
                if path and after[key] and after[key] != path:
                    Path(path).unlink(missing_ok=True)

    def _set_best(self, paths: dict[str | None, str | None]) -> None:
        if None in paths:
            self.best_ckpt_path = paths[None]
        else:
            self.best_ckpt_path_dict = dict(paths)
