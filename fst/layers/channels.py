"""Channels that hang together, found by tracing a model; removing them from it and its optimizer.

A group is one set of channels: the outputs of the layers that produce it (several, where branches
are added), the batch norms on the way, and the inputs of the layers that read it. Tracing is done
by Torch-Pruning (Fang et al., "DepGraph: Towards Any Structural Pruning", CVPR 2023;
github.com/VainF/Torch-Pruning), which is needed for nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fst.layers.calls import in_eval_mode

MISSING = (
    "removing channels needs the package torch-pruning, which follows channels through a model: "
    "pip install torch-pruning"
)
AXES = {"out": 0, "in": 1}  # of a weight; everything else of a layer has its "out" axis alone


class Member(NamedTuple):
    """Where a group's channels lie in a module.

    Attributes:
        name: of the module in the model.
        side: "out" or "in".
        positions: indices along that side.
        channels: for each of them, which of the group's channels it is.
    """

    name: str
    side: str
    positions: Tensor
    channels: Tensor


class ChannelGroup(NamedTuple):
    """Channels that can be removed only together.

    Attributes:
        size: number of channels.
        members: all places they lie in.
        obstacle: why none of them can be removed; "" if they can.
    """

    size: int
    members: tuple[Member, ...]
    obstacle: str


def require_tracing() -> Any:
    """The module torch_pruning.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import torch_pruning
    except ImportError as error:
        raise ImportError(MISSING) from error
    return torch_pruning


def channel_groups(
    model: nn.Module, example: Tensor, producers: Collection[object]
) -> list[ChannelGroup]:
    """All groups of ``model``; it runs once in eval mode on ``example`` and stays as it is.

    Removable are channels that only ``producers`` produce, and only convolutions without groups,
    depthwise convolutions, batch norms and linear layers touch.
    """
    tracing = require_tracing()
    names = {module: name for name, module in model.named_modules()}
    with traceable(model), torch.enable_grad():
        example = example.detach().requires_grad_()  # also traces what lies behind frozen layers
        ends: list[Any] = []

        def remember(outputs: Any) -> Any:
            ends.extend(t.grad_fn for t in tracing.utils.flatten_as_list(outputs))
            return outputs

        graph = tracing.DependencyGraph().build_dependency(
            model, (example,), output_transform=remember, verbose=False
        )
        kinds = [nn.Conv2d, nn.Linear]
        traced = list(graph.get_all_groups(root_module_types=kinds))
    return [_group(graph, names, ends, producers, found) for found in traced]


@contextmanager
def traceable(model: nn.Module) -> Iterator[None]:
    """Plain layers in eval mode, for the time of the block."""
    layers = {m: type(m) for m in model.modules() if hasattr(m, "dense_class")}
    for layer in layers:
        layer.__class__ = layer.dense_class
    try:
        with in_eval_mode(model):
            yield
    finally:
        for layer, kind in layers.items():
            layer.__class__ = kind


def _group(
    graph: Any,
    names: Mapping[Any, str],
    ends: Sequence[Any],
    producers: Collection[object],
    found: Any,
) -> ChannelGroup:
    members: list[Member] = []
    obstacle, is_read = "", False
    for item in found:
        node = item.dep.target
        module = node.module
        if module not in names:
            if type(module).__name__ == "_OutputOp" or isinstance(module, nn.Parameter):
                obstacle = obstacle or "the model's output or a bare parameter has these channels"
            continue
        side = "out" if graph.is_out_channel_pruning_fn(item.dep.handler) else "in"
        obstacle = obstacle or _obstacle(module, names[module])
        produces = side == "out" and isinstance(module, nn.Conv2d | nn.Linear)
        if produces and module not in producers:
            obstacle = obstacle or f"{names[module]!r} is not converted"
        if side == "out" and node.grad_fn in ends:
            obstacle = obstacle or f"{names[module]!r} is an output of the model"
        is_read |= side == "in"
        positions, order = torch.tensor(list(item.idxs), device="cpu").sort()
        channels = torch.tensor(list(item.root_idxs), device="cpu")[order]
        members.append(Member(names[module], side, positions, channels))
    if not is_read:
        obstacle = obstacle or "no layer reads these channels"
    size = max(int(m.channels.max()) for m in members) + 1
    return ChannelGroup(size, tuple(members), obstacle)


def _obstacle(module: nn.Module, name: str) -> str:
    if isinstance(module, nn.Conv2d):
        if module.groups > 1 and not is_depthwise(module):
            return f"{name!r} is a grouped convolution"
    elif not isinstance(module, _BatchNorm | nn.Linear):
        return f"{name!r} is a {type(module).__name__}"
    return ""


