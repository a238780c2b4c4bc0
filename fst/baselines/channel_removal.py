"""Channels that hang together, and their removal from a model and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fst.baselines.channels import traced_axes

Place = tuple[str, int]  # the name of a parameter or buffer, and one of its axes


class ChannelGroup(NamedTuple):
    """Channels of which each may be removed, as they lie in the same tensors.

    Attributes:
        size: number of channels.
        places: where they lie -> the channel of each element of that axis, -1 for none of these.
        obstacle: why none of them can be removed; "" if they can.
    """

    size: int
    places: Mapping[tuple[str, int], Tensor]
    obstacle: str


def channel_groups(
    model: nn.Module, example: Tensor, producers: Collection[object]
) -> list[ChannelGroup]:
    """The channels that convolutions and linear layers of ``model`` make.

    The model runs in eval mode on a stand-in of ``example``, and stays as it is. Removable are
    channels that only ``producers`` make, that a layer reads, and that only convolutions
    without groups, depthwise convolutions, batch norms and linear layers touch.

    Raises:
        RuntimeError: the model cannot be traced.
    """
    axes = traced_axes(model, example)
    stored = {
        (name, dim): axis
        for name, tensor in axes.tensors.items()
        for dim, axis in enumerate(axes.of(tensor))
    }
    holders: dict[int, dict[Place, None]] = {}
    for place, axis in stored.items():
        for channel in axis:
            holders.setdefault(channel, {})[place] = None
    families: dict[tuple[str, tuple[Place, ...]], list[int]] = {}
    for channel in sorted(holders, reverse=True):  # from the outputs to the inputs
        families.setdefault((axes.fixed(channel), (*holders[channel],)), []).insert(0, channel)
    found = []
    for (reason, held), family in families.items():
        at = {channel: index for index, channel in enumerate(family)}
        places = {p: torch.tensor([at.get(c, -1) for c in stored[p]], device="cpu") for p in held}
        if any(dim == 0 and _multiplies(model, name) for name, dim in places):
            obstacle = reason or _obstacle(model, places, producers)
            found.append(ChannelGroup(len(family), places, obstacle))
    return found


def _owner(model: nn.Module, name: str) -> Any:
    return model.get_submodule(name.rpartition(".")[0])


def _multiplies(model: nn.Module, name: str) -> bool:
    """True for a tensor of a convolution or linear layer, which has output and input channels."""
    return isinstance(_owner(model, name), nn.Conv2d | nn.Linear)


def _obstacle(model: nn.Module, places: Collection[Place], producers: Collection[object]) -> str:
    """Why no layer may lose channels that lie in these places; "" if all may."""
    for name, dim in places:
        layer, module = name.rpartition(".")[0], _owner(model, name)
        if not isinstance(module, nn.Conv2d | nn.Linear | _BatchNorm):
            return f"{name!r} belongs to a {type(module).__name__}"
        if dim == 0 and not isinstance(module, _BatchNorm) and module not in producers:
            return f"{layer!r} is not converted"
    is_read = any(dim == 1 and _multiplies(model, name) for name, dim in places)
    return "" if is_read else "no layer reads these channels"


def weights_of(model: nn.Module, group: ChannelGroup) -> Iterator[tuple[Place, Tensor, Tensor]]:
    """Yield the weights that multiply the group's channels: place, weight, channels there.

    That is in convolutions and linear layers; a depthwise convolution has no choice of channels.
    """
    for place, channels in group.places.items():
        module = _owner(model, place[0])
        if (
            place[0].endswith("weight")
            and _multiplies(model, place[0])
            and not is_depthwise(module)
        ):
            yield place, module.weight, channels


def channel_maxima(model: nn.Module, group: ChannelGroup) -> Tensor:
    """Largest |w| of each channel in all layers that make or read it: (size,)."""
    found = []
    for (_, axis), weight, channels in weights_of(model, group):
        values = weight.detach().abs().amax([dim for dim in range(weight.dim()) if dim != axis])
        own = channels >= 0
        maxima = values.new_zeros(group.size)
        index = channels[own].to(values.device)
        found.append(maxima.scatter_reduce(0, index, values[own.to(values.device)], "amax"))
    return torch.stack(found).amax(0)


def remove_channels(
    model: nn.Module,
    removed: Sequence[tuple[ChannelGroup, Tensor]],
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Make a model smaller, in place.

    Parameters become new, smaller ones; ``optimizer`` gets them in the place of the old ones, with
    its state of the channels that stay. Gradients are dropped.

    Args:
        model: the one that was traced.
        removed: groups, and for each the mask (size,) of the channels to remove.
        optimizer: of any kind whose state tensors have the parameter's shape.
    """
    kept: dict[str, dict[int, Tensor]] = {}
    for group, mask in removed:
        for (name, axis), channels in group.places.items():
            stays = (channels < 0) | ~mask.cpu()[channels]
            own = kept.setdefault(name, {})
            own[axis] = own[axis] & stays if axis in own else stays
    for name, masks in kept.items():
        module, select = _owner(model, name), partial(_selected, masks)
        key = name.rpartition(".")[2]
        replace(module, key, select(getattr(module, key)), optimizer, select)
    for name in kept:
        follow_shapes(_owner(model, name))


