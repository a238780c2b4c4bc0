"""Sparse training in any run of mmengine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from mmengine.dist import all_gather_object, get_rank, get_world_size
from mmengine.hooks import EMAHook, Hook
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper
from mmengine.registry import HOOKS
from torch import Tensor, nn

import fst
from fst.api.attach import Attachment
from fst.api.convert import check_layers, check_patterns
from fst.api.report import modes
from fst.basics.values import check_integer, check_number, one_of
from fst.files.checkpoint import state_dict_of
from fst.layers.modules import SparseLayer
from fst.layers.step import held_by
from fst.training.engine.model import built_wrappers, sparse_root, unwrapped

FROM_SCRATCH = ("warn", "error", "allow")


@HOOKS.register_module()
class SparsityHook(Hook):
    """Convert the model before a training, keep mask state in checkpoints, log what the masks do.

    An evaluation converts it if the checkpoint comes from a sparse training; weights alone, such as
    those of `fst fold`, are evaluated as they are.

    It works in mmengine's own Runner too, with any model: `custom_imports=dict(
    imports=["fst.training.engine"])` and `custom_hooks=[dict(type="SparsityHook",
    strategy="fst")]`.

    Logged every `log_interval` iterations, over all layers (log line, JSON, TensorBoard) and for
    each layer (JSON, TensorBoard): density, the mask flip rate (share of the mask that changed
    since the last look), and the norm of the gradient.

    The norm is that of the gradient with which the optimizer steps: clipped, and with the decay of
    strategies that add theirs to it (rigl and others mask it after that).

    Args:
        strategy: Name of a registered strategy.
        include: Layers to convert, see `fst.convert`.
        exclude: Layers to leave dense, see `fst.convert`.
        layers: "conv", "linear" or "all", see `fst.convert`.
        patterns: N:M of some layers, see `fst.convert`.
        log_interval: Iterations between two looks.
        from_scratch: What to do when a strategy that prunes a trained model (asp) is not given one
            by `load_from`: "warn", "error", or "allow" where the model comes trained otherwise.
        start: Share of the iterations that are dense training, before the model is converted: with
            0.7 the last 30 % are sparse. None: converted from the first iteration on.
        until: Share of the iterations after which the model is dense again, as `fst.unconvert`
            makes it: with 0.7 the last 30 % are dense training. None: never.
        **overrides: Arguments of the strategy, such as n, m, decay, or tsm's interval.
    """

    priority = "HIGH"

    def __init__(
        self,
        strategy: str,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        layers: str = "conv",
        patterns: Mapping[str, str] | None = None,
        log_interval: int = 50,
        from_scratch: str = "warn",
        start: float | None = None,
        until: float | None = None,
        **overrides: Any,
    ) -> None:
        check_integer("log_interval", log_interval, 1)
        one_of("from_scratch", from_scratch, FROM_SCRATCH)
        for name, share in (("start", start), ("until", until)):
            if share is not None:
                check_number(name, share, "(0, 1)")
        if start is not None and until is not None and start >= until:
            raise ValueError(f"start={start!r} must be less than until={until!r}.")
        self.from_scratch, self.start, self.until = from_scratch, start, until
        self.strategy = fst.get_strategy(strategy, **overrides)
        check_layers(layers, include)
        check_patterns(patterns)
        self.choice = {
            "include": include,
            "exclude": exclude,
            "layers": layers,
            "patterns": patterns,
        }
        self.log_interval = log_interval
        self._is_due = self._is_told = False
        self._layers: dict[str, SparseLayer] = {}
        self._measured: dict[str, float] = {}
        self._attached: list[Attachment] = []
        self._of_ranks: list[dict[str, Any]] = []
        self._frozen = ExitStack()

    @staticmethod
    def root(runner: Any) -> nn.Module:
        """The module whose layers are converted."""
        return sparse_root(runner.model)

    def before_run(self, runner: Any) -> None:
        """Convert the model; Parameters stay the same objects, so optimizer and DDP stay valid."""
        wrappers = built_wrappers(runner.optim_wrapper)
        if self.strategy.replaces_parameters:
            self._check_parameters_may_change(runner)
        if self._attached or not wrappers:  # no training, or a run after it, such as a test
            return
        if self.start is None:
            self._begin(runner)
            if runner._load_from is None and not runner._resume:
                self._warn_untrained(runner, "load_from=None")

    def _begin(self, runner: Any) -> None:
        """Convert the model, and attach the strategy to the optimizers of a training."""
        self._convert(runner)
        if self._attached:
            return
        wrappers = built_wrappers(runner.optim_wrapper)
        for wrapper in [w for w in wrappers if held_by(w.optimizer)] or wrappers:
            wrapper.optimizer.register_step_pre_hook(partial(self._look, runner))
            lengths = _lengths(runner, wrapper, self.start or 0)
            self._attached.append(fst.attach(self.root(runner), wrapper.optimizer, **lengths))

    def _convert(self, runner: Any) -> None:
        root = self.root(runner)
        if not fst.sparse_layers(root):
            report = fst.convert(root, self.strategy, **self.choice)
            runner.logger.info(f"Sparsity:\n{report}")
        self._layers = fst.sparse_layers(root)

    def _check_parameters_may_change(self, runner: Any) -> None:
        if is_model_wrapper(runner.model) or any(isinstance(h, EMAHook) for h in runner._hooks):
            raise ValueError(
                f"strategy {self.strategy.name!r} replaces Parameters, which neither EMAHook nor "
                f"{type(runner.model).__name__} can follow: train in one process, without a "
                "launcher and without EMAHook."
            )

    def _warn_untrained(self, runner: Any, why: str) -> None:
        schedule = self.strategy.schedule
        if schedule is None or not schedule.needs_trained_model:
            return
        message = (
            f"strategy {self.strategy.name!r} prunes a trained model once, but {why}: if "
            "the model does not come trained otherwise, this prunes random weights. Give the "
            "checkpoint of a dense training as load_from, or set sparsity.from_scratch='allow'."
        )
        if self.from_scratch == "error":
            raise ValueError(message)
        if self.from_scratch == "warn":
            runner.logger.warning(message)

    def _check_fit(self, runner: Any, given: dict[str, Tensor]) -> None:
        """Check that ``load_from`` gives the converted layers their weights."""
        layers = fst.sparse_layers(unwrapped(runner.model))
        own = {f"{name}.weight": layer.weight.shape for name, layer in layers.items()}
        shapes = {name: weight.shape for name, weight in given.items() if name in own}
        unfit = [name for name in own if shapes.get(name) != own[name]]
        if shapes and len(unfit) == len(own):
            name, shape = next(iter(shapes.items()))
            raise ValueError(
                f"load_from={runner._load_from!r} fits no layer that is to be sparse: {name!r} has "
                f"shape {tuple(shape)} there and {tuple(own[name])} in the model."
            )
        if unfit:
            why = f"load_from={runner._load_from!r} has no fitting {unfit[0]!r}"
            self._warn_untrained(runner, why)

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Restore the mask state to resume or evaluate; ``load_from`` takes weights alone.

        Raises:
            ValueError: the checkpoint is of no sparse run, or none of its weights fits.
        """
        state = checkpoint.get("sparsity") if isinstance(checkpoint, dict) else None
        if runner._resume and (state is None if self.start or self.until else not state):
            raise ValueError(
                f"cannot resume with strategy {self.strategy.name!r}: the checkpoint comes from a "
                "run without sparsity. To start from its weights use load_from without resume."
            )
        wrappers = built_wrappers(runner.optim_wrapper)
        if not runner._resume and wrappers:
            self._check_fit(runner, state_dict_of(checkpoint))
            for layer in self._layers.values():
                layer.transient.has_loaded_state = True  # a new training, which needs no warning
            return
        if state:
            self._begin(runner)
        elif runner._resume and self._layers:
            self._end(runner)
        elif not runner._resume:
            runner.logger.info("The checkpoint has no sparsity: its weights are used as they are")
        if self.strategy.replaces_parameters:
            optimizers = [wrapper.optimizer for wrapper in wrappers]
            weights = checkpoint["state_dict"]
            changed = self.strategy.schedule.fit(runner.model, weights, *optimizers)
            runner.logger.info(f"{len(changed)} layers take up the checkpoint's fewer channels")
        if state:
            of_ranks = checkpoint.get("sparsity_of_ranks", ())
            if runner._resume and len(of_ranks) == get_world_size():
                state = of_ranks[get_rank()]
            elif runner._resume and (of_ranks or (self.strategy.has_memory and get_rank())):
                runner.logger.warning(
                    "The checkpoint has no reused gradients for this number of processes "
                    f"({get_world_size()}): all take those of the first."
                )
            fst.load_sparsity_state(self.root(runner), state)

    def collect(self, runner: Any) -> None:
        """Gather what differs between ranks, each of which must call; a save follows."""
        if self.strategy.has_memory and get_world_size() > 1:
            self._of_ranks = all_gather_object(fst.sparsity_state(self.root(runner)))

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Add the mask state."""
        checkpoint["sparsity"] = fst.sparsity_state(self.root(runner))
        if self._of_ranks:
            checkpoint["sparsity_of_ranks"] = self._of_ranks

    def before_train(self, runner: Any) -> None:
        """Seed the random rules: only now is the seed of a resumed run known."""
        if self._layers:
            fst.seed_random_rules(self.root(runner), runner.seed, get_rank())

    def before_val_epoch(self, runner: Any) -> None:
        """Prune each weight once for the whole validation."""
        if fst.sparse_layers(self.root(runner)):
            self._frozen.enter_context(fst.frozen(self.root(runner)))

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        """Let the weights change again."""
        self._frozen.close()

    before_test_epoch, after_test_epoch = before_val_epoch, after_val_epoch

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Become sparse or dense if it is time; decide whether the next step is looked at."""
        if self.start and not self._attached and runner.iter >= self.start * runner.max_iters:
            self._begin(runner)
            self.before_train(runner)
            runner.logger.info(f"start={self.start}: the layers are sparse from here on")
        if self.until and self._layers and runner.iter >= self.until * runner.max_iters:
            self._end(runner)
        self._is_due |= self.every_n_train_iters(runner, self.log_interval)

    def _end(self, runner: Any) -> None:
        """Train on as a dense model."""
        fst.unconvert(self.root(runner))
        self._layers = {}
        runner.logger.info(f"until={self.until}: the layers are dense from here on")

    def _look(self, runner: Any, *_: Any) -> None:
        # right before the optimizer's step, after the decay: mmengine clears the gradients right
        # after it, and masks are still those of this iteration
        if self._layers and self._is_due:
            self._measured, self._is_due = fst.metrics(self.root(runner), prefix=""), False

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Logs what was measured in this iteration."""
        for attached in self._attached:
            if outputs and "loss" in outputs:
                attached.report_loss(outputs["loss"])
        if self._layers and not self._is_told:
            self._is_told = True
            runner.logger.info(f"Layers after the first step: {modes(self.root(runner))}")
        measured, self._measured = self._measured, {}
        for name in [name for name in measured if "/" not in name]:  # of all layers
            known = name.replace("grad_norm", "sparse_grad_norm")  # mmengine's is the model's
            runner.message_hub.update_scalar(f"train/{known}", measured.pop(name))
        if measured:
            runner.visualizer.add_scalars(measured, step=runner.iter + 1)

    def after_train_epoch(self, runner: Any) -> None:
        """Say how large the model is, if channels may have been removed."""
        if self.strategy.replaces_parameters:
            count = sum(parameter.numel() for parameter in self.root(runner).parameters())
            runner.logger.info(f"{count:,} parameters after the epoch")


def _lengths(runner: Any, wrapper: OptimWrapper, start: float) -> dict[str, float]:
    """Optimizer steps of the training after ``start``, and of an epoch, for `fst.attach`."""
    loop, accumulated = runner.train_loop, wrapper._accumulative_counts
    sparse_iters = loop.max_iters - math.ceil(start * loop.max_iters)
    return {
        "total_steps": math.ceil(sparse_iters / accumulated),
        "steps_per_epoch": len(loop.dataloader) / accumulated,
    }
