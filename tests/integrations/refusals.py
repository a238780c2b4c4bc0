"""What two ranks cannot do with FSDP, and how they say so: more cases of `sharded`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fst
from tests.digests import ROWS
from tests.integrations.sharded import ALL, CASES, Training, batch, case, network, part_of, shard


@case(CASES)
def refused_strategies(rank: int, folder: Path) -> None:
    with pytest.raises(ValueError, match="'prunetrain': .* is sharded .*train in one process"):
        Training(shard(network(ROWS["prunetrain"]())), part_of(rank))
    model = shard(network(ROWS["step"]()))
    with pytest.raises(ValueError, match="'step' holds moments of whole weights"):
        fst.attach(model, torch.optim.Adam(model.parameters()), total_steps=4)


@case(CASES)
def refused_orders(rank: int, folder: Path) -> None:
    with pytest.raises(ValueError, match="convert: .* is sharded .*fst.convert, then fully_shard"):
        fst.convert(shard(network(None)), "srste")
    model = network(ROWS["asp"]())
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="does not hold .*then build the optimizer"):
        fst.attach(shard(model), early)
    inner = network(ROWS["asp"]())
    training = Training(inner, part_of(rank), called=fully_shard(nn.Sequential(inner)))
    with pytest.raises(RuntimeError, match="give fst.attach the model"):
        training.train(1)


@case(CASES)
def refused_gathered_weights(rank: int, folder: Path) -> None:
    """The optimizer would change shards, and layers hold something else."""
    model = shard(network(ROWS["srste"]()))
    training = Training(model, part_of(rank))
    model.set_reshard_after_backward(False)
    with pytest.raises(RuntimeError, match="is gathered, .*reshard"):
        training.train(1)
    training.attachment.remove()
    with pytest.raises(ValueError, match="is gathered by FSDP: call reshard"):
        Training(model, part_of(rank))


@case(CASES)
def refused_fsdp1(rank: int, folder: Path) -> None:
    cpu = torch.device("cpu")
    for original in (True, False):
        model = network(ROWS["srste"]())
        wrapped = FullyShardedDataParallel(model, use_orig_params=original, device_id=cpu)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="FSDP1 .* is not supported"):
            fst.attach(wrapped, optimizer)
        with pytest.raises(ValueError, match="FSDP1 .* is not supported"):
            wrapped(batch(0, ALL)[0])


@case(CASES)
def refused_tensor_parallelism(rank: int, folder: Path) -> None:
    model = network(ROWS["srste"]())
    parallelize_module(model[6], init_device_mesh("cpu", (2,)), ColwiseParallel())
    with pytest.raises(RuntimeError, match="Tensor parallelism is not supported"):
        model(batch(0, ALL)[0])