def is_depthwise(module: nn.Module) -> bool:
    """Whether each channel has a filter of its own."""
    return isinstance(module, nn.Conv2d) and 1 < module.groups == module.out_channels


def weighted(model: nn.Module, group: ChannelGroup) -> Iterator[tuple[Member, Tensor]]:
    """The members that multiply the group's channels by a weight, and that weight.

    Those are convolutions and linear layers; a depthwise convolution has no choice of channels.
    """
    for member in group.members:
        module = model.get_submodule(member.name)
        if isinstance(module, nn.Conv2d | nn.Linear) and not is_depthwise(module):
            yield member, module.weight


def channel_maxima(model: nn.Module, group: ChannelGroup) -> Tensor:
    """Largest |w| of each channel in all layers that produce or read it: (size,)."""
    maxima = None
    for member, weight in weighted(model, group):
        axis = AXES[member.side]
        others = [d for d in range(weight.dim()) if d != axis]
        values = weight.detach().abs().amax(others)[member.positions.to(weight.device)]
        if maxima is None:
            maxima = values.new_zeros(group.size)
        maxima.scatter_reduce_(0, member.channels.to(values.device), values, "amax")
    return maxima


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
    drop: dict[tuple[str, str], Tensor] = {}
    for group, mask in removed:
        for member in group.members:
            module = model.get_submodule(member.name)
            key = (member.name, member.side)
            if key not in drop:
                size = _sizes(module)[member.side]
                drop[key] = torch.zeros(size, dtype=torch.bool, device="cpu")
            drop[key][member.positions[mask.cpu()[member.channels]]] = True
    for name in dict.fromkeys(name for name, _ in drop):
        module = model.get_submodule(name)
        kept = {s: (~drop[name, s]).nonzero()[:, 0] for s in AXES if (name, s) in drop}
        _shrink(module, kept, optimizer)


def _sizes(module: nn.Module) -> dict[str, int]:
    if isinstance(module, _BatchNorm):
        return {"out": module.num_features}
    weight = module.weight
    return {"out": weight.shape[0], "in": weight.shape[1] * getattr(module, "groups", 1)}


def _shrink(
    module: nn.Module, kept: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None
) -> None:
    def select(tensor: Tensor) -> Tensor:
        smaller = tensor.detach()
        for side, index in kept.items():
            if AXES[side] < tensor.dim():
                smaller = smaller.index_select(AXES[side], index.to(tensor.device))
        return _laid_out_as(tensor, smaller)

    for name, parameter in list(module.named_parameters(recurse=False)):
        _replace(module, name, select(parameter), optimizer, select)
    for name, buffer in list(module.named_buffers(recurse=False)):
        if buffer.dim():
            setattr(module, name, select(buffer))
    _follow_shapes(module)


def _laid_out_as(old: Tensor, values: Tensor) -> Tensor:
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


def _replace(
    module: nn.Module,
    name: str,
    values: Tensor,
    optimizer: torch.optim.Optimizer | None,
    select: Any,
) -> None:
    old = getattr(module, name)
    new = nn.Parameter(values, requires_grad=old.requires_grad)
    setattr(module, name, new)
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]
    for key, value in optimizer.state.pop(old, {}).items():
        is_like = isinstance(value, Tensor) and value.shape == old.shape
        optimizer.state[new][key] = select(value) if is_like else value


def _follow_shapes(module: nn.Module) -> None:
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
    changed = []
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        own = {**module._parameters, **module._buffers}
        sizes = {
            key: state_dict[prefix + key].shape
            for key, value in own.items()
            if value is not None
            and prefix + key in state_dict
            and state_dict[prefix + key].shape != value.shape
        }
        if not sizes:
            continue
        for key, shape in sizes.items():
            _check_smaller(module, prefix + key, own[key].shape, shape)
        for key, shape in sizes.items():
            values = _laid_out_as(own[key], own[key].detach().new_zeros(shape))
            if key in module._parameters:
                if optimizer is not None:
                    optimizer.state.pop(own[key], None)
                _replace(module, key, values, optimizer, None)
            else:
                setattr(module, key, values)
        _follow_shapes(module)
        changed.append(name)
    return changed


def _check_smaller(module: nn.Module, key: str, own: torch.Size, given: torch.Size) -> None:
    known = isinstance(module, nn.Conv2d | nn.Linear | _BatchNorm)
    fits = len(own) == len(given) and all(0 < g <= o for g, o in zip(given, own, strict=False))
    kernel_stays = own[2:] == given[2:]
    if not (known and fits and kernel_stays):
        raise ValueError(
            f"{key!r} has shape {tuple(given)} in state_dict and {tuple(own)} in the model: "
            "that is no loss of channels."
        )
