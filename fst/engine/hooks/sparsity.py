"""Sparse training in any run of mmengine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import HOOKS
from torch import nn

import fst
from fst._text import suggest

FROM_SCRATCH = ("warn", "error", "allow")


@HOOKS.register_module()
class SparsityHook(Hook):
    """Converts the model before the run, keeps mask state in checkpoints, logs what the masks do.

    It works in mmengine's own Runner too, with any model: `custom_imports=dict(
    imports=["fst.engine"])` and `custom_hooks=[dict(type="SparsityHook", strategy="fst")]`.

    Logged every `log_interval` iterations, over all layers (log line, JSON, TensorBoard) and for
    each layer (JSON, TensorBoard): density, the mask flip rate (share of the mask that changed
    since the last look), and the norm of the gradient that reaches the optimizer (strategies such
    as rigl mask it after that).

    Args:
        strategy: Name of a registered strategy.
        include: Layers to convert, see `fst.convert`.
        exclude: Layers to leave dense, see `fst.convert`.
        log_interval: Iterations between two looks.
        from_scratch: What to do when a strategy that prunes a trained model (asp) is not given one
            by `load_from`: "warn", "error", or "allow" where the model comes trained otherwise.
        **overrides: Arguments of the strategy, such as n, m, decay, or tsm's interval.
    """

    priority = "HIGH"

    def __init__(
        self,
        strategy: str,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        log_interval: int = 50,
        from_scratch: str = "warn",
        **overrides: Any,
    ) -> None:
        if not isinstance(log_interval, int) or isinstance(log_interval, bool) or log_interval < 1:
            raise ValueError(
                f"log_interval={log_interval!r} must be a positive number of iterations"
            )
        if from_scratch not in FROM_SCRATCH:
            raise ValueError(
                f"from_scratch={from_scratch!r} is unknown.{suggest(from_scratch, FROM_SCRATCH)}"
            )
        self.from_scratch = from_scratch
        self.strategy = fst.get_strategy(strategy, **overrides)
        self.include, self.exclude, self.log_interval = include, exclude, log_interval
        self._is_due = False
        self._layers: dict[str, nn.Module] = {}
        self._masks: dict[str, torch.Tensor] = {}
        self._measured: tuple[dict[str, torch.Tensor], ...] | None = None

    @staticmethod
    def root(runner: Any) -> nn.Module:
        """The module whose layers are converted."""
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        return getattr(model, "sparse_root", model)

    def before_run(self, runner: Any) -> None:
        """Converts the model; Parameters stay the same objects, so optimizer and DDP stay valid."""
        if "FullyShardedDataParallel" in type(runner.model).__name__:
            raise ValueError("FSDP is not supported: masks need whole weights; use DDP")
        root = self.root(runner)
        if not fst.sparse_layers(root):
            report = fst.convert(root, self.strategy, include=self.include, exclude=self.exclude)
            runner.logger.info(f"Sparsity:\n{report}")
        self._layers = fst.sparse_layers(root)
        for wrapper in _built(runner.optim_wrapper):
            wrapper.optimizer.register_step_pre_hook(self._look)
            self._check_start(runner)
            fst.attach(root, wrapper.optimizer, **_lengths(runner, wrapper))
            if hasattr(wrapper, "loss_scaler"):
                fst.set_grad_scaler(root, wrapper.loss_scaler)

    def _check_start(self, runner: Any) -> None:
        schedule = self.strategy.schedule
        trained = runner._load_from is not None or runner._resume
        if schedule is None or not schedule.needs_trained_model or trained:
            return
        message = (
            f"strategy {self.strategy.name!r} prunes a trained model once, but load_from=None: if "
            "the model does not come trained otherwise, this prunes random weights. Give the "
            "checkpoint of a dense training as load_from, or set sparsity.from_scratch='allow'"
        )
        if self.from_scratch == "error":
            raise ValueError(message)
        if self.from_scratch == "warn":
            runner.logger.warning(message)

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Restores the mask state to resume or evaluate; `load_from` takes weights alone."""
        state = checkpoint.get("sparsity") if isinstance(checkpoint, dict) else None
        if runner._resume and state is None:
            raise ValueError(
                f"cannot resume with strategy {self.strategy.name!r}: the checkpoint comes from a "
                "run without sparsity. To start from its weights use load_from without resume"
            )
        is_training = bool(_built(runner.optim_wrapper))
        if state is not None and (runner._resume or not is_training):
            fst.load_sparsity_state(self.root(runner), state)

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Adds the mask state."""
        checkpoint["sparsity"] = fst.sparsity_state(self.root(runner))

    def before_train(self, runner: Any) -> None:
        """Seeds the random rules: only now is the seed of a resumed run known."""
        fst.seed_random_rules(self.root(runner), runner.seed, get_rank())

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Decides whether the next optimizer step is looked at."""
        self._is_due |= self.every_n_train_iters(runner, self.log_interval)

    @torch.no_grad()
    def _look(self, *_: Any) -> None:
        # right before the optimizer's step: mmengine clears the gradients right after it, and
        # weights and masks are still those of this iteration
        if not self._is_due:
            return
        gradients = {n: x.weight.grad for n, x in self._layers.items() if x.weight.grad is not None}
        norms = torch._foreach_norm(list(gradients.values())) if gradients else []
        masks = {name: layer.output_mask() for name, layer in self._layers.items()}
        masks = {name: mask for name, mask in masks.items() if mask is not None}
        self._measured = (
            {name: mask.sum() / mask.numel() for name, mask in masks.items()},
            {
                n: (m != self._masks[n]).sum() / m.numel()
                for n, m in masks.items()
                if n in self._masks
            },
            dict(zip(gradients, norms, strict=True)),
        )
        self._masks = masks

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Logs density, flip rate and gradient norms, if a step was looked at."""
        if self._measured is None:
            return
        density, flips, norms = _fetch(*self._measured)
        self._is_due, self._measured = False, None
        totals = {
            "density": self._mean(density),
            "mask_flip_rate": self._mean(flips),
            "sparse_grad_norm": sum(norm**2 for norm in norms.values()) ** 0.5 if norms else None,
        }
        for name, value in totals.items():
            if value is not None:
                runner.message_hub.update_scalar(f"train/{name}", value)
        scalars = {
            f"{name}/{layer}": value
            for name, group in (
                ("density", density),
                ("mask_flip_rate", flips),
                ("grad_norm", norms),
            )
            for layer, value in group.items()
        }
        if scalars:
            runner.visualizer.add_scalars(scalars, step=runner.iter + 1)

    def _mean(self, shares: dict[str, float]) -> float | None:
        """The share over all weights of the layers."""
        sizes = {name: self._layers[name].weight.numel() for name in shares}
        return sum(shares[n] * sizes[n] for n in shares) / sum(sizes.values()) if shares else None


def _built(wrapper: Any) -> list[OptimWrapper]:
    """The optimizer wrappers of a run; none before they are built, or if it does not train."""
    if isinstance(wrapper, OptimWrapperDict):
        return list(wrapper.optim_wrappers.values())
    return [wrapper] if isinstance(wrapper, OptimWrapper) else []


def _lengths(runner: Any, wrapper: OptimWrapper) -> dict[str, float]:
    """Optimizer steps of the whole training and of an epoch, for `fst.attach`."""
    loop, accumulated = runner.train_loop, wrapper._accumulative_counts
    return {
        "total_steps": math.ceil(loop.max_iters / accumulated),
        "steps_per_epoch": len(loop.dataloader) / accumulated,
    }


def _fetch(*groups: dict[str, torch.Tensor]) -> list[dict[str, float]]:
    """Dicts of scalar tensors as dicts of floats, with one copy from the device."""
    tensors = [value.double() for group in groups for value in group.values()]
    values = iter(torch.stack(tensors).tolist() if tensors else ())
    return [{name: next(values) for name in group} for group in groups]
