"""Trainings with VCAS's own code (Wang et al., ICLR 2024): docs/results/vcas.md.

It needs a checkout of https://github.com/thu-ml/VCAS. A config for `python -m fst train` in the
repository's root:

    _base_ = "configs/cifar10_subset_vit.py"
    sparsity = None
    custom_imports = dict(imports=["benchmarks.vcas"])
    custom_hooks = [dict(type="VcasHook", checkout="CHECKOUT", cal_var_freq=15)]

The hook takes the fields of VCAS's `VcasSampleArguments`. Where cal_var_freq exceeds the number of
steps the controller never acts, and all gradients are exact. The run's folder gets vcas.jsonl, a
line a step: the share of the multiply-adds of the blocks' linear layers that each pass did.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import set_random_seed
from timm.models.vision_transformer import Block

from fst.training.engine.data import build_dataloader
from fst.training.engine.model import sparse_root

OTHER_ORDER = 1000  # added to the seed: the controller's batches come in an order of their own


class Trainer:
    """The part of `transformers`' trainer that VCAS's inherits: a forward and a backward pass."""

    def __init__(self, model: Any, *_: Any) -> None:
        self.model = model
        self.passes: list[dict[str, float]] = []

    def get_train_dataloader(self) -> Any:
        return self.loader

    def training_step(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        losses = model._run_forward(model.data_preprocessor(inputs, True), mode="loss")
        loss, self.losses = model.parse_losses(losses)
        start = 0.0 if self.sample_scheme.sample else 1.0
        self.passes.append({"dX": start, "dW": start})
        loss.backward()
        return loss.detach()

    def log(self, values: dict[str, Any]) -> None:
        self.logged = values


def load_vcas(checkout: str) -> ModuleType:
    """VCAS's package, without `transformers`, of which only its trainer needs something."""
    names = "TrainingArguments DataCollator PreTrainedModel PreTrainedTokenizerBase"
    parts = {
        "transformers": dict.fromkeys(names.split(), object),
        "transformers.trainer": {"Trainer": Trainer},
        "transformers.trainer_callback": {"TrainerCallback": object},
        "transformers.trainer_utils": {"EvalPrediction": object, "set_seed": set_random_seed},
    }
    for name, members in parts.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(members)
    sys.path.insert(0, checkout)
    import vcas

    for name in parts:
        del sys.modules[name]
    return vcas


@HOOKS.register_module()
class VcasHook(Hook):
    """VCAS's layers in the blocks of a timm ViT, and its training step in the place of the model's.

    Data, schedule, optimizer and evaluation stay the config's.
    """

    def __init__(self, checkout: str, **arguments: Any) -> None:
        self.checkout, self.arguments = checkout, arguments

    def before_train(self, runner: Any) -> None:
        """Change the model, whose Parameters stay the same objects."""
        vcas = load_vcas(self.checkout)
        scheme = vcas.VcasSampleScheme(vcas.VcasSampleArguments(**self.arguments))
        model, root, config = runner.model, sparse_root(runner.model), runner.cfg.train_dataloader
        vcas.VcasModelProcessor(model, Block, scheme).register_linear_layers_in_repetend(root)
        for block in [module for module in root.modules() if isinstance(module, Block)]:
            # VCAS's own wrapper of a block takes tuples, as BERT's blocks return them
            sampler = vcas.layers.act_sampler.ActSampler(scheme)
            block.register_forward_hook(lambda _, inputs, output, sampler=sampler: sampler(output))
        self.trainer = vcas.VcasTrainer(model, scheme)
        self.trainer.optimizer = runner.optim_wrapper.optimizer
        self.trainer.loader = build_dataloader(config, seed=runner.seed + OTHER_ORDER)
        self.trainer.get_train_dataloader()
        tokens = (root.patch_embed.num_patches + root.num_prefix_tokens) * config.batch_size
        self._count(vcas.layers.linear, tokens * sum(scheme.w_shape_list))
        self.file = (Path(runner.work_dir) / "vcas.jsonl").open("w", buffering=1)
        model.train_step = self.step

    def _count(self, module: ModuleType, whole: int) -> None:
        """Count where a linear layer that samples asks for dW, or for the variance of its draw."""

        def counting(function: Any, draws: bool) -> Any:
            def counted(A: torch.Tensor, B: torch.Tensor, ratio: float) -> Any:
                rows = A.shape[1]
                drawn = int(rows * ratio) if draws else rows
                each, done = A.shape[0] * B.shape[1] / whole, self.trainer.passes[-1]
                done["dX"] += each * rows
                done["dW"] += each * (drawn if 0 < drawn < rows else rows)
                return function(A, B, ratio=ratio)

            return counted

        module.leverage_k = counting(module.leverage_k, True)
        module.cal_leverage_var = counting(module.cal_leverage_var, False)

    def step(self, data: Any, optim_wrapper: Any) -> dict[str, torch.Tensor]:
        """VCAS's step: in some, passes of the controller first; the last pass is the step's own."""
        trainer, scheme = self.trainer, self.trainer.sample_scheme
        trainer.passes, trainer.logged = [], {}
        trainer.training_step(trainer.model, data)
        optim_wrapper.step()
        optim_wrapper.zero_grad()
        *controller, own = trainer.passes
        line = {"step": trainer.completed_steps, "loss": trainer.losses["loss"].item(), **own}
        if controller:
            line |= {"controller": controller, **trainer.logged}
            line |= {"act_ratio": scheme.act_ratio_sched, "w_ratio": scheme.w_ratio_list}
        self.file.write(json.dumps(line) + "\n")
        return trainer.losses
