"""Does a model, a state_dict or a checkpoint satisfy an N:M pattern?"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.parameter import UninitializedParameter

from fst.basics.errors import UsageError
from fst.basics.selectors import Selector, selected
from fst.basics.sharding import whole
from fst.basics.text import counted_as
from fst.basics.values import check_has_values, check_number, one_of
from fst.files.checkpoint import state_dict_of
from fst.files.records import Records, records_in, records_of
from fst.files.weights import packed_weights, read_stored
from fst.layers.coverage import (
    NOT_CALLED,
    Coverage,
    CoveredWeight,
    gemm_weights,
    multiply_adds,
)
from fst.layers.modules import SparseLayer
from fst.rules.masks import check_pattern
from fst.rules.nm import GROUP_ORDERS
from fst.rules.rule import WeightGroups

QUANTISED = "quantised, not checked"


@dataclass(frozen=True)
class VerifyReport:
    """Result of `verify`; ``str()`` is two tables and the verdict.

    Attributes:
        covered: all weights of convolutions and linear layers, and the others that were checked.
        min_coverage: the least `coverage` of an ok report.
        not_pruned: how many of them were not converted, so not checked, where the target says which
            ones were.
    """

    covered: Coverage
    min_coverage: float = 0.0
    not_pruned: int = 0

    @property
    def layers(self) -> tuple[CoveredWeight, ...]:
        """The weights that were checked, each against its pattern."""
        return tuple(w for w in self.covered.weights if w.is_checked and w.reason != QUANTISED)

    @property
    def quantised(self) -> tuple[str, ...]:
        """Names of the quantised weights that should have been checked, and were not."""
        return tuple(w.name for w in self.covered.weights if w.is_checked and w.reason == QUANTISED)

    @property
    def not_checked(self) -> int:
        """Number of weights not checked for other reasons: `exclude`, or not asked for."""
        counted = len(self.layers) + len(self.quantised) + self.not_pruned
        return len(self.covered.weights) - counted

    @property
    def pattern(self) -> str:
        """The "N:M" of the checked weights; where they differ, all of them: "1:4, 2:4"."""
        found = {(w.groups.m, w.groups.n) for w in self.layers if w.groups is not None}
        return ", ".join(f"{n}:{m}" for m, n in sorted(found))

    @property
    def coverage(self) -> float:
        """Share of the convolutions' and linear layers' weights in full N:M groups, 0 to 1."""
        return self.covered.parameters

    @property
    def ok(self) -> bool:
        """True if every checked weight has its pattern, and enough of the model was checked."""
        is_kept = all(w.ok for w in self.layers) and not self.quantised
        return is_kept and self.coverage >= self.min_coverage

    def __str__(self) -> str:
        return f"{Coverage(self.layers).by_weight()}\n\n{self.covered}\n\n{self._verdict()}"

    def _verdict(self) -> str:
        short = [w.groups.m for w in self.layers if w.groups and w.ok and w.is_exempt]
        bad = sum(not w.ok for w in self.layers)
        kept = len(self.layers) - len(short) - bad
        parts = [f"{counted_as(kept, 'weight is', 'weights are')} {self.pattern}"]
        if bad:
            parts.insert(0, f"{bad} not {self.pattern}")
        if short:
            sizes = ", ".join(map(str, sorted(set(short))))
            parts.append(f"{len(short)} exempt (groups of fewer than {sizes})")
        if self.quantised:
            parts.append(f"{len(self.quantised)} {QUANTISED}")
        if self.not_pruned:
            parts.append(f"{self.not_pruned} not pruned")
        if self.not_checked:
            parts.append(f"{self.not_checked} not checked")
        verdict = f"{', '.join(parts)}; coverage {self.coverage:.1%}"
        if self.coverage < self.min_coverage:
            verdict += f", less than min_coverage={self.min_coverage}"
        if not kept and not bad:
            verdict += f"; no group of {self.pattern or 'N:M'} was there to check"
        return verdict


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
    layers. Quantised weights are not checked, and the report is not ok unless ``exclude`` names
    them: verify the model before it is quantised.

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
            if found.is_quantised or (found.groups is not None if known else found.is_checked)
        }
    if exclude is not None:
        excluded = selected("exclude", exclude, layers, "weight", others=others)
        weights = {k: found for k, found in weights.items() if k not in excluded}
    if all(found.is_quantised for found in weights.values()):
        names = ", ".join(weights)
        raise ValueError(
            f"target: the weights {names} are quantised: verify the model before that."
            if weights
            else "target has no convolution weight to verify; name others with include."
        )
    covered = []
    for name, found in everything.items():
        is_checked = name in weights
        if not is_checked and not found.is_counted:
            continue
        own = found.groups or WeightGroups(2, 4, "channel")
        groups = WeightGroups(*(given or own[:2]), group_order or own.group_order)
        if found.is_quantised:
            row = CoveredWeight(name, tuple(found.weight.shape), reason=QUANTISED)
        else:
            row = check_weight(name, found.weight, groups)
        if found.is_sparse_layer and counted.get(name) == 0:
            row = replace(row, reason=NOT_CALLED)
        covered.append(replace(row, is_checked=is_checked, multiply_adds=counted.get(name)))
    rest = [found for k, found in everything.items() if found.is_counted and k not in weights]
    unpruned = [found for found in rest if found.groups is None and not found.is_quantised]
    return VerifyReport(Coverage(tuple(covered)), min_coverage, len(unpruned) if known else 0)


class _Weight(NamedTuple):
    """A weight, and what it is.

    Attributes:
        is_checked: where nobody knows what was converted.
        is_counted: that of a convolution or linear layer, as far as its name and shape tell.
        groups: the N:M that it was converted to.
        owner: its layer, where there is a model.
        is_sparse_layer: that of a converted layer, pruned as in a call of the layer.
        is_quantised: its values are no floating-point numbers.
    """

    weight: Tensor
    is_checked: bool
    is_counted: bool
    groups: WeightGroups | None = None
    owner: nn.Module | None = None
    is_sparse_layer: bool = False
    is_quantised: bool = False


def _weights(target: object) -> dict[str, _Weight]:
    if isinstance(target, nn.Module):
        return _of_model(target)
    if isinstance(target, Mapping):
        state = state_dict_of(target, "target") | packed_weights(target)
        return _of_state_dict(state, records_in(target, "target"))
    if isinstance(target, str | os.PathLike):
        return _of_state_dict(*read_stored(target))
    raise TypeError(
        f"target is a {type(target).__name__}; it must be a module, a state_dict or a path."
    )


def _of_model(model: nn.Module) -> dict[str, _Weight]:
    """Return the weights of its layers, and its other tensors; each module by one name.

    The others are not checked by default, but where torch.jit hides what layers they belong to.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"target: {name!r} has no shape yet: run the model once, so that its lazy layers "
                "know theirs."
            )
    records = records_of(model)
    found = {
        name: _Weight(w, w.dim() == 4, True, records.get(name), is_quantised=_is_integer(w))
        for name, w in gemm_weights(model).items()
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
        if _is_quantised_layer(module):
            weight = module.weight()
            found[key] = _Weight(weight, weight.dim() == 4, True, is_quantised=_is_integer(weight))
            found[key] = found[key]._replace(owner=module)
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        is_hidden = isinstance(module, torch.jit.ScriptModule)
        for other, held in _of_state_dict(dict(own), {}).items():
            is_checked = held.is_checked and is_hidden
            entry = held._replace(is_checked=is_checked, is_counted=False, is_quantised=False)
            found.setdefault(f"{prefix}{other}", entry)
            found[f"{prefix}{other}"] = found[f"{prefix}{other}"]._replace(owner=module)
    return found


def _outputs_first(weight: Tensor, groups: int) -> Tensor:
    """A transposed convolution's (Cin, Cout/groups, ...) as (Cout, Cin/groups, ...)."""
    return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)


