"""Does a model, a state_dict or a checkpoint satisfy an N:M pattern?"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fst.basics.sharding import whole
from fst.basics.text import suggest, table
from fst.checkpoint import load_checkpoint_safely, state_dict_of
from fst.layers.modules import SparseLayer
from fst.rules.masks import check_pattern
from fst.rules.nm import GROUP_ORDERS


@dataclass(frozen=True)
class LayerCheck:
    """One weight: whether it satisfies the pattern, and where it first does not.

    Attributes:
        density: share of non-zero elements.
        offence: the first offending group in words, or None.
    """

    name: str
    shape: tuple[int, ...]
    density: float
    offence: str | None

    @property
    def ok(self) -> bool:
        """Whether every group has at most n non-zero elements."""
        return self.offence is None


@dataclass(frozen=True)
class VerifyReport:
    """Result of `verify`; ``str()`` is a table that ends with the verdict."""

    pattern: str
    layers: tuple[LayerCheck, ...]

    @property
    def ok(self) -> bool:
        """Whether every checked weight satisfies the pattern."""
        return all(layer.ok for layer in self.layers)

    def __str__(self) -> str:
        rows = [
            (c.name, "x".join(map(str, c.shape)), f"{c.density:.3f}", c.offence or "ok")
            for c in self.layers
        ]
        bad = sum(not layer.ok for layer in self.layers)
        verdict = f"{len(rows)} weights are {self.pattern}"
        if bad:
            verdict = f"{bad} of {len(rows)} weights are not {self.pattern}"
        return f"{table(('weight', 'shape', 'density', self.pattern), rows)}\n\n{verdict}"


def verify(
    target: nn.Module | Mapping[str, Any] | str | os.PathLike[str],
    n: int = 2,
    m: int = 4,
    *,
    group_order: str = "channel",
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
) -> VerifyReport:
    """Check that every group of m consecutive weights has at most n non-zero ones.

    Args:
        target: a model (of converted layers S(W) is checked, what the model computes with), a
            state_dict, or the path of a checkpoint or a .safetensors file. Checked are convolution
            weights (4-D), and weights of converted linear layers; with ``include``, whatever it
            names.
        n, m: the pattern.
        group_order: "channel" (along input channels) or "im2col" (along Cin·kh·kw).
        include, exclude: glob patterns on parameter names such as "layer1.*.weight".

    Raises:
        ValueError: bad arguments, nothing to check, or a file that is not a checkpoint of tensors.
        FileNotFoundError: no such file.
        ImportError: a .safetensors file, but the package safetensors is not installed.
    """
    check_pattern(n, m)
    if group_order not in GROUP_ORDERS:
        raise ValueError(
            f"group_order={group_order!r} is unknown.{suggest(group_order, GROUP_ORDERS)}"
        )
    weights = _weights(target, group_order)
    for argument, patterns in (("include", include), ("exclude", exclude)):
        if patterns is None:
            continue
        patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        matched = {k for k in weights if any(fnmatchcase(k, p) for p in patterns)}
        if not matched:
            raise ValueError(f"{argument}={patterns!r} matches no weight of: {', '.join(weights)}.")
        keep = matched if argument == "include" else weights.keys() - matched
        weights = {k: v for k, v in weights.items() if k in keep}
    if include is None:
        weights = {k: (w, o, True) for k, (w, o, wanted) in weights.items() if wanted}
    if not weights:
        raise ValueError("target has no convolution weight to verify; name others with include.")
    checks = tuple(_check(name, w, n, m, order) for name, (w, order, _) in weights.items())
    return VerifyReport(f"{n}:{m}", checks)


def read_file(path: str | os.PathLike[str]) -> Any:
    """A checkpoint, or the tensors of a .safetensors file; no code from the file is run."""
    if Path(path).suffix != ".safetensors":
        return load_checkpoint_safely(path)
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise ImportError(
            f"{str(path)!r} needs safetensors: pip install -c constraints.txt safetensors"
        ) from error
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} does not exist.")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{str(path)!r} is no .safetensors file: {error}.") from error


def _weights(target: Any, group_order: str) -> dict[str, tuple[Tensor, str, bool]]:
    """Name -> (weight, group order, whether it is checked by default)."""
    if isinstance(target, nn.Module):
        found = _of_state_dict(target.state_dict(), group_order)
        for name, layer in target.named_modules():
            if isinstance(layer, SparseLayer):
                order = getattr(layer.strategy.output, "group_order", group_order)
                key = f"{name}.weight" if name else "weight"
                found[key] = (layer.effective_weight(), order, True)
        return found
    if isinstance(target, Mapping):
        return _of_state_dict(state_dict_of(target, "target"), group_order)
    if isinstance(target, str | os.PathLike):
        state = state_dict_of(read_file(target), str(target))
        return _of_state_dict(state, group_order)
    raise TypeError(
        f"target is a {type(target).__name__}; it must be a module, a state_dict or a path."
    )


def _of_state_dict(state: Mapping[str, Any], group_order: str) -> dict[str, Any]:
    return {
        name: (value, group_order, value.dim() == 4)
        for name, value in state.items()
        if isinstance(value, Tensor) and value.dim() >= 2 and value.is_floating_point()
    }


def _check(name: str, weight: Tensor, n: int, m: int, group_order: str) -> LayerCheck:
    nonzero = whole(weight) != 0
    if group_order == "im2col":
        nonzero = nonzero.flatten(1)
    padding = [0, 0] * (nonzero.dim() - 2) + [0, -nonzero.shape[1] % m]
    counts = F.pad(nonzero, padding).unflatten(1, (-1, m)).sum(2)
    offence = None
    if (counts > n).any():
        first = (counts > n).nonzero()[0].tolist()
        start = first[1] * m
        index = [str(first[0]), f"{start}:{min(start + m, nonzero.shape[1])}", *map(str, first[2:])]
        flat = " of the im2col order" if group_order == "im2col" else ""
        offence = f"{int(counts[tuple(first)])} non-zero in group [{', '.join(index)}]{flat}"
    density = float(nonzero.double().mean())
    return LayerCheck(name, tuple(weight.shape), density, offence)
