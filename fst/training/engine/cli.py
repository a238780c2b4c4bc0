"""The command lines of `fst train`, `fst test` and `fst fold`."""

from __future__ import annotations

import argparse
import gc
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.dist import is_main_process

import fst
from fst.api.report import table_of
from fst.basics.arguments import user_errors
from fst.basics.values import check_number
from fst.cli.options.training import NEWEST
from fst.files.checkpoint import save_atomically
from fst.layers.coverage import gemm_weights
from fst.layers.modules import folded_to_another_class
from fst.training.configs import is_detector
from fst.training.engine.checkpoint import check_unused, checkpoint_files
from fst.training.engine.checks import check_config
from fst.training.engine.config import load_config
from fst.training.engine.model import sparse_root
from fst.training.engine.runner import Runner
from fst.training.engine.trained import trained_model


def _configured(arguments: argparse.Namespace) -> Config:
    options, given = dict(arguments.cfg_options), vars(arguments)
    if given.get("epochs") is not None:
        options["epochs"] = arguments.epochs
    config = load_config(arguments.config, options, given.get("checkpoint"))
    default = config.get("work_dir") or str(Path("work_dirs") / Path(arguments.config).stem)
    arguments.work_dir = config.work_dir = arguments.work_dir or default
    config.launcher = arguments.launcher
    if arguments.seed is not None:
        config.randomness = {**config.get("randomness", {}), "seed": arguments.seed}
    if arguments.launcher == "pytorch" and "RANK" not in os.environ:
        raise ValueError(
            "--launcher pytorch needs torchrun, which sets RANK: "
            f"torchrun --nproc-per-node=2 -m fst train {arguments.config} --launcher pytorch"
        )
    return config


def _run(config: Config, action: Callable[[Runner], object]) -> None:
    """Run, and after success end the process group that it has begun."""
    begins = not torch.distributed.is_initialized()
    action(Runner.from_cfg(config))
    if begins and torch.distributed.is_initialized():
        # gloo's threads abort the process if they outlive the interpreter: free their tensors first
        gc.collect()
        torch.distributed.destroy_process_group()


def train(arguments: argparse.Namespace) -> int:
    """Train the model of a config."""
    with user_errors(arguments, lambda: _how_to_continue(arguments)):
        config = _configured(arguments)
        if arguments.resume is not None:
            _resume(config, arguments.resume)
        if not config.get("resume"):
            check_unused(config.work_dir)
        for key in ("train_cfg", "train_dataloader", "optim_wrapper"):
            if config.get(key) is None:
                raise ValueError(f"config {arguments.config!r} has no {key}.")
        if arguments.amp:
            _use_mixed_precision(config)
        check_config(config, ("train_dataloader", "val_dataloader"))
        _run(config, Runner.train)
    return 0


def _how_to_continue(arguments: argparse.Namespace) -> str:
    """The line that a stopped training ends with, on the first rank."""
    if os.environ.get("RANK", "0") != "0":
        return ""
    if arguments.work_dir is None or not checkpoint_files(arguments.work_dir):
        return "stopped. No checkpoint was saved yet: the same command starts anew."
    work_dir = shlex.quote(arguments.work_dir)
    return f"stopped. To continue: the same command with --work-dir {work_dir} --resume"


def _resume(config: Config, source: str) -> None:
    """Set what the run goes on from; "auto" leaves the config as it is if there is nothing."""
    found = source not in (NEWEST, "auto") or checkpoint_files(config.work_dir)
    if not found and source == NEWEST:
        raise FileNotFoundError(
            f"--resume: there is no checkpoint (epoch_N.pth or iter_N.pth) in {config.work_dir!r}. "
            "Name one, or start from scratch without --resume or with --resume auto."
        )
    if found:
        config.resume = True
        config.load_from = None if source in (NEWEST, "auto") else source


def _use_mixed_precision(config: Config) -> None:
    kind = config.optim_wrapper.get("type", "OptimWrapper")
    if kind == "OptimWrapper":
        config.optim_wrapper.type = "MixedPrecisionOptimWrapper"
    elif kind not in ("MixedPrecisionOptimWrapper", "AmpOptimWrapper"):
        raise ValueError(f"--amp cannot change an optim_wrapper of type {kind!r}.")


def test(arguments: argparse.Namespace) -> int:
    """Evaluate a checkpoint, folded or not."""
    config = _configured(arguments)
    _draw(config, arguments.show_dir, arguments.show_score_thr)
    config.load_from, config.resume = arguments.checkpoint, False
    for part in ("dataloader", "cfg", "evaluator"):
        if config.get(f"test_{part}") is None:
            config[f"test_{part}"] = config.get(f"val_{part}")
        if config[f"test_{part}"] is None:
            raise ValueError(f"config {arguments.config!r} has neither test_{part} nor val_{part}.")
    check_config(config, ("test_dataloader",))
    _run(config, _test)
    return 0


def _test(runner: Runner) -> None:
    """Print how many weights are pruned, and the metrics; mmengine's own lines are in the log."""
    metrics, root = runner.test(), sparse_root(runner.model)
    if not is_main_process():
        return
    if fst.sparse_layers(root):
        print(table_of(root, dict.fromkeys(gemm_weights(root), "not converted")), end="\n\n")
    for name, value in metrics.items():
        print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")


def _draw(config: Config, folder: str | None, score: float | None) -> None:
    """Let mmdet's hook draw detections."""
    if folder is None:
        if score is not None:
            raise ValueError("--show-score-thr needs --show-dir.")
        return
    if not is_detector(config):
        raise ValueError(
            "--show-dir draws the boxes of a detector: its config must have default_scope='mmdet'."
        )
    if Path(folder).is_file():
        raise ValueError(f"--show-dir {folder!r} is a file: detections are drawn into a folder.")
    score = 0.3 if score is None else score
    check_number("--show-score-thr", score, "[0, 1]")
    config.visualizer = {"type": "DetLocalVisualizer"}
    drawing = {"type": "DetVisualizationHook", "draw": True, "score_thr": score}
    drawing["test_out_dir"] = os.path.abspath(folder)  # mmdet puts others below the work dir
    config.default_hooks = {**(config.get("default_hooks") or {}), "visualization": drawing}


def fold(arguments: argparse.Namespace) -> int:
    """Write the pruned weights S(W) of a checkpoint as a plain state_dict of the dense model."""
    config = load_config(arguments.config, arguments.cfg_options, arguments.checkpoint)
    if config.get("sparsity") is None:
        raise ValueError(f"config {config.filename!r} has no `sparsity`: there is nothing to fold.")
    root = sparse_root(trained_model(config, arguments.checkpoint))
    if not fst.sparse_layers(root):
        raise ValueError(
            f"{arguments.checkpoint!r} holds no sparsity state: it is no checkpoint of a "
            "sparse training."
        )
    changed = folded_to_another_class(fst.sparse_layers(root).values())
    if changed:
        raise ValueError(
            f"folding changes layers ({changed}): the unconverted model would compute other "
            "weights from the folded ones. Write the network itself: fst export CONFIG "
            f"{arguments.checkpoint} model.onnx"
        )
    folded = fst.fold(root)
    weights = folded.state_dict()  # with the notes in its metadata
    for name, value in weights.items():
        weights[name] = value.clone()
    save_atomically(weights, arguments.out)
    print(
        f"folded {len(fst.sparse_layers(root))} layers of {arguments.checkpoint} "
        f"into {arguments.out}"
    )
    return 0
