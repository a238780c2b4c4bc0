"""Models of timm, torchvision and `fst.models` by name; imports a library when it is asked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from fst import models
from fst.basics.text import nearest, suggest


def build_architecture(source: str, name: str, **arguments: Any) -> nn.Module:
    """The model ``name`` of "timm", "torchvision" or "fst" (`fst.models`).

    Raises:
        ValueError: unknown source or name, or arguments that the model does not take.
    """
    if source not in _SOURCES:
        raise ValueError(f"architecture source={source!r} is unknown.{suggest(source, _SOURCES)}")
    build, known = _SOURCES[source]()
    if name not in known:
        raise ValueError(f"{source} has no model {name!r}.{nearest(name, known)}")
    try:
        return build(name, **arguments)
    except TypeError as error:
        raise ValueError(f"model {name!r} of {source}: {error}") from error


def named_model(text: str, **arguments: Any) -> nn.Module:
    """The model "[SOURCE:]NAME", of torchvision where no source is given."""
    return build_architecture(*source_and_name(text), **arguments)


def source_and_name(text: str) -> tuple[str, str]:
    """The two parts of "[SOURCE:]NAME"."""
    source, _, name = text.rpartition(":")
    return source or "torchvision", name


def _timm() -> tuple[Callable[..., nn.Module], list[str]]:
    import timm

    # "resnet18.a1_in1k" names pretrained weights of the model "resnet18"
    return timm.create_model, [*timm.list_models(), *timm.list_pretrained()]


def _torchvision() -> tuple[Callable[..., nn.Module], list[str]]:
    import torchvision.models as known

    return known.get_model, known.list_models(module=known)


def _own() -> tuple[Callable[..., nn.Module], list[str]]:
    functions = inspect.getmembers(models, inspect.isfunction)
    known = {name: build for name, build in functions if not name.startswith("_")}
    return lambda name, **arguments: known[name](**arguments), list(known)


_SOURCES: dict[str, Callable[[], tuple[Callable[..., nn.Module], list[str]]]] = {
    "fst": _own,
    "timm": _timm,
    "torchvision": _torchvision,
}
