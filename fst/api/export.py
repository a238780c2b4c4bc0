"""`export`: a model as a file that other programs read, checked by reading it back."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fst.api.difference import relative_difference
from fst.api.fold import fold
from fst.api.verify import check_records, check_weight
from fst.basics.sharding import LOAD, refuse_sharded
from fst.basics.text import counted_as, suggest
from fst.basics.values import check_has_values, check_integer
from fst.files.checkpoint import replacing
from fst.files.formats import FORMATS, Format
from fst.files.options import Inputs, Options
from fst.files.records import records_of
from fst.files.weights import read_stored
from fst.layers.modules import folded_to_another_class, sparse_layers
from fst.layers.table import LayerRow, LayerTable
from fst.rules.rule import WeightGroups

LARGEST_DIFFERENCE = 1e-3  # of an output, relative to its largest value
NOT_PRUNED = "not pruned to N:M"
SAMPLE = (
    "its first sample",
    "Give a batch, (N, ...), or dynamic_batch=False for inputs without one",
)
SIZE = ("it with 32 rows and 64 columns more", "dynamic=True needs a model that does")


@dataclass(frozen=True)
class ExportReport:
    """Report of `export`; ``str()`` is a table of the weights in the file, and the verdict.

    Attributes:
        weights: of the convolutions and linear layers, as they are in the file.
        difference: largest difference between an output of the file and the model's, relative to
            the largest value of that output; None where the file was not run.
        not_finite: values of the model's outputs that are infinite or NaN, as the file's are.
        optimised: the difference after the optimisations of the program that runs the file, if
            they make it large. Then the fault is the program's, and ``difference`` is without them.
        changed: layers of which the file has the plain kind, because their own would compute
            another weight from the folded one; "" if there are none.
        share: bytes of a compressed file, of those of the whole state_dict; 0 of other files.
    """

    path: str
    weights: tuple[LayerRow, ...]
    difference: float | None
    not_finite: int = 0
    optimised: float | None = None
    changed: str = ""
    share: float = 0.0

    def __str__(self) -> str:
        run = "it was not run"
        if self.difference is not None:
            run = f"its outputs differ by {self.difference:.1e} of their largest value"
        kept = Counter(w.pattern for w in self.weights if w.pattern)
        exempt = sum(w.is_exempt for w in self.weights)
        counts = [f"{counted_as(n, 'is', 'are')} {pattern}" for pattern, n in sorted(kept.items())]
        counts += [f"{exempt} exempt"] if exempt else []
        rest = len(self.weights) - kept.total() - exempt
        counts += [f"{rest} {NOT_PRUNED}"] if rest or not counts else []
        of = counted_as(len(self.weights), "weight", "weights")
        verdict = f"{self.path}: read back, of {of} {', '.join(counts)}; {run}"
        if self.share:
            verdict += f"; {self.share:.2f} of the bytes"
        if self.not_finite:
            verdict += f"; {self.not_finite} values of the model's own outputs are not finite"
        if self.optimised is not None:
            verdict += (
                f"\nonnxruntime's own optimisations change them by {self.optimised:.1e}: run the "
                "file with graph_optimization_level = ORT_DISABLE_ALL"
            )
        if self.changed:
            verdict += f"\nlayers of another kind than the model's: {self.changed}"
        return f"{LayerTable(self.weights).text()}\n\n{verdict}"


@torch.inference_mode(False)
def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_input: Tensor | Inputs | None = None,
    *,
    dynamic_batch: bool = True,
    dynamic: bool = False,
    opset: int | None = None,
    compressed: bool = False,
) -> ExportReport:
    """Write ``model`` in evaluation mode, folded, and check the file.

    Args:
        model: converted or not; it is left as it is.
        path: the format is its suffix's: .onnx, .pt2 (torch.export) or .safetensors (weights).
        example_input: one batch, (N, ...), or a tuple of several inputs; for .onnx and .pt2.
        dynamic_batch: the file takes any N, else that of ``example_input``; it is run on one
            sample too.
        dynamic: a file that computes takes inputs (N, C, H, W) of other heights and widths; it is
            run on one of 32 and 64 more too.
        opset: of an .onnx file, the version of its operators; None: what the exporter writes.
        compressed: a .safetensors file holds N:M weights as values and positions, for `fst.load`.

    Returns:
        The weights as they are in the file.

    Raises:
        ValueError: an unknown suffix, a folder that does not exist, no ``example_input`` where one
            is needed, or one of a type that the format cannot be compared in; an option that the
            format does not have, or an ``opset`` in which the exporter cannot write the model.
        TypeError: ``example_input`` is neither a tensor nor a tuple of tensors.
        ModuleNotFoundError: a package of the extra "export" is not installed.
        RuntimeError: a weight is not N:M, as its record says, or not finite; or the file does not
            hold the folded model: a weight is missing or is not zero where S(W) is, or the outputs
            differ. Nothing is left at ``path`` then.
    """
    path = Path(path)
    kind = format_of(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path={str(path)!r}: its folder does not exist.")
    refuse_sharded(model, "export", LOAD)
    options = Options(dynamic_batch, dynamic, opset, compressed)
    _check_options(options, kind, path)
    if kind.outputs is not None and example_input is None:
        raise ValueError(f"example_input=None: a {path.suffix} file needs a batch, (N, ...).")
    inputs = _several(example_input)
    check_has_values("model", {**dict(model.named_parameters()), **dict(model.named_buffers())})
    layers = sparse_layers(model)
    plain = (fold(model) if layers else copy.deepcopy(model)).eval().cpu()
    check_records(plain)
    inputs, others = _sizes(inputs, options)
    for what, other in others.items() if kind.outputs is not None else ():
        _check_computes(plain, other, *what)
    with replacing(path) as partial:
        kind.write(plain, inputs, options, partial)
        weights = _weights(plain, read_stored(partial).weights)
        compared = _compared(plain, kind, partial, [inputs, *others.values()])
        size = partial.stat().st_size
    changed = folded_to_another_class(layers.values())
    share = 0.0
    if compressed:
        share = size / sum(value.nbytes for value in plain.state_dict().values())
    return ExportReport(str(path), weights, *compared, changed=changed, share=share)


def _check_options(options: Options, kind: Format, path: Path) -> None:
    """Raise ValueError for an option that the format does not have, or no opset."""
    for name in ("dynamic", "opset", "compressed"):
        value = getattr(options, name)
        if value not in (None, False) and name not in kind.takes:
            able = " and ".join(suffix for suffix, other in FORMATS.items() if name in other.takes)
            raise ValueError(f"{name}={value!r}: only {able} files have it, not {path.suffix}.")
    if options.opset is not None:
        check_integer("opset", options.opset, 7)


def _sizes(inputs: Inputs, options: Options) -> tuple[Inputs, dict[tuple[str, str], Inputs]]:
    """The inputs to export with, and others that the file is to take: what they are -> inputs."""
    others = {}
    if options.dynamic_batch:  # torch.export takes a size of 1 for a constant
        if any(x.dim() == 0 for x in inputs):
            raise ValueError(
                "example_input: a tensor of no dimension; with dynamic_batch each must be a "
                "batch, (N, ...)."
            )
        inputs = tuple(torch.cat([x, x]) if len(x) == 1 else x for x in inputs)
        others[SAMPLE] = tuple(x[:1] for x in inputs)
    if options.dynamic:
        if all(x.dim() != 4 for x in inputs):
            raise ValueError("dynamic=True: no tensor of example_input is (N, C, H, W).")
        others[SIZE] = tuple(F.pad(x, (0, 64, 0, 32)) if x.dim() == 4 else x for x in inputs)
    return inputs, others


def format_of(path: Path) -> Format:
    """The kind of file that a suffix names.

    Raises:
        ValueError: it names none.
    """
    if path.suffix not in FORMATS:
        raise ValueError(
            f"path={str(path)!r}: the suffix {path.suffix!r} is unknown."
            f"{suggest(path.suffix, FORMATS)}"
        )
    return FORMATS[path.suffix]


@torch.no_grad()
def _check_computes(plain: nn.Module, inputs: Inputs, what: str, advice: str) -> None:
    """Raise ValueError if the model does not compute inputs that the file is to take.

    The exporter would say so on a page, or not at all.
    """
    try:
        plain(*inputs)
    except Exception as error:  # a model is code that can fail in any way
        raise ValueError(
            f"example_input: the model does not compute {what}, of shape {_shapes(inputs)}: "
            f"{error}. {advice}."
        ) from error


def _shapes(inputs: Inputs) -> str:
    return ", ".join(str(tuple(value.shape)) for value in inputs)


def _several(example_input: Tensor | Inputs | None) -> Inputs:
    if example_input is None:
        return ()
    inputs = (example_input,) if isinstance(example_input, Tensor) else example_input
    if not isinstance(inputs, tuple | list) or not all(isinstance(x, Tensor) for x in inputs):
        kinds = type(inputs).__name__
        if isinstance(inputs, tuple | list):
            kinds += f" of {', '.join(type(x).__name__ for x in inputs)}"
        raise TypeError(f"example_input is a {kinds}; it must be a tensor, or a tuple of tensors.")
    # a copy: exporters refuse tensors of inference mode
    return tuple(value.detach().cpu().clone() for value in inputs)


def _weights(plain: nn.Module, stored: dict[str, Tensor]) -> tuple[LayerRow, ...]:
    """The weights in the file, those of converted layers checked."""
    found, records = [], records_of(plain)
    for name, module in plain.named_modules():
        if not isinstance(module, nn.Conv2d | nn.Linear):
            continue
        key = f"{name}.weight" if name else "weight"
        folded = module.weight.detach()
        weight = stored.get(key)
        if weight is None or weight.shape != folded.shape:
            if key in records:
                raise RuntimeError(f"the file does not hold the weight {key!r}.")
            continue  # computed from others, and folded into them by the exporter
        grown = int(((weight != 0) & (folded == 0)).sum()) if key in records else 0
        if grown:  # batch norm may be multiplied into it, so values may differ, but no zero
            raise RuntimeError(f"the file's weight {key!r} has {grown} elements that S(W) prunes.")
        groups = records.get(key)
        check = check_weight(key, weight, groups or WeightGroups(2, 4, "channel"))
        if groups is None:
            check = replace(check, groups=None, offence=None, reason=NOT_PRUNED)
        if not check.ok:
            raise RuntimeError(f"the file's weight {key!r} is {check.label}: {check.offence}.")
        found.append(check)
    return tuple(found)


@torch.no_grad()
def _compared(
    plain: nn.Module, kind: Format, path: Path, batches: Sequence[Inputs]
) -> tuple[float | None, int, float | None]:
    """``difference``, ``not_finite`` and ``optimised`` of the report, over all batches.

    Raises:
        RuntimeError: the file cannot be run, or differs.
    """
    if kind.outputs is None:
        return None, 0, None
    differences, not_finite, optimised = [0.0], 0, [0.0]
    for inputs in batches:
        where = f"on a batch of {_shapes(inputs)}"
        expected = [v for v in pytree.tree_leaves(plain(*inputs)) if v is not None]
        found = _differences(kind.outputs, path, inputs, expected, where)
        if found is None:
            return None, 0, None
        if not max(found) <= LARGEST_DIFFERENCE and kind.unoptimised is not None:
            literal = _differences(kind.unoptimised, path, inputs, expected, where)
            if literal is not None and max(literal) <= LARGEST_DIFFERENCE:
                optimised += found
                found = literal
        for index, difference in enumerate(found):
            if not difference <= LARGEST_DIFFERENCE:
                raise RuntimeError(
                    f"the file's outputs differ from the model's: output {index} by "
                    f"{difference:.1e} of its largest value, {where}."
                )
        differences += found
        not_finite += sum(int((~v.isfinite()).sum()) for v in expected if isinstance(v, Tensor))
    return max(differences), not_finite, max(optimised) or None


def _differences(
    run: Callable[[Path, Inputs], list[Any] | None],
    path: Path,
    inputs: Inputs,
    expected: Sequence[object],
    where: str,
) -> list[float] | None:
    """Of each output of the file, from what is ``expected``; None where it cannot be run here."""
    try:
        outputs = run(path, inputs)
    except Exception as error:  # of the many kinds of the programs that run files
        raise RuntimeError(f"the file cannot be run {where}: {error}") from error
    if outputs is None:
        return None
    found = [value for value in outputs if value is not None]
    if len(found) != len(expected):
        raise RuntimeError(
            f"the file has {len(found)} outputs {where}, the model {len(expected)}: "
            f"{', '.join(type(value).__name__ for value in expected)}."
        )
    return [relative_difference(*pair) for pair in zip(found, expected, strict=True)]
