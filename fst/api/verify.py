"""Does a model, a state_dict or a checkpoint satisfy an N:M pattern?"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fst.api.targets import Weight, target_of
from fst.basics.errors import UsageError
from fst.basics.selectors import Selector, selected
from fst.basics.sharding import whole
from fst.basics.text import counted_as
from fst.basics.values import check_has_values, check_number, one_of
from fst.files.records import records_of
from fst.layers.coverage import NOT_CALLED, multiply_adds
from fst.layers.modules import SparseLayer
from fst.layers.table import LayerRow, LayerTable
from fst.rules.masks import check_pattern
from fst.rules.nm import GROUP_ORDERS
from fst.rules.rule import WeightGroups

Selectors = Selector | Iterable[Selector] | None


@dataclass(frozen=True)
class VerifyReport:
    """Result of `verify`; ``str()`` is two tables and the verdict.

    Attributes:
        covered: all weights of convolutions and linear layers, and the others that were checked.
        min_coverage: the least `coverage` of an ok report.
        not_pruned: how many of them were not converted, so not checked, where the target says which
            ones were.
        unread: why the values of some could not be checked, by their names.
        lost: weights that must be N:M by the file's metadata, and are not in it by these names;
            empty where `include` or `exclude` say what to check.
        others: state_dicts beside the checked one.
    """

    covered: LayerTable
    min_coverage: float = 0.0
    not_pruned: int = 0
    unread: Mapping[str, str] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[LayerRow, ...]:
        """The weights that were checked, each against its pattern."""
        return tuple(r for r in self.covered.rows if r.is_checked and r.name not in self.unread)

    @property
    def not_checked(self) -> int:
        """Number of weights not checked for other reasons: `exclude`, or not asked for."""
        counted = len(self.layers) + len(self.unread) + self.not_pruned
        return len(self.covered.rows) - counted

    @property
    def pattern(self) -> str:
        """The "N:M" of the checked weights; where they differ, all of them: "1:4, 2:4"."""
        return ", ".join(_by_pattern(self.layers))

    @property
    def coverage(self) -> float:
        """Share of the convolutions' and linear layers' weights in full N:M groups, 0 to 1."""
        return self.covered.parameters

    @property
    def ok(self) -> bool:
        """True if every checked weight has its pattern, and enough of the model was checked."""
        is_kept = all(row.ok for row in self.layers) and not self.unread and not self.lost
        return is_kept and self.coverage >= self.min_coverage

    def __str__(self) -> str:
        return f"{LayerTable(self.layers).text()}\n\n{self.covered}\n\n{self._verdict()}"

    def _verdict(self) -> str:
        short = [row.groups.m for row in self.layers if row.groups and row.ok and row.is_exempt]
        bad = _by_pattern(row for row in self.layers if not row.ok)
        kept = _by_pattern(row for row in self.layers if row.ok and not row.is_exempt)
        parts = [f"{number} not {pattern}" for pattern, number in bad.items()]
        for pattern, number in (kept or {self.pattern: 0}).items():
            parts.append(f"{counted_as(number, 'weight is', 'weights are')} {pattern}")
        if short:
            sizes = " or ".join(map(str, sorted(set(short))))
            parts.append(f"{len(short)} exempt (groups of fewer than {sizes})")
        parts += [f"{n} {reason}" for reason, n in Counter(self.unread.values()).items()]
        if self.not_pruned:
            parts.append(f"{self.not_pruned} not pruned")
        if self.not_checked:
            parts.append(f"{self.not_checked} not checked")
        verdict = f"{', '.join(parts)}; coverage {self.coverage:.1%}"
        if self.coverage < self.min_coverage:
            verdict += f", less than min_coverage={self.min_coverage}"
        if not kept and not bad:
            verdict += f"; no group of {self.pattern or 'N:M'} was there to check"
        if self.lost:
            verdict += (
                f"\nnot in the file, whose metadata say that they are N:M: {', '.join(self.lost)}. "
                "A tool renamed them: say what to check (include, exclude)"
            )
        if self.others:
            verdict += f"\nnot checked: the file's other weights, {', '.join(self.others)}"
        return verdict


def _by_pattern(rows: Iterable[LayerRow]) -> dict[str, int]:
    """ "N:M" -> how many of the weights should have it; small groups first."""
    found = Counter((row.groups.m, row.groups.n) for row in rows if row.groups is not None)
    return {f"{n}:{m}": number for (m, n), number in sorted(found.items())}


def verify(
    target: nn.Module | Mapping[str, Any] | str | os.PathLike[str],
    n: int | None = None,
    m: int | None = None,
    *,
    group_order: str | None = None,
    include: Selectors = None,
    exclude: Selectors = None,
    min_coverage: float = 0.0,
    example_input: Tensor | tuple[Any, ...] | None = None,
) -> VerifyReport:
    """Check that every group of m consecutive weights has at most n non-zero ones.

    The report also says which share of the model obeys the pattern (coverage). Nobody can use the
    zeros of groups shorter than m (depthwise layers, images). A weight of such groups is exempt and
    not covered; it has an offence if one of its groups has more than n non-zero values. ``include``
    and ``exclude`` choose the weights to check. The coverage counts all convolutions and linear
    layers. Weights that a tool has quantised or reordered are not checked, and the report is not ok
    unless ``exclude`` names them: verify the model before that.

    A converted model, a folded model, its state_dict, and the files of `fst fold` and `fst.export`
    know which weights were converted to N:M: these weights are checked. Of other targets all
    convolution weights are checked (4-D; of a state_dict all 4-D tensors). With ``include`` the
    weights that it selects are checked. In an .onnx file the nodes say which tensors are weights,
    and along which axis they are summed.

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
    weights, stored = target_of(target)
    check_has_values("target", {name: weight.values for name, weight in weights.items()})
    counted: dict[str, int] = {}
    if example_input is not None:
        if not isinstance(target, nn.Module):
            raise ValueError("example_input needs a model as target: weights alone cannot run.")
        counted = multiply_adds(target, example_input)
    knows = any(weight.groups is not None for weight in weights.values())
    chosen = _chosen(weights, knows and not stored.lost, include, exclude)
    rows = []
    for name, weight in weights.items():
        if name in chosen or weight.is_counted:
            own = weight.groups or WeightGroups(2, 4, "channel")
            groups = WeightGroups(*(given or own[:2]), group_order or own.group_order)
            row = _row(name, weight, groups, counted.get(name))
            rows.append(replace(row, is_checked=name in chosen))
    counts = {k: w for k, w in weights.items() if w.is_counted and k not in chosen}
    unpruned = sum(w.groups is None and not w.unread for w in counts.values())
    return VerifyReport(
        LayerTable(tuple(rows)),
        min_coverage,
        unpruned if knows else 0,
        {name: weights[name].unread for name in chosen if weights[name].unread},
        stored.lost if include is None and exclude is None else (),
        stored.others,
    )


