"""mmengine's Runner, made safe to kill, to resume and to load from."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import mmengine.runner
import torch
from mmengine.dist import is_distributed, is_main_process
from mmengine.hooks import EMAHook, Hook, SyncBuffersHook
from mmengine.logging import MMLogger
from mmengine.optim import OptimWrapper
from mmengine.runner import BaseLoop, CheckpointLoader
from mmengine.runner.checkpoint import _load_checkpoint_to_model
from mmengine.visualization import Visualizer
from torch import nn

from fst.basics.machine import keep_freed_memory
from fst.cli.environment import code
from fst.files.checkpoint import load_checkpoint_safely, replacing, state_dict_of
from fst.training.engine.checkpoint import (
    check_resumable,
    check_sparsity,
    check_unused,
    newest_checkpoint,
    training_position,
)
from fst.training.engine.classifier import Classifier
from fst.training.engine.config import sparsity_hook
from fst.training.engine.data.folder import ImageFolder
from fst.training.engine.data.loader import build_dataloader
from fst.training.engine.hooks.random_state import RandomStateHook
from fst.training.engine.hooks.sparsity import SparsityHook
from fst.training.engine.model import unwrapped

_REPLACED_HOOKS = {
    "CheckpointHook": "CrashSafeCheckpointHook",
    "RuntimeInfoHook": "LossMonitorHook",
}
_OF_MMENGINES_OWN = ('"FileClient" will be deprecated', '"HardDiskBackend" is the alias')


class Runner(mmengine.runner.Runner):
    """A runner for mmengine's configs, and in addition ``sparsity=dict(strategy="fst", ...)``.

    - A checkpoint is complete or absent, whenever the process is killed; resuming takes the newest
      that can be read, and continues bit for bit (on a CPU, where epochs end with a step).
    - Loading never runs code from a file.
    - A loss that is not finite stops the run, and is never saved.
    - Augmentation differs in every epoch, whatever the number of workers.
    - What mmengine says of the environment, and of a test, is in the log file alone.
    """

    build_dataloader = staticmethod(build_dataloader)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # built before the work dir is made: a wrong argument leaves no trace
        self._sparsity = sparsity_hook(kwargs.get("cfg") or {})
        super().__init__(*args, **kwargs)
        self.logger.info(code())

    def setup_env(self, env_cfg: dict[str, Any]) -> None:
        """Also starts gloo and keeps freed memory, where there is no GPU."""
        if not torch.cuda.is_available():
            keep_freed_memory()
            if self.distributed and not is_distributed():
                torch.distributed.init_process_group("gloo")
        super().setup_env(env_cfg)

    def set_randomness(self, seed: int | None = None, **options: Any) -> None:
        """Draw a seed if the config's ``randomness`` gives none."""
        super().set_randomness(seed, **options)

    def build_logger(
        self, log_level: int | str = "INFO", log_file: str | None = None, **options: Any
    ) -> MMLogger:
        """Let the console show nothing but warnings before a training."""
        logger = super().build_logger(log_level, log_file, **options)
        logger.addFilter(lambda record: not str(record.msg).startswith(_OF_MMENGINES_OWN))
        self._log_level = log_level
        _set_console(logger, "WARNING")
        return logger

    def build_visualizer(self, visualizer: Visualizer | dict | None = None) -> Visualizer:
        """By default writes JSON lines and TensorBoard."""
        backends = [{"type": "LocalVisBackend"}, {"type": "TensorboardVisBackend"}]
        return super().build_visualizer(
            visualizer or {"type": "Visualizer", "vis_backends": backends}
        )

    def wrap_model(self, model_wrapper_cfg: dict | None, model: nn.Module) -> nn.Module:
        """Also wraps for DDP on a CPU; refuses FSDP."""
        kind = str((model_wrapper_cfg or {}).get("type", ""))
        if "FullyShardedDataParallel" in kind:
            raise ValueError(
                f"model_wrapper_cfg type {kind!r}: FSDP is not supported in MMEngine's runner; use "
                "DDP, or fully_shard in a loop of your own (docs/integrations.md)."
            )
        if self.distributed and not torch.cuda.is_available() and model_wrapper_cfg is None:
            model_wrapper_cfg = {
                "type": "MMDistributedDataParallel",
                "device_ids": None,
                "broadcast_buffers": False,
                "find_unused_parameters": self.cfg.get("find_unused_parameters", False),
            }
        return super().wrap_model(model_wrapper_cfg, model)

    def register_hook(self, hook: Hook | dict, priority: Any = None) -> None:
        """Put FST's safe versions in the place of two of mmengine's hooks."""
        if isinstance(hook, dict):
            hook = {**hook, "type": _REPLACED_HOOKS.get(hook["type"], hook["type"])}
        super().register_hook(hook, priority)

    def register_hooks(
        self, default_hooks: dict | None = None, custom_hooks: list | None = None
    ) -> None:
        """Add the hooks of sparsity, random states and, on several ranks, statistics."""
        super().register_hooks(default_hooks, custom_hooks)
        if self._sparsity is not None:
            self.register_hook(self._sparsity)
        if len(self._hooks_of(SparsityHook)) > 1:
            raise ValueError("the config has several SparsityHooks: use `sparsity` alone.")
        if self.distributed and not self._hooks_of(SyncBuffersHook):
            self.register_hook(SyncBuffersHook())
        self.register_hook(RandomStateHook())

    def _hooks_of(self, kind: type[Hook]) -> list[Any]:
        return [hook for hook in self._hooks if isinstance(hook, kind)]

    def build_train_loop(self, loop: Any) -> Any:
        """Also checks that the model can tell the classes apart."""
        loop = super().build_train_loop(loop)
        self._check_classes(loop.dataloader.dataset)
        return loop

    def build_val_loop(self, loop: Any) -> Any:
        """Also checks that classes are those of the training, with the same numbers."""
        loop = super().build_val_loop(loop)
        training = getattr(self._train_loop, "dataloader", None)
        self._check_classes(loop.dataloader.dataset, _classes_of(training and training.dataset))
        return loop

    def _check_classes(self, dataset: Any, trained: Sequence[str] = ()) -> None:
        if isinstance(dataset, ImageFolder):
            self.logger.info(str(dataset))
        classes = _classes_of(dataset)
        if trained and classes != tuple(trained):
            named = dataset.root if isinstance(dataset, ImageFolder) else "the data"
            missing = ", ".join(name for name in trained if name not in classes) or "none"
            others = ", ".join(name for name in classes if name not in trained) or "none"
            raise ValueError(
                f"{named}: its classes are not those of the training, in the same order (missing: "
                f"{missing}; not in the training: {others})."
            )
        outputs = getattr(unwrapped(self.model), "num_classes", None)
        if isinstance(outputs, int) and len(classes) > outputs:
            raise ValueError(
                f"the dataset has {len(classes)} classes, but the model num_classes={outputs}."
            )

    def dump_config(self) -> None:
        """Keep the config of a training; one that is refused, or a test, leaves what is there."""
        if self._is_training:
            super().dump_config()

    def load_or_resume(self) -> None:
        """Also keeps the config: nothing refuses the run any more."""
        super().load_or_resume()
        self.dump_config()

    @property
    def _is_training(self) -> bool:
        return isinstance(self.optim_wrapper, OptimWrapper)

    def train(self) -> nn.Module:
        """Train; a resumed run takes its seed from the checkpoint before anything is drawn.

        Raises:
            ValueError: the work dir is another run's, or there is nothing from which it could go on
                exactly.
        """
        _set_console(self.logger, self._log_level)
        is_named = self._load_from is not None
        if self._resume and not is_named:
            self._load_from = newest_checkpoint(self.work_dir)
            self._resume = self._load_from is not None
            if not self._resume:
                self.logger.warning(f"Nothing to resume in {self.work_dir}: a new training.")
        position = None
        if self._resume:
            checkpoint = load_checkpoint_safely(self._load_from)
            position = training_position(checkpoint, self._load_from)
            self._adopt_seed(position)
        if is_named or not self._resume:
            check_unused(self.work_dir, position)
        return super().train()

    def _adopt_seed(self, position: dict[str, Any]) -> None:
        own, seed = self._randomness_cfg.get("seed"), position.get("seed")
        if seed is None or seed == own:
            return
        if own is not None:
            self.logger.warning(f"Resuming with the checkpoint's seed {seed}, not {own}")
        self._randomness_cfg = {**self._randomness_cfg, "seed": seed}
        self.set_randomness(**self._randomness_cfg)

    def _maybe_compile(self, target: str) -> None:
        """Compile a classifier's architecture; of other models, as mmengine does, ``target``."""
        options, model = self.cfg.get("compile"), unwrapped(self.model)
        if not options or not isinstance(model, Classifier):
            super()._maybe_compile(target)
        else:
            model.architecture.compile(**({} if options is True else options))

    def load_checkpoint(
        self,
        filename: str,
        map_location: Any = "cpu",
        strict: bool = False,
        revise_keys: Any = ((r"^module\.", ""),),
    ) -> dict[str, Any]:
        """Load weights: all of them to resume or evaluate, those that fit to start training."""
        # to the CPU always: MMEngine resumes on the device, where model and checkpoint may not fit
        checkpoint = CheckpointLoader.load_checkpoint(filename, "cpu")
        state_dict = state_dict_of(checkpoint, filename)
        if "state_dict" not in checkpoint:
            checkpoint = {"state_dict": state_dict}
        model = unwrapped(self.model)
        if hasattr(model, "adopted"):
            checkpoint["state_dict"] = model.adopted(state_dict)
        is_sparse = bool(self._hooks_of(SparsityHook))
        if self._resume:
            check_resumable(checkpoint, filename, self)
            averages = bool(self._hooks_of(EMAHook))
            for key, own in (("sparsity", is_sparse), ("ema_state_dict", averages)):
                if own != (key in checkpoint):
                    with_, without = ("with", "without") if own else ("without", "with")
                    raise ValueError(
                        f"cannot resume {with_} {key}: {filename!r} comes from a run {without} it. "
                        "To start from its weights use load_from without resume."
                    )
        entries = model.state_dict().keys()
        if not entries & checkpoint["state_dict"].keys():
            raise ValueError(
                f"{filename!r} belongs to another model: none of its entries "
                f"({', '.join(sorted(checkpoint['state_dict'])[:3])}, ...) is one of the model's "
                f"({', '.join(sorted(entries)[:3])}, ...)."
            )
        if not self._is_training:
            check_sparsity(checkpoint, filename, is_sparse)
        if self._resume or not self._is_training:
            strict = True
            trained = ((checkpoint.get("meta") or {}).get("dataset_meta") or {}).get("classes")
            for loop in (self._train_loop, self._val_loop, self._test_loop):
                if isinstance(loop, BaseLoop):
                    self._check_classes(loop.dataloader.dataset, trained or ())
        self.call_hook("after_load_checkpoint", checkpoint=checkpoint)
        try:
            _load_checkpoint_to_model(model, checkpoint, strict, "current", list(revise_keys))
        except RuntimeError as error:
            raise ValueError(f"{filename!r} does not fit the model: {error}") from error
        self._has_loaded = True
        self.logger.info(f"Loaded checkpoint {filename}")
        return checkpoint

    def save_checkpoint(self, out_dir: str, filename: str, *args: Any, **kwargs: Any) -> None:
        """Write to a temporary file first; every rank must call it."""
        if "://" in str(out_dir):
            raise ValueError(f"out_dir={out_dir!r}: checkpoints are saved to local folders only.")
        for hook in self._hooks_of(RandomStateHook):
            hook.collect()
        for hook in self._hooks_of(SparsityHook):
            hook.collect(self)
        if not is_main_process():  # which alone writes
            super().save_checkpoint(out_dir, filename, *args, **kwargs)
            return
        os.makedirs(out_dir, exist_ok=True)
        with replacing(os.path.join(out_dir, filename)) as partial:
            super().save_checkpoint(str(partial.parent), partial.name, *args, **kwargs)


def _classes_of(dataset: Any) -> tuple[str, ...]:
    return tuple((getattr(dataset, "metainfo", None) or {}).get("classes") or ())


def _set_console(logger: MMLogger, level: int | str) -> None:
    for handler in logger.handlers:
        if type(handler) is logging.StreamHandler and is_main_process():
            handler.setLevel(level)