def _selected(kept: Mapping[int, Tensor], tensor: Tensor) -> Tensor:
    smaller = tensor.detach()
    for axis, stays in kept.items():
        smaller = smaller.index_select(axis, stays.nonzero()[:, 0].to(tensor.device))
    return sharded_as(tensor, smaller)


def is_depthwise(module: nn.Module) -> bool:
    """True if each channel has a filter of its own."""
    return isinstance(module, nn.Conv2d) and 1 < module.groups == module.out_channels


def sharded_as(old: Tensor, values: Tensor) -> Tensor:
    """A copy of ``values`` in the memory format of ``old``.

    Its strides tell which one that is also where both formats are contiguous (1x1 kernels, one
    input channel), so that a channel more or less does not change it.
    """
    last = old.dim() == 4 and old.stride() == _strides(old, torch.channels_last)
    last = last and old.stride() != _strides(old, torch.contiguous_format)
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.empty_like(values, memory_format=layout).copy_(values)


def _strides(tensor: Tensor, layout: torch.memory_format) -> tuple[int, ...]:
    return torch.empty(tensor.shape, device="meta", memory_format=layout).stride()


def replace(
    module: nn.Module,
    key: str,
    values: Tensor,
    optimizer: torch.optim.Optimizer | None = None,
    select: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Give a module a smaller parameter or buffer, which ``optimizer`` gets in the old one's place.

    Its state has what ``select`` makes of the old tensors; none without ``select``.
    """
    old = getattr(module, key)
    if key not in module._parameters:
        setattr(module, key, values)
        return
    new = nn.Parameter(values, requires_grad=old.requires_grad)
    setattr(module, key, new)
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]
    state = optimizer.state.pop(old, {})
    if select is None:
        return
    for name, value in state.items():
        is_like = isinstance(value, Tensor) and value.shape == old.shape
        optimizer.state[new][name] = select(value) if is_like else value


def follow_shapes(module: Any) -> None:
    """Set what a module says about its sizes to those of its weight."""
    if isinstance(module, _BatchNorm):
        values = module.weight if module.weight is not None else module.running_mean
        module.num_features = len(values)
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    else:
        if is_depthwise(module):
            module.groups = len(module.weight)
        module.out_channels = len(module.weight)
        module.in_channels = module.weight.shape[1] * module.groups


def fit_channels(
    model: nn.Module,
    state_dict: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None = None,
) -> list[str]:
    """Make a model as small as the ``state_dict`` of one that lost channels, so that it loads.

    Weights of layers that change are left without meaning: load the state_dict next.

    Args:
        model: as it was built, converted or not.
        state_dict: its keys are the model's; others are ignored.
        optimizer: gets the new Parameters in the place of the old ones, without state.

    Returns:
        Names of the layers that changed.

    Raises:
        ValueError: a tensor is larger than the model's, or a layer cannot lose channels.
    """
    own = model.state_dict(keep_vars=True)
    sizes = {
        key: state_dict[key].shape
        for key, value in own.items()
        if key in state_dict and state_dict[key].shape != value.shape
    }
    for key, shape in sizes.items():
        _check_smaller(_owner(model, key), key, own[key].shape, shape)
    for key, shape in sizes.items():
        values = sharded_as(own[key], own[key].detach().new_zeros(shape))
        replace(_owner(model, key), key.rpartition(".")[2], values, optimizer)
    changed = dict.fromkeys(key.rpartition(".")[0] for key in sizes)
    for name in changed:
        follow_shapes(model.get_submodule(name))
    return [*changed]


def _check_smaller(module: nn.Module, key: str, own: torch.Size, given: torch.Size) -> None:
    known = isinstance(module, nn.Conv2d | nn.Linear | _BatchNorm)
    fits = len(own) == len(given) and all(0 < g <= o for g, o in zip(given, own, strict=False))
    kernel_stays = own[2:] == given[2:]
    if not (known and fits and kernel_stays):
        raise ValueError(
            f"{key!r} has shape {tuple(given)} in state_dict and {tuple(own)} in the model: "
            "that is no loss of channels."
        )
