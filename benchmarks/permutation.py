"""Effect of permuting the channels of a trained network on magnitude and accuracy.

    python benchmarks/permutation.py --work-dirs work_dirs/permutation --seeds 0 1 2

Trains the network of configs/demo.py densely on cluttered digits (or takes what an earlier call has
trained), prunes it by "asp" with and without `fst.permute`, tests it so, and trains it again with
the zeros fixed. Columns: Σ|w| kept of Σ|w|; accuracy as pruned; accuracy after the second training.
Each is the mean over the seeds, with half of its 95 % interval (Student's t).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from torch import Tensor, nn

import fst
from fst.basics.machine import processor
from fst.basics.text import table
from fst.lab.ablation.results import Summary
from fst.training.engine.checkpoint import newest_checkpoint
from fst.training.engine.config import load_config
from fst.training.engine.model import sparse_root
from fst.training.engine.runner import Runner
from fst.training.engine.trained import trained_model

CONFIG = "fst::configs/demo.py"
DENSE = {"strategy": "dense"}
PATTERNS = ((2, 4), (1, 4))


def main() -> None:
    """Print a table of patterns, with and without permutation."""
    parser = argparse.ArgumentParser(description="Accuracy with and without fst.permute.")
    parser.add_argument("--work-dirs", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for seed in arguments.seeds:
        dense = trained(arguments.work_dirs / f"dense{seed}", seed, DENSE)
        found.setdefault(("dense", ""), []).append((100.0, accuracy(dense, DENSE)))
        for n, m in PATTERNS:
            for permute in (False, True):
                sparsity = {"strategy": "asp", "n": n, "m": m, "permute": permute}
                key = (f"{n}:{m}", "permuted" if permute else "as they were")
                row = measured(arguments.work_dirs, dense, seed, sparsity)
                found.setdefault(key, []).append(row)
    print(f"{processor()}, torch {torch.__version__}, {CONFIG}, seeds {arguments.seeds}")
    cells = [
        [*key, *(str(Summary(column)) for column in zip(*rows, strict=True)), ""][:5]
        for key, rows in found.items()
    ]
    print(table(["pattern", "channels", "kept %", "as pruned %", "trained again %"], cells))


def measured(
    folder: Path, dense: str, seed: int, sparsity: Mapping[str, Any]
) -> tuple[float, float, float]:
    """Share of Σ|w| kept, accuracy as pruned, accuracy after a second training, in percent."""
    torch.manual_seed(seed)
    model = trained_model(configured(DENSE), dense)
    root, n, m = sparse_root(model), sparsity["n"], sparsity["m"]
    fst.fold(root, inplace=True)
    fst.convert(root, "asp", n=n, m=m)
    if sparsity["permute"]:
        start = time.perf_counter()
        fst.permute(root, torch.randn(2, 1, 20, 20))
        print(f"seed {seed}, {n}:{m}: permuted in {time.perf_counter() - start:.2f} s")
    total = sum(layer.weight.abs().sum().item() for layer in fst.sparse_layers(root).values())
    fst.fold(root, inplace=True)
    kept = sum(weight.abs().sum().item() for weight in conv_weights(root))
    name = f"asp{n}{m}{'permuted' * sparsity['permute']}{seed}"
    pruned = folder / f"{name}.pth"
    torch.save(model.state_dict(), pruned)
    again = trained(folder / name, seed, sparsity, dense)
    return 100 * kept / total, accuracy(str(pruned), DENSE), accuracy(again, sparsity)


def conv_weights(root: nn.Module) -> list[Tensor]:
    """The weights that are pruned."""
    return [module.weight for module in root.modules() if isinstance(module, nn.Conv2d)]


def configured(sparsity: Mapping[str, Any]) -> Config:
    """The config with its ``sparsity``."""
    return load_config(CONFIG, {f"sparsity.{key}": value for key, value in sparsity.items()})


def trained(
    folder: Path, seed: int, sparsity: Mapping[str, Any], load_from: str | None = None
) -> str:
    """The last checkpoint of a training, an earlier call's if there is one."""
    if newest_checkpoint(str(folder)) is None:
        config = configured(sparsity)
        config.work_dir, config.load_from, config.randomness = (
            str(folder),
            load_from,
            {"seed": seed},
        )
        Runner.from_cfg(config).train()
    return str(newest_checkpoint(str(folder)))


def accuracy(path: str, sparsity: Mapping[str, Any]) -> float:
    """Top-1 accuracy on the test images, in percent."""
    config = configured(sparsity)
    config.work_dir, config.load_from = str(Path(path).parent / "tests"), path
    return float(Runner.from_cfg(config).test()["accuracy/top1"])


if __name__ == "__main__":
    main()
