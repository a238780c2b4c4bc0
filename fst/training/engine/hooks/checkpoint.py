"""Checkpoints that survive a kill at any moment."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmengine.dist import is_main_process, master_only
from mmengine.hooks import CheckpointHook
from mmengine.registry import HOOKS
from mmengine.runner import EpochBasedTrainLoop

from fst.basics.text import nearest
from fst.files.checkpoint import discard_unfinished, write_text_atomically
from fst.training.engine.checkpoint import POINTER

OUTDATED = "outdated_ckpts"  # names in mmengine's message hub: what goes once a file is complete


@HOOKS.register_module()
class CrashSafeCheckpointHook(CheckpointHook):
    """mmengine's CheckpointHook, which deletes outdated files only after the new one is complete.

    FST's Runner puts it in the place of `CheckpointHook`; arguments are the same.
    """

    _best_before: Mapping[str | None, str | None] | None = None  # None unless a best one is saved

    @master_only
    def _clean(self, runner: Any) -> None:
        for folder in (self.out_dir, runner.work_dir):
            discard_unfinished(folder)
        if runner._resume and Path(self.out_dir).samefile(Path(runner._load_from).parent):
            self._remove(runner.message_hub.runtime_info.get(OUTDATED, ()))

    @master_only
    def _mend_pointer(self, runner: Any) -> None:
        """Let `last_checkpoint` name the file that the run goes on from, or nothing.

        A kill may have left the name of a file that is deleted, and a copied work dir has the name
        of a file in the other one.
        """
        pointer, newest = Path(runner.work_dir) / POINTER, Path(runner._load_from or "")
        if runner._resume and Path(self.out_dir).resolve() == newest.parent.resolve():
            write_text_atomically(str(Path(self.out_dir) / newest.name), pointer)
        else:
            pointer.unlink(missing_ok=True)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            (Path(self.out_dir) / name).unlink(missing_ok=True)

    def before_train(self, runner: Any) -> None:
        """Also removes what a killed run left half-written or had no time to remove."""
        super().before_train(runner)
        self._clean(runner)
        self._mend_pointer(runner)
        if runner._resume and runner.val_loop is not None:
            self._make_up_validation(runner)
        is_inside = not self.by_epoch and isinstance(runner.train_loop, EpochBasedTrainLoop)
        if is_inside or not self.save_optimizer or not self.save_param_scheduler:
            runner.logger.warning(
                "No run can be resumed from the checkpoints of this CheckpointHook: "
                f"by_epoch={self.by_epoch}, save_optimizer={self.save_optimizer}, "
                f"save_param_scheduler={self.save_param_scheduler}."
            )

        is_elsewhere = Path(self.out_dir).resolve() != Path(runner.work_dir).resolve()
        if is_elsewhere or self.filename_tmpl not in ("epoch_{}.pth", "iter_{}.pth"):
            runner.logger.warning(
                "--resume does not find the checkpoints of this CheckpointHook by itself, name one "
                f"to go on from: out_dir={self.out_dir!r}, filename_tmpl={self.filename_tmpl!r}."
            )

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
        meta = {**meta, "by_epoch": self.by_epoch}
        outdated: list[int] = []
        if self.max_keep_ckpts > 0 and (not self.keep_ckpt_ids or self.keep_ckpt_ids[-1] != step):
            steps = [*self.keep_ckpt_ids, step]
            outdated, kept = steps[: -self.max_keep_ckpts], steps[-self.max_keep_ckpts :]
            self.keep_ckpt_ids = deque(kept, self.max_keep_ckpts)
            runner.message_hub.update_info("keep_ckpt_ids", kept)
        names = [self.filename_tmpl.format(old) for old in outdated]
        names += [Path(path).name for path in self._replaced()]
        runner.message_hub.update_info(OUTDATED, names)
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
            write_text_atomically(self.last_ckpt, Path(runner.work_dir) / POINTER)
            self._remove(names)

    def _save_best_checkpoint(self, runner: Any, metrics: dict[str, float]) -> None:
        # mmengine deletes the previous best file before it writes the new one: hide it meanwhile
        if not self.save_best:
            return
        unknown = [key for key in self.key_indicators if key not in ("auto", *metrics)]
        if unknown:
            raise ValueError(
                f"save_best={unknown[0]!r} is no metric.{nearest(unknown[0], metrics)}"
            )
        self._best_before = self._get_best()
        self._set_best(dict.fromkeys(self._best_before))
        super()._save_best_checkpoint(runner, metrics)
        if is_main_process():
            self._remove(Path(path).name for path in self._replaced())
        after = self._get_best()
        self._set_best({key: after[key] or path for key, path in self._best_before.items()})
        self._best_before = None

    def _replaced(self) -> list[str]:
        """The best files of before that have a better one now."""
        before, now = self._best_before or {}, self._get_best() if self._best_before else {}
        return [path for key, path in before.items() if path and now[key] not in (None, path)]

    def _get_best(self) -> dict[str | None, str | None]:
        if len(self.key_indicators) == 1:
            return {None: self.best_ckpt_path}
        return dict(self.best_ckpt_path_dict)

    def _set_best(self, paths: dict[str | None, str | None]) -> None:
        if None in paths:
            self.best_ckpt_path = paths[None]
        else:
            self.best_ckpt_path_dict = dict(paths)