def _chosen(
    weights: Mapping[str, Weight], known: bool, include: Selectors, exclude: Selectors
) -> list[str]:
    """The names of the weights to check: where it is ``known``, those that were converted to N:M.

    Raises:
        ValueError: there are none, or none that can be checked.
    """
    layers = {k: w.owner for k, w in weights.items() if w.is_counted}
    others = {k: w.owner for k, w in weights.items() if not w.is_counted}
    chosen = {
        name
        for name, w in weights.items()
        if w.unread or w.groups is not None or (w.is_checked and not known)
    }
    if include is not None:
        chosen = selected("include", include, layers, "weight", others=others)
    if exclude is not None:
        chosen -= selected("exclude", exclude, layers, "weight", others=others)
    if all(weights[name].unread for name in chosen):
        reasons = {weights[name].unread.partition(",")[0] for name in chosen}
        names = ", ".join(name for name in weights if name in chosen)
        raise ValueError(
            f"target: the weights {names} are {' or '.join(sorted(reasons))}: verify the model "
            "before that."
            if chosen
            else "target has no convolution weight to verify; name others with include."
        )
    return [name for name in weights if name in chosen]


def _row(name: str, weight: Weight, groups: WeightGroups, macs: int | None) -> LayerRow:
    if weight.unread:
        row = LayerRow(name, tuple(weight.values.shape), reason=weight.unread)
    else:
        row = check_weight(name, weight.values, groups)
    if isinstance(weight.owner, SparseLayer) and macs == 0:
        row = replace(row, reason=NOT_CALLED)
    return replace(row, multiply_adds=macs)


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


def check_weight(name: str, weight: Tensor, groups: WeightGroups) -> LayerRow:
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
    return LayerRow(name, tuple(weight.shape), groups, density=density, offence=offence)
