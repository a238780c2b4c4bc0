"""Parameters whose parts lie on different ranks: `torch.distributed.fsdp.fully_shard` (FSDP2).

Between calls such a Parameter is a DTensor; in the forward and backward pass of its module it is
whole. FSDP1 (`FullyShardedDataParallel`) keeps flat parameters instead, without shapes or channels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

ORDER = "call fst.convert, then fully_shard, then build the optimizer, then fst.attach"

LOAD = (
    "load get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) and "
    "fst.sparsity_state(model) into a model that is converted, but not sharded"
)


def _loaded(module: str, name: str) -> Any:
    """A class of an imported module; else (): no object is an instance of it."""
    return getattr(sys.modules.get(module), name, ())


def is_sharded(tensor: Tensor | None) -> bool:
    """True if ``tensor`` is a DTensor."""
    return isinstance(tensor, _loaded("torch.distributed.tensor", "DTensor"))


def are_sharded(tensors: Iterable[Tensor]) -> bool:
    """True if one of them is a DTensor."""
    kind = _loaded("torch.distributed.tensor", "DTensor")
    return any(isinstance(tensor, kind) for tensor in tensors)


def is_sharded_model(model: nn.Module) -> bool:
    """True if ``model`` or a part of it was given to `fully_shard`, or holds DTensors."""
    sharding = _loaded("torch.distributed.fsdp", "FSDPModule")
    return any(isinstance(m, sharding) for m in model.modules()) or are_sharded(model.parameters())


def is_managed(layer: nn.Module) -> bool:
    """True if FSDP, of either kind, gathers the parameters of ``layer``."""
    return vars(layer).get("_is_fsdp_managed_module", False)


def is_flat(layer: nn.Module) -> bool:
    """True if FSDP1 keeps the weight of ``layer`` in a flat parameter."""
    if not is_managed(layer):
        return False
    weight = layer._parameters.get("weight", layer.__dict__.get("weight"))
    is_own = isinstance(weight, nn.Parameter) and not hasattr(weight, "_fsdp_flattened")
    return weight is not None and not is_own


def whole(tensor: Tensor) -> Tensor:
    """``tensor`` with the parts of all ranks, which all have to call this; else as it is."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def sharded_as(tensor: Tensor, like: Tensor) -> Tensor:
    """The part of a whole ``tensor``, equal on all ranks, that fits to ``like``; no communication.

    Args:
        tensor: of the shape of ``like``.
        like: a DTensor, or a tensor: then it is the whole.
    """
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(like, DTensor)
    mesh = like.device_mesh
    copies = [Replicate()] * mesh.ndim
    return DTensor.from_local(tensor, mesh, copies, run_check=False).redistribute(
        placements=like.placements
    )


def several_ranks() -> bool:
    """True if this process is one of several of an initialised `torch.distributed`."""
    ranks = torch.distributed
    return ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1


def own_rank() -> int:
    """The rank of this process in `torch.distributed`; 0 where it is the only one."""
    return torch.distributed.get_rank() if several_ranks() else 0


def reshard(model: nn.Module) -> None:
    """Leave each rank its part of all of ``model``, outside its forward and backward pass."""
    for module in model.modules():
        if isinstance(module, _loaded("torch.distributed.fsdp", "FSDPModule")):
            module.reshard()


def refuse_sharded(model: nn.Module, function: str, advice: str) -> None:
    """Raise ValueError where ``model`` is sharded, which a function cannot work on."""
    if is_sharded_model(model):
        raise ValueError(
            f"{function}: {type(model).__name__} is sharded (fully_shard), so ranks hold parts of "
            f"its weights: {advice}."
        )
