"""From a dataloader's config to the dataloader."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import mmengine.runner
import torch
from mmengine.registry import DATA_SAMPLERS, DATASETS
from torch.utils.data import DataLoader

from fst.training.engine.data.base import ImageDataset, InMemoryDataset
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
    config = copy.deepcopy(dict(dataloader))
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
    _check_batches(loader)
    return loader


def _check_batches(loader: DataLoader) -> None:
    """Refuse a loader without a single batch: it would train or evaluate nothing, silently."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    is_endless = getattr(sampler, "infinite", not hasattr(sampler, "num_samples"))
    if not is_endless and len(loader) == 0:
        raise ValueError(
            f"batch_size={loader.batch_sampler.batch_size} is more than the {len(sampler)} images "
            f"of this process (the data set has {len(loader.dataset)}), and drop_last=True leaves "
            "out what fills no batch: lower batch_size, or set drop_last=False."
        )


def is_own(dataset: Any) -> bool:
    """True if a config is of one of FST's data sets."""
    kind = dataset.get("type") if isinstance(dataset, Mapping) else None
    kind = DATASETS.get(kind) if isinstance(kind, str) else kind
    return inspect.isclass(kind) and issubclass(kind, ImageDataset)


def _image_dataloader(config: dict[str, Any], seed: int | None) -> DataLoader:
    dataset = DATASETS.build(config.pop("dataset"))
    on_gpu = isinstance(dataset, InMemoryDataset) and dataset.images.is_cuda
    if on_gpu and config.get("num_workers", 0) > 0:
        raise ValueError(
            f"num_workers={config['num_workers']} with a dataset on the GPU: batches are gathered "
            "there, set num_workers=0."
        )
    sampler = dict(config.pop("sampler", {"type": "DefaultSampler", "shuffle": False}))
    if sampler["type"] == "DefaultSampler" and not sampler.get("shuffle", True):
        sampler.setdefault("round_up", False)  # no image is evaluated twice
    sampler = EpochSampler(
        DATA_SAMPLERS.build(sampler, default_args={"dataset": dataset, "seed": seed})
    )
    config.setdefault("worker_init_fn", seed_worker)
    return DataLoader(dataset, sampler=sampler, collate_fn=_already_a_batch, **config)


def _already_a_batch(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return batch
