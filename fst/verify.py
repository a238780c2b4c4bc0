"""Does a model, a state_dict or a checkpoint satisfy an N:M pattern?"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.parameter import UninitializedParameter

from fst.basics.sharding import whole
from fst.basics.text import table
from fst.basics.values import is_number, one_of
from fst.checkpoint import load_checkpoint_safely, state_dict_of
from fst.layers.coverage import (
    NOT_CALLED,
    Coverage,
    CoveredWeight,
    exempt,
    gemm_weights,
    inside_groups,
    multiply_adds,
)
from fst.layers.modules import SparseLayer
from fst.rules.masks import check_pattern
from fst.rules.nm import GROUP_ORDERS


@dataclass(frozen=True)
class LayerCheck:
    """One weight: whether it satisfies the pattern, and where it first does not.

    Attributes:
        density: share of non-zero elements.
        offence: the first offending group in words, or None.
        group: elements in its longest group; fewer than m, as in depthwise layers, are exempt
            where they are ``ok``.
        inside: elements in full groups of m, of which the pattern prunes some.
    """

    name: str
    shape: tuple[int, ...]
    density: float
    offence: str | None
    group: int
    inside: int

    @property
    def ok(self) -> bool:
        """Whether every group has at most n non-zero elements."""
        return self.offence is None


@dataclass(frozen=True)
class VerifyReport:
    """Result of `verify`; ``str()`` is two tables and the verdict.

    Attributes:
        pattern: "N:M".
        layers: the weights that were checked.
        covered: all weights of convolutions and linear layers, checked or not.
        min_coverage: what `coverage` must reach.
    """

    pattern: str
    layers: tuple[LayerCheck, ...]
    covered: Coverage
    min_coverage: float = 0.0

    @property
    def coverage(self) -> float:
        """Share of the convolutions' and linear layers' weights in full N:M groups, 0 to 1."""
        return self.covered.parameters

    @property
    def ok(self) -> bool:
        """Whether every checked weight satisfies the pattern, and enough of the model does."""
        return all(layer.ok for layer in self.layers) and self.coverage >= self.min_coverage

    def __str__(self) -> str:
        m = int(self.pattern.partition(":")[2])
        bad = sum(not layer.ok for layer in self.layers)
        short = sum(layer.ok and layer.group < m for layer in self.layers)
        rows = []
        for check in self.layers:
            fine = "ok" if check.group >= m else f"exempt: group of {check.group}"
            shape = "x".join(map(str, check.shape))
            rows.append((check.name, shape, f"{check.density:.3f}", check.offence or fine))
        verdict = f"{len(rows) - short} weights are {self.pattern}"
        if bad:
            verdict = f"{bad} of {len(rows)} weights are not {self.pattern}"
        verdict += f", {short} are exempt (groups of fewer than {m})" if short else ""
        verdict += f"; coverage {self.coverage:.1%}"
        if self.coverage < self.min_coverage:
            verdict += f", less than min_coverage={self.min_coverage}"
        checked = table(("weight", "shape", "density", self.pattern), rows)
        return f"{checked}\n\n{self.covered}\n\n{verdict}"


def verify(
    target: nn.Module | Mapping[str, Any] | str | os.PathLike[str],
    n: int = 2,
    m: int = 4,
    *,
    group_order: str = "channel",
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    min_coverage: float = 0.0,
    example_input: Tensor | tuple[Any, ...] | None = None,
) -> VerifyReport:
    """Check that every group of m consecutive weights has at most n non-zero ones.

    The report also says which share of the model that is. Nobody can use the zeros of groups
    shorter than m (depthwise, images): a weight of such groups has an offence if one has more than
    n non-zero, and is exempt, so not covered, if none has. ``include`` and ``exclude`` choose what
    is checked; the coverage is that of all convolutions and linear layers.

    Args:
        target: a model (each weight is checked as its layer computes with it: of converted layers
            S(W)), a state_dict, or the path of a checkpoint or a .safetensors file. Checked are
            convolution weights (4-D; of a state_dict all 4-D tensors), and weights of converted
            linear layers; with ``include``, whatever it names.
        n, m: the pattern.
        group_order: "channel" (along input channels, which a transposed convolution's weight has
            first; a state_dict does not tell those apart) or "im2col" (along Cin·kh·kw).
        include, exclude: glob patterns on parameter names such as "layer1.*.weight".
        min_coverage: the report is not ok if its ``coverage`` is less (0 to 1).
        example_input: for the multiply-adds in the report, if ``target`` is a model: one batch
            (N, ...), or a tuple of inputs. The model runs on it once, in eval mode.

    Raises:
        TypeError: ``target`` or ``example_input`` is none of these.
        ValueError: bad arguments, nothing to check, or a file that is not a checkpoint of tensors.
        FileNotFoundError: no such file.
        ImportError: a .safetensors file, but the package safetensors is not installed.
    """
    check_pattern(n, m)
    one_of("group_order", group_order, GROUP_ORDERS)
    if not is_number(min_coverage) or not 0 <= min_coverage <= 1:
        raise ValueError(f"min_coverage={min_coverage!r} must be a number from 0 to 1.")
    weights = everything = _weights(target, group_order)
    counted: dict[str, int] = {}
    if example_input is not None:
        if not isinstance(target, nn.Module):
            raise ValueError("example_input needs a model as target: weights alone cannot run.")
        counted = multiply_adds(target, example_input)
    for argument, patterns in (("include", include), ("exclude", exclude)):
        if patterns is None:
            continue
        if isinstance(patterns, str) or not isinstance(patterns, Iterable):
            patterns = [patterns]
        patterns = list(patterns)
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(f"{argument}={patterns!r} must be a pattern on names, or some of them.")
        matched = {k for k in weights if any(fnmatchcase(k, p) for p in patterns)}
        if not matched:
            raise ValueError(f"{argument}={patterns!r} matches no weight of: {', '.join(weights)}.")
        keep = matched if argument == "include" else weights.keys() - matched
        weights = {k: v for k, v in weights.items() if k in keep}
    if include is None:
        weights = {k: found for k, found in weights.items() if found.is_checked}
    if not weights:
        raise ValueError("target has no convolution weight to verify; name others with include.")
    checks, covered = [], []
    for name, found in everything.items():
        if name not in weights and not found.is_counted:
            continue
        check = _check(name, found.weight, n, m, found.group_order)
        label = _label(check, n, m)
        if name in weights:
            checks.append(check)
        elif not check.ok:
            label += ", not checked"
        inside = check.inside if check.ok else 0
        if found.is_sparse_layer and counted.get(name) == 0:
            label, inside = NOT_CALLED, 0
        covered.append(CoveredWeight(name, found.weight.numel(), inside, label, counted.get(name)))
    return VerifyReport(f"{n}:{m}", tuple(checks), Coverage(tuple(covered)), min_coverage)


def _label(check: LayerCheck, n: int, m: int) -> str:
    if not check.ok:
        return f"not {n}:{m}"
    if check.group < m:
        return exempt(m)
    return f"{n}:{m}" if n < m else f"{n}:{m}, which prunes nothing"


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


class _Weight(NamedTuple):
    """A weight, and what it is.

    Attributes:
        is_checked: by default.
        is_counted: that of a convolution or linear layer, as far as its name and shape tell.
        is_sparse_layer: that of a converted layer, pruned as in a call of the layer.
    """

    weight: Tensor
    group_order: str
    is_checked: bool
    is_counted: bool
    is_sparse_layer: bool = False


def _weights(target: object, group_order: str) -> dict[str, _Weight]:
    if isinstance(target, nn.Module):
        return _of_model(target, group_order)
    if isinstance(target, Mapping):
        return _of_state_dict(state_dict_of(target, "target"), group_order)
    if isinstance(target, str | os.PathLike):
        state = state_dict_of(read_file(target), str(target))
        return _of_state_dict(state, group_order)
    raise TypeError(
        f"target is a {type(target).__name__}; it must be a module, a state_dict or a path."
    )


def _of_model(model: nn.Module, group_order: str) -> dict[str, _Weight]:
    """What its layers compute with, and its other tensors; each module by one name.

    The others are not checked by default, but where torch.jit hides what layers they belong to.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"target: {name!r} has no shape yet: run the model once, so that its lazy layers "
                "know theirs."
            )
    found = {
        name: _Weight(weight, group_order, weight.dim() == 4, True)
        for name, weight in gemm_weights(model).items()
    }
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, _ConvTransposeNd):
            found[f"{prefix}weight"] = found[f"{prefix}weight"]._replace(
                weight=_outputs_first(whole(module.weight), module.groups)
            )
        if isinstance(module, SparseLayer):
            order = getattr(module.strategy.output, "group_order", group_order)
            weight = module.effective_weight()
            found[f"{prefix}weight"] = _Weight(weight, order, True, True, True)
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        is_hidden = isinstance(module, torch.jit.ScriptModule)
        for key, other in _of_state_dict(dict(own), group_order).items():
            is_checked = other.is_checked and is_hidden
            other = other._replace(is_checked=is_checked, is_counted=False)
            found.setdefault(f"{prefix}{key}", other)
    return found


def _outputs_first(weight: Tensor, groups: int) -> Tensor:
    """A transposed convolution's (Cin, Cout/groups, ...) as (Cout, Cin/groups, ...)."""
    return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)


def _of_state_dict(state: Mapping[str, Any], group_order: str) -> dict[str, _Weight]:
    """In a state_dict an embedding's weight looks like that of a linear layer, and counts."""
    return {
        name: _Weight(
            value, group_order, value.dim() == 4, value.dim() == 4 or name.endswith("weight")
        )
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
    inside = inside_groups(weight.shape, n, m, group_order)
    group = min(m, nonzero.shape[1])
    return LayerCheck(name, tuple(weight.shape), density, offence, group, inside)
