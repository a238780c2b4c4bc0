"""Layers that get fewer channels, and the optimizer that follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def is_depthwise(module: nn.Module) -> bool:
    """Whether each channel has a filter of its own."""
    return isinstance(module, nn.Conv2d) and 1 < module.groups == module.out_channels


def laid_out_as(old: Tensor, values: Tensor) -> Tensor:
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
    for name, value in state.items() if select is not None else ():
        is_like = isinstance(value, Tensor) and value.shape == old.shape
        optimizer.state[new][name] = select(value) if is_like else value


def follow_shapes(module: nn.Module) -> None:
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
            replace(
                module, key, laid_out_as(own[key], own[key].detach().new_zeros(shape)), optimizer
            )
        follow_shapes(module)
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
