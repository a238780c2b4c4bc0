"""Two processes that run cases of `sharded` and `refusals`."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.integrations import refusals, sharded


def _rank(rank: int, folder: Path, cases: Sequence[str]) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    wait = timedelta(seconds=60)  # for a rank that has failed elsewhere
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=wait)
    outcomes = {}
    for name in cases:
        try:
            {**sharded.MORE, **refusals.CASES}[name](rank, folder)
            outcomes[name] = ""
        except BaseException:
            outcomes[name] = traceback.format_exc()
    (folder / f"{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


def run(folder: Path, cases: Sequence[str]) -> dict[str, str]:
    """What was wrong in each case, on both ranks; "" where nothing was."""
    torch.multiprocessing.spawn(_rank, (folder, cases), nprocs=2)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    return {name: "\n".join(filter(None, (found[name] for found in ranks))) for name in cases}
