"""mmengine's Runner, made safe to kill, to resume and to load from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import mmengine.runner
import torch
from mmengine.dist import is_distributed, is_main_process
from mmengine.hooks import EMAHook, Hook, SyncBuffersHook
from mmengine.runner import BaseLoop, CheckpointLoader
from mmengine.runner.checkpoint import _load_checkpoint_to_model
from mmengine.visualization import Visualizer
from torch import nn

from fst.basics.machine import keep_freed_memory
from fst.cli.environment import code
from fst.files.checkpoint import load_checkpoint_safely, replacing, state_dict_of
from fst.training.engine.checkpoint import (
    check_newest,
    check_resumable,
    check_sparsity,
    check_unused,
    newest_checkpoint,
    sole_run,
    training_position,
)
from fst.training.engine.classifier import Classifier
from fst.training.engine.config import sparsity_hook
from fst.training.engine.data import ImageFolder, build_dataloader
from fst.training.engine.epochs import schedule_mismatch
from fst.training.engine.hooks import RandomStateHook, SparsityHook
from fst.training.engine.model import unwrapped

_REPLACED_HOOKS = {
    "CheckpointHook": "CrashSafeCheckpointHook",
    "RuntimeInfoHook": "LossMonitorHook",
}


class Runner(mmengine.runner.Runner):
    """A runner for mmengine's configs, and in addition ``sparsity=dict(strategy="fst", ...)``.

    - A checkpoint is complete or absent, whenever the process is killed; resuming takes the newest
      that can be read, and continues bit for bit (on a CPU, where epochs end with a step).
    - Loading never runs code from a file.
    - A loss that is not finite stops the run, and is never saved.
    - Augmentation differs in every epoch, whatever the number of workers.
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
        if self.distributed and not is_distributed() and not torch.cuda.is_available():
            torch.distributed.init_process_group("gloo")
        super().setup_env(env_cfg)

    def set_randomness(self, seed: int | None = None, **options: Any) -> None:
        """Draw a seed if the config's ``randomness`` gives none."""
        super().set_randomness(seed, **options)

    def build_visualizer(self, visualizer: Visualizer | dict | None = None) -> Visualizer:
        """By default writes JSON lines and TensorBoard."""
        if visualizer is None:
            backends = [{"type": "LocalVisBackend"}, {"type": "TensorboardVisBackend"}]
            visualizer = {"type": "Visualizer", "vis_backends": backends}
        return super().build_visualizer(visualizer)

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
        if isinstance(hook, dict) and hook.get("type") in _REPLACED_HOOKS:
            hook = {**hook, "type": _REPLACED_HOOKS[hook["type"]]}
        super().register_hook(hook, priority)

    def register_hooks(
        self, default_hooks: dict | None = None, custom_hooks: list | None = None
    ) -> None:
        """Add the hooks of sparsity, random states and, on several ranks, statistics."""
        super().register_hooks(default_hooks, custom_hooks)
        if self._sparsity is not None:
            self.register_hook(self._sparsity)
        if sum(isinstance(hook, SparsityHook) for hook in self._hooks) > 1:
            raise ValueError("the config has several SparsityHooks: use `sparsity` alone.")
        if self.distributed and not any(isinstance(h, SyncBuffersHook) for h in self._hooks):
            self.register_hook(SyncBuffersHook())
        self._random_state = RandomStateHook()
        self.register_hook(self._random_state)

    def build_train_loop(self, loop: Any) -> Any:
        """Also checks that the model can tell the classes apart."""
        loop = super().build_train_loop(loop)
        self._check_classes(loop.dataloader.dataset)
        return loop

    def build_val_loop(self, loop: Any) -> Any:
        """Also checks that classes have the numbers that they have in training."""
        loop = super().build_val_loop(loop)
        training = getattr(self._train_loop, "dataloader", None)
        trained = _classes(getattr(training and training.dataset, "metainfo", None))
        self._check_classes(loop.dataloader.dataset, trained)
        return loop

    def _check_classes(self, dataset: Any, trained: Sequence[str] = ()) -> None:
        if isinstance(dataset, ImageFolder):
            self.logger.info(str(dataset))
        classes = _classes(getattr(dataset, "metainfo", None))
        if trained and classes != trained[: len(classes)]:
            raise ValueError(
                f"the classes of the training are {', '.join(trained)}, those of the data "
                f"{', '.join(classes)}: give both the same classes, in the same order."
            )
        if missing := trained[len(classes) :]:
            self.logger.warning(f"The data to validate on have no class {', '.join(missing)}")
        outputs = getattr(self._bare_model, "num_classes", None)
        if isinstance(outputs, int) and len(classes) > outputs:
            raise ValueError(
                f"the dataset has {len(classes)} classes, but the model num_classes={outputs}."
            )

    @property
    def _bare_model(self) -> nn.Module:
        return unwrapped(self.model)

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
        return isinstance(self.optim_wrapper, mmengine.optim.OptimWrapper)

    def train(self) -> nn.Module:
        """Train; a resumed run takes its seed from the checkpoint before anything is drawn.

        Raises:
            ValueError: the work dir is another run's, or there is nothing from which it could go on
                exactly.
        """
        with sole_run(self.work_dir) if is_main_process() else nullcontext():
            if not self._resume:
                check_unused(self.work_dir)
            if mismatch := schedule_mismatch(self.cfg):
                self.logger.warning(mismatch)
            is_named = self._load_from is not None
            if self._resume and not is_named:
                self._load_from = newest_checkpoint(self.work_dir)
                if self._load_from is None:
                    self.logger.warning(
                        f"Nothing to resume in {self.work_dir}: starting from scratch."
                    )
                    self._resume = False
            if self._resume:
                checkpoint = load_checkpoint_safely(self._load_from)
                position = training_position(checkpoint, self._load_from)
                if is_named:
                    check_newest(self.work_dir, position)
                self._adopt_seed(position)
            return super().train()

    def _adopt_seed(self, meta: dict[str, Any]) -> None:
        seed, configured = meta.get("seed"), self._randomness_cfg.get("seed")
        if seed is not None and seed != configured:
            if configured is not None:
                self.logger.warning(f"Resuming with the checkpoint's seed {seed}, not {configured}")
            self._randomness_cfg = {**self._randomness_cfg, "seed": seed}
            self.set_randomness(**self._randomness_cfg)

    def _maybe_compile(self, target: str) -> None:
        """Compile a classifier's architecture; of other models, as mmengine does, ``target``."""
        options = self.cfg.get("compile")
        if not options or not isinstance(self._bare_model, Classifier):
            super()._maybe_compile(target)
        else:
            self._bare_model.architecture.compile(**({} if options is True else options))

    def load_checkpoint(
        self,
        filename: str,
        map_location: Any = "cpu",
        strict: bool = False,
        revise_keys: Any = ((r"^module\.", ""),),
    ) -> dict[str, Any]:
        """Load weights: all of them to resume or evaluate, those that fit to start training."""
        # to the CPU always: MMEngine resumes on the device, where model and checkpoint may not fit
        checkpoint = CheckpointLoader.load_checkpoint(filename, "cpu", self.logger)
        state_dict = state_dict_of(checkpoint, filename)
        if "state_dict" not in checkpoint:
            checkpoint = {"state_dict": state_dict}
        if self._resume:
            check_resumable(checkpoint, filename, self)
        model = self._bare_model
        if hasattr(model, "adopted"):
            checkpoint["state_dict"] = model.adopted(state_dict)
        has_hook = any(isinstance(hook, SparsityHook) for hook in self._hooks)
        if self._resume and not has_hook and checkpoint.get("sparsity"):
            raise ValueError(
                f"cannot resume without sparsity: {filename!r} comes from a run with strategy "
                f"{next(iter(checkpoint['sparsity'].values()))['strategy']}."
            )
        averages = any(isinstance(hook, EMAHook) for hook in self._hooks)
        if self._resume and averages != ("ema_state_dict" in checkpoint):
            raise ValueError(
                f"cannot resume {'with' if averages else 'without'} EMAHook: {filename!r} comes "
                f"from a run {'without' if averages else 'with'} it."
            )
        self._check_overlap(checkpoint["state_dict"], filename)
        if not self._is_training:
            check_sparsity(checkpoint, filename, has_hook)
        if self._resume or not self._is_training:
            trained = _classes((checkpoint.get("meta") or {}).get("dataset_meta"))
            for loop in (self._train_loop, self._val_loop, self._test_loop):
                if isinstance(loop, BaseLoop):
                    self._check_classes(loop.dataloader.dataset, trained)
        self.call_hook("after_load_checkpoint", checkpoint=checkpoint)
        strict = strict or self._resume or not self._is_training
        try:
            _load_checkpoint_to_model(model, checkpoint, strict, revise_keys=list(revise_keys))
        except RuntimeError as error:
            raise ValueError(f"{filename!r} does not fit the model: {error}") from error
        self._has_loaded = True
        self.logger.info(f"Loaded checkpoint {filename}")
        return checkpoint

    def _check_overlap(self, state_dict: dict[str, Any], filename: str) -> None:
        shapes = {name.removeprefix("module."): value.shape for name, value in state_dict.items()}
        names, own = shapes.keys(), self._bare_model.state_dict()
        if self._is_training and not self._resume:
            fitting = [n for n in names & own.keys() if shapes[n] == getattr(own[n], "shape", None)]
            self.logger.info(f"{len(fitting)} of the model's {len(own)} entries fit {filename}")
        if not names & own.keys():
            raise ValueError(
                f"{filename!r} belongs to another model: none of its {len(names)} entries "
                f"({', '.join(sorted(names)[:3])}, ...) is one of the model's "
                f"({', '.join(sorted(own)[:3])}, ...)."
            )

    def save_checkpoint(self, out_dir: str, filename: str, *args: Any, **kwargs: Any) -> None:
        """Write to a temporary file first; every rank must call it."""
        if "://" in str(out_dir):
            raise ValueError(f"out_dir={out_dir!r}: checkpoints are saved to local folders only.")
        self._random_state.collect()
        for hook in self._hooks:
            if isinstance(hook, SparsityHook):
                hook.collect(self)
        if not is_main_process():  # which alone writes
            super().save_checkpoint(out_dir, filename, *args, **kwargs)
            return
        os.makedirs(out_dir, exist_ok=True)
        with replacing(os.path.join(out_dir, filename)) as partial:
            super().save_checkpoint(str(partial.parent), partial.name, *args, **kwargs)


def _classes(metainfo: Any) -> tuple[str, ...]:
    return tuple((metainfo or {}).get("classes") or ())
