"""From a dataloader's config to the dataloader."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import mmengine.runner
import torch
from mmengine.registry import DATASETS
from torch.utils.data import DataLoader, default_collate

from fst.training.engine.data.base import EpochSampler, ImageDataset
from fst.training.engine.random_state import seed_worker

IN_ORDER = {"type": "DefaultSampler", "shuffle": False}


def build_dataloader(
    dataloader: DataLoader | dict[str, Any], seed: int | None = None, diff_rank_seed: bool = False
) -> DataLoader:
    """As mmengine's, with randomness that never repeats.

    Every loader draws its workers' seeds from a generator of its own, so that neither validation
    nor a restart shifts the global one. Workers of other packages' datasets never persist.
    """
    if isinstance(dataloader, DataLoader):
        return dataloader
    config = {"worker_init_fn": {"type": seed_worker}, **dataloader}
    if is_own(config.get("dataset")):
        sampler = dict(config.get("sampler") or IN_ORDER)
        if sampler["type"] == "DefaultSampler" and not sampler.get("shuffle", True):
            sampler.setdefault("round_up", False)  # no image is evaluated twice
        config["sampler"] = {"type": EpochSampler, "sampler": sampler}
        config.setdefault("collate_fn", {"type": collate})
    else:
        config.pop("disable_subprocess_warning", None)  # of the default worker_init_fn only
        # the generators of a worker that persists depend on epochs that a resumed run has not run
        config["persistent_workers"] = False
    loader = mmengine.runner.Runner.build_dataloader(config, seed, diff_rank_seed)
    loader.generator = torch.Generator()
    if seed is not None:
        loader.generator.manual_seed(seed)
    sampler = getattr(loader.sampler, "sampler", loader.sampler)
    if hasattr(sampler, "num_samples") and len(loader) == 0:  # others are endless
        raise ValueError(
            f"batch_size={loader.batch_size} is more than the {len(sampler)} images of this "
            f"process (the data set has {len(loader.dataset)}), and drop_last=True drops what "
            "fills no batch: lower batch_size, or set drop_last=False."
        )
    return loader


def is_own(dataset: Any) -> bool:
    """True if a config is of one of FST's data sets."""
    kind = dataset.get("type") if isinstance(dataset, Mapping) else None
    kind = DATASETS.get(kind) if isinstance(kind, str) else kind
    return inspect.isclass(kind) and issubclass(kind, ImageDataset)


def collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch of the items of an `ImageDataset`.

    Raises:
        ValueError: the images have several sizes.
    """
    sizes = sorted({tuple(item["inputs"].shape) for item in items})
    if len(sizes) > 1:
        raise ValueError(
            f"the transforms of a data set give images of several sizes, such as {sizes[:2]}; "
            "end them with a Resize or a crop."
        )
    return default_collate(items)
