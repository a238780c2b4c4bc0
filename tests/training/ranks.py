"""Two processes that train, are stopped and go on: of classifiers and of detectors."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

import fst
import fst.models
from fst.cli import main
from fst.training.engine.model import sparse_root, unwrapped
from tests import two_ranks
from tests.digests import digest
from tests.training.engine.conftest import tiny_net

PROBE = 'dict(type="mmengine.Probe")'


@HOOKS.register_module(force=True)
class Probe(Hook):
    """Notes the images, weights and masks of each iteration; stops where it is told to."""

    stop_at: tuple[int, int] | None = None
    runs: list[dict[str, Any]] = []

    def before_train(self, runner: Any) -> None:
        self.runs.append({"images": [], "states": [], "masks": []})

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if self.stop_at == (runner.epoch, batch_idx):
            raise KeyboardInterrupt

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        model, found = unwrapped(runner.model), self.runs[-1]
        layers = fst.sparse_layers(sparse_root(model))
        masks = {name: layer.output_mask() for name, layer in layers.items()}
        samples = data_batch.get("data_samples")
        found["images"] += [s.img_id for s in samples] if samples else data_batch["keys"].tolist()
        found["states"].append(digest(dict(model.named_parameters())))
        found["masks"].append(digest(masks))

    def after_train(self, runner: Any) -> None:
        self.runs[-1]["end"] = digest(dict(unwrapped(runner.model).state_dict()))


def run(folder: Path, configs: Sequence[Sequence[str]]) -> list[list[dict[str, Any]]]:
    """Train the first config of each three, the second one until it stops, go on by the third.

    Returns what `Probe` has noted, for each rank and each of these runs. The work dirs are
    ``folder/whole0``, ``folder/parts0``, ``folder/whole1``, ...
    """
    two_ranks.run(_rank, folder, folder, configs)
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for zero, one in zip(*ranks, strict=True):
        for what in ("states", "masks", "end"):
            assert zero.get(what) == one.get(what), what
        assert len(set(zero["states"])) == len(zero["states"])
    return ranks


def _rank(rank: int, folder: Path, configs: Sequence[Sequence[str]]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    fst.models.tiny_net = tiny_net

    def train(config: str, name: str, *arguments: str) -> None:
        options = ["--work-dir", str(folder / name), "--launcher", "pytorch"]
        main(["train", config, *options, *arguments])

    for index, (whole, first, second) in enumerate(configs):
        train(whole, f"whole{index}")
        Probe.stop_at = (1, 1)
        with pytest.raises(SystemExit):
            train(first, f"parts{index}")
        Probe.stop_at = None
        train(second, f"parts{index}", "--resume")
    (folder / f"rank{rank}.json").write_text(json.dumps(Probe.runs))