def _is_quantised_layer(module: nn.Module) -> bool:
    """True for torch.ao's convolutions and linear layers, whose weight is a method."""
    is_known = type(module).__module__.startswith("torch.ao.nn.")
    is_gemm = hasattr(module, "out_channels") or hasattr(module, "out_features")
    return is_known and is_gemm and callable(module.weight)


def _is_integer(weight: Tensor) -> bool:
    """True for quantised values: an integer there stands for a number, and 0 need not mean zero."""
    return not (weight.is_floating_point() or weight.is_complex() or weight.dtype == torch.bool)


def _of_state_dict(state: Mapping[str, Any], records: Records) -> dict[str, _Weight]:
    """In a state_dict an embedding's weight looks like that of a linear layer, and counts."""
    found = {}
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.dim() < 2:
            continue
        is_quantised = _is_integer(value) and "weight" in name.rpartition(".")[2]
        if value.is_floating_point() or is_quantised:
            is_conv = value.dim() == 4
            is_counted = is_conv or is_quantised or name.endswith("weight")
            groups = records.get(name)
            found[name] = _Weight(value, is_conv, is_counted, groups, is_quantised=is_quantised)
    return found


def check_records(model: nn.Module) -> None:
    """Check that the folded weights of a model are what their records say.

    Raises:
        RuntimeError: one is not: it was trained or loaded since.
    """
    weights = dict(model.named_parameters())
    for name, groups in records_of(model).items():
        if groups is None or name not in weights:
            continue
        check = check_weight(name, weights[name].detach(), groups)
        if not check.ok:
            raise UsageError(
                f"weight {name!r} is {check.label}: {check.offence}. Its record says "
                f"{groups.n}:{groups.m}: fst.hold keeps the zeros of a folded model that trains on."
            )


def check_weight(name: str, weight: Tensor, groups: WeightGroups) -> CoveredWeight:
    """Check a weight (Cout, Cin/groups, ...) against its pattern."""
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
    elif not_finite := int((~whole(weight).isfinite()).sum()):
        offence = f"{counted_as(not_finite, 'value is', 'values are')} not finite"
    density = float(nonzero.double().mean())
    return CoveredWeight(name, tuple(weight.shape), groups, density=density, offence=offence)
