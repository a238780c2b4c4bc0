"""Two processes of one gloo group."""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing


def run(function: Callable[..., None], folder: Path, *arguments: Any) -> None:
    """Call ``function(rank, *arguments)`` in both."""
    torch.multiprocessing.spawn(_rank, (function, folder, arguments), nprocs=2)


def _rank(
    rank: int, function: Callable[..., None], folder: Path, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    wait = timedelta(seconds=60)  # for a rank that has failed elsewhere
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=wait)
    function(rank, *arguments)
    # A DistributedDataParallel that outlives the group joins gloo's threads with Python's lock
    # held. A thread that waits for the lock never ends then (PyTorch's issue 56297).
    gc.collect()
    dist.destroy_process_group()
