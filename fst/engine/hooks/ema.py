"""Averaged weights: timm's ModelEmaV3 within mmengine's runs."""

from __future__ import annotations

import math
from typing import Any

import torch
from mmengine.dist import all_reduce_params, is_distributed
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from timm.utils import ModelEmaV3

from fst.basics.values import check_integer, check_number
from fst.engine.model import built_wrappers, unwrapped
from fst.engine.recipe import check_keys

# of timm's arguments: what no config can give, or what has one sensible value here
REFUSED = ("model", "foreach", "dtype", "stochastic_rounding", "stochastic_rounding_seed")


@HOOKS.register_module()
class ModelEMAHook(Hook):
    """The exponential moving average of weights and buffers, by `timm.utils.ModelEmaV3`.

    A config's ``ema`` gives its arguments. The average follows the dense weights, after each
    optimizer step; validation sees it pruned by the layers' rules, with the masks of the training
    where masks are state. In a checkpoint "state_dict" holds the average, so that test, fold and
    export take it, and "ema_state_dict" the trained weights, with which a run resumes.

    It stands in the place of mmengine's EMAHook, which copies the model before its weights are
    initialised or loaded, counts iterations instead of steps, and knows neither timm's warm-up nor
    averaged buffers of several ranks.

    Args:
        decay: Largest share of the old average that a step keeps.
        min_decay: Smallest such share during the warm-up.
        update_after_step: Steps after which averaging begins; until then it copies the weights.
        use_warmup: Let the decay grow as 1 − (1 + step / warmup_gamma) ** −warmup_power.
        warmup_gamma: See there.
        warmup_power: See there.
        exclude_buffers: Copy buffers such as BN statistics instead of averaging them.
        device: Where the average is kept, "cpu" to save a GPU's memory; None: with the model.
    """

    priority = "NORMAL"

    def __init__(self, **options: Any) -> None:
        check_keys("ema", ModelEmaV3, options, refused=REFUSED)
        decay, least = options.get("decay", 0.9999), options.get("min_decay", 0.0)
        for name, value in (("decay", decay), ("min_decay", least)):
            check_number(f"ema {name}", value, "[0, 1)")
        if least > decay:
            raise ValueError(f"ema min_decay={least!r} must not exceed decay={decay!r}.")
        check_integer("ema update_after_step", options.get("update_after_step", 0), 0)
        for name in ("warmup_gamma", "warmup_power"):
            if not options.get(name, 1) > 0:
                raise ValueError(f"ema {name}={options[name]!r} must be positive.")
        self._options = options
        self._average: ModelEmaV3 | None = None
        self._resumed: dict[str, torch.Tensor] | None = None

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """To resume, give the model the trained weights back, and remember the average."""
        if not runner._resume:
            return
        if "ema_state_dict" not in checkpoint:
            raise ValueError(
                "cannot resume with `ema`: the checkpoint comes from a run without it. To start "
                "from its weights use load_from without resume."
            )
        self._resumed = checkpoint["state_dict"]
        checkpoint["state_dict"] = checkpoint["ema_state_dict"]

    def before_train(self, runner: Any) -> None:
        """Copy the model, which is converted and has its weights.

        Raises:
            ValueError: a weight has two names: it would be averaged twice in a step.
        """
        names: dict[int, str] = {}
        for name, parameter in unwrapped(runner.model).named_parameters(remove_duplicate=False):
            if names.setdefault(id(parameter), name) != name:
                raise ValueError(
                    f"`ema` knows each weight by one name; {names[id(parameter)]!r} and {name!r} "
                    "are the same: leave `ema` out."
                )
        self._average = ModelEmaV3(unwrapped(runner.model), **self._options)
        if self._resumed is not None:
            self._average.module.load_state_dict(self._resumed)
            self._resumed = None

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Follow the weights, if the optimizer has just made a step."""
        wrappers = built_wrappers(runner.optim_wrapper)
        if all(wrapper.should_update() for wrapper in wrappers):
            accumulated = wrappers[0]._accumulative_counts
            step = math.ceil((runner.iter + 1) / accumulated)
            self._average.update(unwrapped(runner.model), step=step)

    def after_train_epoch(self, runner: Any) -> None:
        """Make the ranks' averages one, whose BN statistics differ."""
        if is_distributed():
            all_reduce_params(self._average.module.buffers(), op="mean")

    @torch.no_grad()
    def before_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        """Exchange the model's weights and the average, in place."""
        if self._average is None:  # a test alone: the checkpoint's weights are the average
            return
        average, model = self._average.module.state_dict(), unwrapped(runner.model).state_dict()
        for name, value in model.items():
            trained = value.clone()
            value.copy_(average[name])
            average[name].copy_(trained)

    after_val_epoch = before_test_epoch = after_test_epoch = before_val_epoch

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Put the average in the place of the trained weights."""
        checkpoint["ema_state_dict"] = checkpoint["state_dict"]
        checkpoint["state_dict"] = {
            name: value.cpu() for name, value in self._average.module.state_dict().items()
        }
