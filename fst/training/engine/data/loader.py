"""From a dataloader's config to the dataloader."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import mmengine.runner
import torch
from mmengine.registry import DATA_SAMPLERS, DATASETS
from torch.utils.data import DataLoader

from fst.training.engine.data.base import ImageDataset
from fst.training.engine.data.sampler import EpochSampler
from fst.training.engine.random_state import seed_worker


def build_dataloader(
    dataloader: DataLoader | dict[str, Any], seed: int | None = None, diff_rank_seed: bool = False
) -> DataLoader:
    """As mmengine's, with batched access to FST's datasets and randomness that never repeats.

    Every loader draws its workers' seeds from a generator of its own, so that neither validation
    nor a restart shifts the global one. Workers of other packages' datasets never persist.
    """
    if isinstance(dataloader, DataLoader):
        return dataloader
    config = dict(dataloader)
    if is_own(config.get("dataset")):
        loader = _image_dataloader(config, None if diff_rank_seed else seed)
    else:
        config.setdefault("worker_init_fn", {"type": seed_worker})
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
            f"process (the data set has {len(loader.dataset)}), and drop_last=True leaves out what "
            "fills no batch: lower batch_size, or set drop_last=False."
        )
    return loader


def is_own(dataset: Any) -> bool:
    """True if a config is of one of FST's data sets."""
    kind = dataset.get("type") if isinstance(dataset, Mapping) else None
    kind = DATASETS.get(kind) if isinstance(kind, str) else kind
    return inspect.isclass(kind) and issubclass(kind, ImageDataset)


def _image_dataloader(config: dict[str, Any], seed: int | None) -> DataLoader:
    dataset = DATASETS.build(config.pop("dataset"))
    if config.get("num_workers") and dataset.labels.is_cuda:
        raise ValueError(
            f"num_workers={config['num_workers']} with a dataset on the GPU: batches are gathered "
            "there, set num_workers=0."
        )
    sampler = dict(config.pop("sampler", {"type": "DefaultSampler", "shuffle": False}))
    if sampler["type"] == "DefaultSampler" and not sampler.get("shuffle", True):
        sampler.setdefault("round_up", False)  # no image is evaluated twice
    sampler = DATA_SAMPLERS.build(sampler, default_args={"dataset": dataset, "seed": seed})
    config.setdefault("worker_init_fn", seed_worker)
    # `__getitems__` makes a batch already
    return DataLoader(dataset, sampler=EpochSampler(sampler), collate_fn=_same, **config)


def _same(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return batch
