"""Does a model, a state_dict or a checkpoint satisfy an N:M pattern?"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.parameter import UninitializedParameter

from fst.basics.selectors import Selector, selected
from fst.basics.sharding import whole
from fst.basics.text import counted_as, table
from fst.basics.values import check_has_values, check_number, one_of
from fst.checkpoint import state_dict_of
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
from fst.rules.rule import WeightGroups
from fst.stored.files import read_stored
from fst.stored.notes import Notes, notes_in, notes_of


@dataclass(frozen=True)
class LayerCheck:
    """One weight: whether it satisfies its pattern, and where it first does not.

    Attributes:
        n, m: the pattern.
        density: share of non-zero elements.
        offence: the first offending group in words, or None.
        group: elements in its longest group; fewer than m, as in depthwise layers, are exempt
            where they are ``ok``.
        inside: elements in full groups of m, of which the pattern prunes some.
    """

    name: str
    n: int
    m: int
    shape: tuple[int, ...]
    density: float
    offence: str | None
    group: int
    inside: int

    @property
    def pattern(self) -> str:
        """ "n:m" """
        return f"{self.n}:{self.m}"

    @property
    def ok(self) -> bool:
        """Whether every group has at most n non-zero elements."""
        return self.offence is None


@dataclass(frozen=True)
class VerifyReport:
    """Result of `verify`; ``str()`` is two tables and the verdict.

    Attributes:
        layers: the weights that were checked, each against its pattern.
        covered: all weights of convolutions and linear layers, checked or not.
        min_coverage: the least `coverage` of an ok report.
        not_pruned: weights of convolutions and linear layers that were not converted, so not
            checked, where the target says which ones were.
    """

    layers: tuple[LayerCheck, ...]
    covered: Coverage
    min_coverage: float = 0.0
    not_pruned: int = 0

    @property
    def pattern(self) -> str:
        """The "N:M" of the weights; where they differ, all of them: "1:4, 2:4"."""
        patterns = sorted({(check.m, check.n) for check in self.layers})
        return ", ".join(f"{n}:{m}" for m, n in patterns)

    @property
    def coverage(self) -> float:
        """Share of the convolutions' and linear layers' weights in full N:M groups, 0 to 1."""
        return self.covered.parameters

    @property
    def ok(self) -> bool:
        """Whether every checked weight satisfies the pattern, and enough of the model does."""
        return all(layer.ok for layer in self.layers) and self.coverage >= self.min_coverage

    def __str__(self) -> str:
        bad = sum(not layer.ok for layer in self.layers)
        short = [layer.m for layer in self.layers if layer.ok and layer.group < layer.m]
        several = "," in self.pattern
        rows = []
        for check in self.layers:
            fine = "ok" if check.group >= check.m else f"exempt: group of {check.group}"
            shape, verdict = "x".join(map(str, check.shape)), check.offence or fine
            if several:
                verdict = f"{check.pattern}: {verdict}"
            rows.append((check.name, shape, f"{check.density:.3f}", verdict))
        parts = [f"{counted_as(len(rows) - len(short), 'weight is', 'weights are')} {self.pattern}"]
        if bad:
            parts = [f"of {counted_as(len(rows), 'weight', 'weights')} {bad} not {self.pattern}"]
        if short:
            sizes = ", ".join(map(str, sorted(set(short))))
            parts.append(f"{len(short)} exempt (groups of fewer than {sizes})")
        if self.not_pruned:
            parts.append(f"{self.not_pruned} not pruned")
        verdict = ", ".join(parts)
        verdict += f"; coverage {self.coverage:.1%}"
        if self.coverage < self.min_coverage:
            verdict += f", less than min_coverage={self.min_coverage}"
        checked = table(("weight", "shape", "density", self.pattern), rows)
        return f"{checked}\n\n{self.covered}\n\n{verdict}"


def verify(
    target: nn.Module | Mapping[str, Any] | str | os.PathLike[str],
    n: int | None = None,
    m: int | None = None,
    *,
    group_order: str | None = None,
    include: Selector | Iterable[Selector] | None = None,
    exclude: Selector | Iterable[Selector] | None = None,
    min_coverage: float = 0.0,
    example_input: Tensor | tuple[Any, ...] | None = None,
) -> VerifyReport:
    """Check that every group of m consecutive weights has at most n non-zero ones.

    The report also says which share of the model obeys the pattern (coverage). Nobody can use the
    zeros of groups shorter than m (depthwise layers, images). A weight of such groups is exempt and
    not covered; it has an offence if one of its groups has more than n non-zero values. ``include``
    and ``exclude`` choose the weights to check. The coverage counts all convolutions and linear
    layers.

    A converted model, a folded model, its state_dict, and the files of `fst fold` and `fst.export`
    know which weights were converted to N:M: these weights are checked. Of other targets all
    convolution weights are checked (4-D; of a state_dict all 4-D tensors). With ``include`` the
    weights that it selects are checked.

    Args:
        target: a model (each weight is checked as its layer computes with it: of converted layers
            S(W)), a state_dict, or the path of a checkpoint, a .safetensors, .onnx or .pt2 file.
        n, m: the pattern of all weights. If one is missing, n is 2 and m is 4. If both are missing,
            each weight has the pattern that it was pruned to, or 2:4 where it is unknown.
        group_order: "channel" (along input channels; a transposed convolution's weight has them
            first, which a state_dict does not tell) or "im2col" (along Cin·kh·kw). None: each
            weight has the order that it was pruned along, or "channel" where it is unknown.
        include, exclude: as in `fst.convert`: patterns on names, of the layer ("layer1", with all
            that is below) or of the parameter ("layer1.*.weight"); of a model, types of layers too.
        min_coverage: the report is not ok if its ``coverage`` is less (0 to 1).
        example_input: for the multiply-adds in the report, if ``target`` is a model: one batch
            (N, ...), or a tuple of inputs. The model runs on it once, in eval mode.

    Raises:
        TypeError: ``target`` or ``example_input`` is none of these.
        ValueError: bad arguments, nothing to check, or a file that is not a checkpoint of tensors.
        FileNotFoundError: no such file.
        ImportError: a .safetensors or .onnx file, but the package that reads it is not installed.
    """
    given = None
    if n is not None or m is not None:
        given = (2 if n is None else n, 4 if m is None else m)
        check_pattern(*given)
    one_of("group_order", group_order, (None, *GROUP_ORDERS))
    check_number("min_coverage", min_coverage, "[0, 1]")
    everything = _weights(target)
    check_has_values("target", {name: found.weight for name, found in everything.items()})
    counted: dict[str, int] = {}
    if example_input is not None:
        if not isinstance(target, nn.Module):
            raise ValueError("example_input needs a model as target: weights alone cannot run.")
        counted = multiply_adds(target, example_input)
    known = any(found.groups is not None for found in everything.values())
    layers = {k: found.owner for k, found in everything.items() if found.is_counted}
    others = {k: found.owner for k, found in everything.items() if not found.is_counted}
    if include is not None:
        included = selected("include", include, layers, "weight", others=others)
        weights = {k: everything[k] for k in everything if k in included}
    else:
        weights = {
            k: found
            for k, found in everything.items()
            if (found.groups is not None if known else found.is_checked)
        }
    if exclude is not None:
        excluded = selected("exclude", exclude, layers, "weight", others=others)
        weights = {k: found for k, found in weights.items() if k not in excluded}
    if not weights:
        raise ValueError("target has no convolution weight to verify; name others with include.")
    checks, covered = [], []
    for name, found in everything.items():
        if name not in weights and not found.is_counted:
            continue
        own = found.groups or WeightGroups(2, 4, "channel")
        groups = WeightGroups(*(given or own[:2]), group_order or own.group_order)
        check = check_weight(name, found.weight, groups)
        label = _label(check)
        if name in weights:
            checks.append(check)
        elif not check.ok:
            label += ", not checked"
        inside = check.inside if check.ok else 0
        if found.is_sparse_layer and counted.get(name) == 0:
            label, inside = NOT_CALLED, 0
        covered.append(CoveredWeight(name, found.weight.numel(), inside, label, counted.get(name)))
    rest = [k for k in layers if everything[k].groups is None and k not in weights]
    return VerifyReport(
        tuple(checks), Coverage(tuple(covered)), min_coverage, len(rest) if known else 0
    )


def _label(check: LayerCheck) -> str:
    if not check.ok:
        return f"not {check.pattern}"
    if check.group < check.m:
        return exempt(check.m)
    return check.pattern if check.n < check.m else f"{check.pattern}, which prunes nothing"


class _Weight(NamedTuple):
    """A weight, and what it is.

    Attributes:
        is_checked: where nobody knows what was converted.
        is_counted: that of a convolution or linear layer, as far as its name and shape tell.
        groups: the N:M that it was converted to.
        owner: its layer, where there is a model.
        is_sparse_layer: that of a converted layer, pruned as in a call of the layer.
    """

    weight: Tensor
    is_checked: bool
    is_counted: bool
    groups: WeightGroups | None = None
    owner: nn.Module | None = None
    is_sparse_layer: bool = False


def _weights(target: object) -> dict[str, _Weight]:
    if isinstance(target, nn.Module):
        return _of_model(target)
    if isinstance(target, Mapping):
        return _of_state_dict(state_dict_of(target, "target"), notes_in(target, "target"))
    if isinstance(target, str | os.PathLike):
        return _of_state_dict(*read_stored(target))
    raise TypeError(
        f"target is a {type(target).__name__}; it must be a module, a state_dict or a path."
    )


def _of_model(model: nn.Module) -> dict[str, _Weight]:
    """What its layers compute with, and its other tensors; each module by one name.

    The others are not checked by default, but where torch.jit hides what layers they belong to.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"target: {name!r} has no shape yet: run the model once, so that its lazy layers "
                "know theirs."
            )
    notes = notes_of(model)
    found = {
        name: _Weight(weight, weight.dim() == 4, True, notes.get(name))
        for name, weight in gemm_weights(model).items()
    }
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        key = f"{prefix}weight"
        if isinstance(module, _ConvTransposeNd):
            found[key] = found[key]._replace(
                weight=_outputs_first(whole(module.weight), module.groups)
            )
        if isinstance(module, SparseLayer):
            rule, weight = module.acting.output, module.effective_weight()
            groups = None if rule is None else rule.weight_groups
            found[key] = _Weight(weight, True, True, groups, is_sparse_layer=True)
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        is_hidden = isinstance(module, torch.jit.ScriptModule)
        for other, held in _of_state_dict(dict(own), {}).items():
            is_checked = held.is_checked and is_hidden
            entry = held._replace(is_checked=is_checked, is_counted=False)
            found.setdefault(f"{prefix}{other}", entry)
            found[f"{prefix}{other}"] = found[f"{prefix}{other}"]._replace(owner=module)
    return found


def _outputs_first(weight: Tensor, groups: int) -> Tensor:
    """A transposed convolution's (Cin, Cout/groups, ...) as (Cout, Cin/groups, ...)."""
    return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)


def _of_state_dict(state: Mapping[str, Any], notes: Notes) -> dict[str, _Weight]:
    """In a state_dict an embedding's weight looks like that of a linear layer, and counts."""
    return {
        name: _Weight(
            value,
            value.dim() == 4,
            value.dim() == 4 or name.endswith("weight"),
            notes.get(name),
        )
        for name, value in state.items()
        if isinstance(value, Tensor) and value.dim() >= 2 and value.is_floating_point()
    }


def check_weight(name: str, weight: Tensor, groups: WeightGroups) -> LayerCheck:
    """Whether a weight (Cout, Cin/groups, ...) satisfies its pattern."""
    (n, m, group_order), nonzero = groups, whole(weight) != 0
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
    return LayerCheck(name, n, m, tuple(weight.shape), density, offence, group, inside)
