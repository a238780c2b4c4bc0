"""FST in Lightning: ``Trainer(callbacks=[SparsityCallback("srste")])``."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

from fst.basics.extras import extra_named

with extra_named():
    import lightning.pytorch as pl
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import rank_zero_info

import fst
from fst.api.attach import Attachment
from fst.api.convert import Selector
from fst.basics.values import check_integer
from fst.layers.step import held_by

KEY = "fst_sparsity"  # of the masks' state in a checkpoint


class SparsityCallback(pl.Callback):
    """Convert the module before training, let the strategy act at its steps, save and log.

    The module's layers are converted in `setup`, so optimizers, DDP and a resumed checkpoint see
    the same Parameters. Checkpoints keep the state_dict of the dense model. After training,
    `fst.fold` and `fst.export` take the module or the model in it.

    Args:
        strategy: a name or a `fst.Strategy`.
        include, exclude: what to convert, see `fst.convert`; names begin at the LightningModule.
        layers: "conv", "linear" or "all", see `fst.convert`.
        log_every: optimizer steps between two looks of `fst.metrics`; 0: none.
        seed: of strategies that draw; masks are then equal on all ranks.
        **overrides: arguments of the strategy, such as n and m.

    Raises:
        ValueError: a strategy that replaces Parameters, or a bad argument.
    """

    def __init__(
        self,
        strategy: str | fst.Strategy,
        include: Selector | list[Selector] | None = None,
        exclude: Selector | list[Selector] | None = None,
        layers: str = "conv",
        log_every: int = 50,
        seed: int = 0,
        **overrides: Any,
    ) -> None:
        check_integer("log_every", log_every, 0)
        self.strategy = fst.get_strategy(strategy, **overrides)
        if self.strategy.replaces_parameters:
            raise ValueError(
                f"strategy {self.strategy.name!r} replaces Parameters, which Lightning's "
                "optimizers and wrappers cannot follow."
            )
        self.choice: dict[str, Any] = {"include": include, "exclude": exclude, "layers": layers}
        self.log_every, self.seed = log_every, seed
        self._attached: list[Attachment] = []
        self._frozen = ExitStack()
        self._logged = 0
        self._loaded: dict[str, Any] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Convert, unless an earlier run has.

        Raises:
            ValueError: the module is converted with another strategy.
        """
        layers = fst.sparse_layers(pl_module)
        other = {str(layer.strategy) for layer in layers.values()} - {str(self.strategy)}
        if other:
            raise ValueError(
                f"the module is converted with {other.pop()}, but the callback's strategy is "
                f"{self.strategy}: leave the conversion to the callback."
            )
        if not layers:
            report = fst.convert(pl_module, self.strategy, **self.choice)
            rank_zero_info(f"{report}")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the state of masks where the module is on its device."""
        if self._loaded is not None:
            fst.load_sparsity_state(pl_module, self._loaded)
            self._loaded = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach to the optimizer that holds the converted weights."""
        fst.seed_random_rules(pl_module, self.seed, trainer.global_rank)
        steps = trainer.estimated_stepping_batches
        per_epoch = trainer.num_training_batches / trainer.accumulate_grad_batches
        for optimizer in trainer.optimizers:
            if held_by(optimizer):
                attached = fst.attach(
                    pl_module,
                    optimizer,
                    total_steps=int(steps) if math.isfinite(steps) else None,
                    # Lightning steps at the end of an epoch, however few batches are accumulated
                    steps_per_epoch=math.ceil(per_epoch) if math.isfinite(per_epoch) else None,
                )
                self._attached.append(attached)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any
    ) -> None:
        """Log `fst.metrics` to the trainer's loggers."""
        step = trainer.global_step
        is_due = self.log_every and step != self._logged and step % self.log_every == 0
        if is_due and fst.sparse_layers(pl_module):
            self._logged = step
            pl_module.log_dict(fst.metrics(pl_module), on_step=True, on_epoch=False)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prune each weight once for the whole validation."""
        if fst.sparse_layers(pl_module):
            self._frozen.enter_context(fst.frozen(pl_module))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the weights change again."""
        self._frozen.close()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the state of masks."""
        checkpoint[KEY] = fst.sparsity_state(pl_module)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take the state of masks, which is restored at once if nothing is trained.

        Raises:
            ValueError: the checkpoint has none.
        """
        if KEY not in checkpoint:
            raise ValueError(
                "ckpt_path comes from a training without SparsityCallback: load its weights into "
                "the module instead of resuming."
            )
        moves = (
            trainer.state.fn == TrainerFn.FITTING
            and not trainer.strategy.restore_checkpoint_after_setup
        )
        if moves:
            self._loaded = checkpoint[KEY]
        else:
            fst.load_sparsity_state(pl_module, checkpoint[KEY])

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Detach, however the run ended."""
        self._frozen.close()
        for attached in self._attached:
            attached.remove()
        self._attached = []

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Detach."""
        self.teardown(trainer, pl_module, "")
