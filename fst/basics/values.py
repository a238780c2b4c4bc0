"""Checks of values: an exception names the argument, its value and what is allowed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, TypeGuard

from fst.basics.text import suggest

if TYPE_CHECKING:  # a command line's mistakes are told before seconds of imports
    from torch import Tensor


def one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise ValueError unless ``value`` is among ``allowed``."""
    if not any(_same(value, a) for a in allowed):
        raise ValueError(f"{name}={value!r} is unknown.{suggest(value, map(str, allowed))}")


def _same(value: object, other: object) -> bool:
    """True if both are equal and of one type, as 1, True and 1.0 are not, nor tuples of them."""
    if isinstance(value, tuple) and isinstance(other, tuple):
        return len(value) == len(other) and all(map(_same, value, other))
    return type(value) is type(other) and value == other


def is_number(value: object) -> TypeGuard[float]:
    """True for an integer or a float, not for a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_number(name: str, value: object, interval: str) -> None:
    """Raise ValueError unless ``value`` is a number in ``interval``, such as "[0, 1)"."""
    low, high = map(float, interval[1:-1].split(","))
    least, most = interval[0] == "[", interval[-1] == "]"
    if is_number(value) and (low < value < high or value in (low,) * least + (high,) * most):
        return
    raise ValueError(f"{name}={value!r} must be a number in {interval}.")


def is_integer(value: object) -> TypeGuard[int]:
    """True for an integer, not for a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_integer(name: str, value: object, least: int) -> None:
    """Raise ValueError unless ``value`` is an integer of at least ``least``."""
    if not is_integer(value) or value < least:
        raise ValueError(f"{name}={value!r} must be an integer >= {least}.")


def refuse_unknown(where: str, given: Iterable[str] | None, known: Collection[str]) -> None:
    """Raise ValueError for a name in ``given`` that is not ``known``."""
    for name in given or ():
        if name not in known:
            raise ValueError(f"{where} key {name!r} is unknown.{suggest(name, known)}")


def check_module(model: object) -> None:
    """Raise TypeError unless ``model`` is a module."""
    from torch import nn

    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; it must be a torch.nn.Module.")


def check_has_values(argument: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError where a tensor is on the meta device."""
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(
                f"{argument}: {name!r} is on the meta device and has no values: load them first, "
                "as with model.to_empty(device=...) and model.load_state_dict(...)."
            )
