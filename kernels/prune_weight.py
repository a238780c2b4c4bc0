"""Host side of the Triton kernels that prune weights: many in one or few launches."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import LANES, WARPS, Launch, Layout, collapse, strided_layout, tile_of
from .prune_weight_triton import _pair_kernel, _run_kernel
from .select_triton import sorting_network

KINDS = 4096  # of weights whose works, and tables of some hundred bytes on the device, are kept
OPERANDS = ("weight", "output", "grad_input", "mask")
Pattern = tuple[int, int]
_TRITON = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


class Job(NamedTuple):
    """One weight (Cout, Cin/groups, kh, kw), contiguous or channels_last, and its results.

    Attributes:
        output, grad_input: S(W) and S(Wᵀ) in the compute dtype, strides of the weight, or None.
        mask: of S(W), bool, strides of the weight, or None.
    """

    weight: Tensor
    groups: int
    output: Tensor | None = None
    grad_input: Tensor | None = None
    mask: Tensor | None = None


class Kind(NamedTuple):
    """All that a job's works depend on.

    Attributes:
        written: the results that it has.
        aligned: whether its tensors lie at multiples of 16 bytes.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    groups: int
    weight: torch.dtype
    result: torch.dtype
    written: frozenset[str]
    aligned: bool
    device: torch.device


class Work(NamedTuple):
    """One weight's part in a launch.

    Attributes:
        kernel, constants: works that have these in common share a launch.
        operands: fields of `Job` in the order of the kernel's arguments; None where it needs none.
        numbers: the sizes of its row of the table.
        tiles: how many programs it needs.
    """

    kernel: Any
    constants: tuple[tuple[str, Any], ...]
    operands: tuple[str | None, ...]
    numbers: tuple[int, ...]
    tiles: int


def prune(jobs: Sequence[Job], output: Pattern | None, grad_input: Pattern | None) -> None:
    """Prune all weights; ``output`` and ``grad_input`` are (n, m) of S(W) and S(Wᵀ), or None."""
    for launch in launches(jobs, output, grad_input):
        launch.run()


def planned(job: Job, output: Pattern | None, grad_input: Pattern | None) -> Callable[[Job], None]:
    """`prune` of one weight, for jobs of the kind of this one, of which it keeps no tensor.

    Results lie at multiples of 16 bytes, as memory does that was allocated for them.
    """
    kind = _kind(job)
    places = {name: OPERANDS.index(name) for name in ("weight", *kind.written)}
    parts = [
        (
            operator.itemgetter(*(places.get(name, 0) for name in work.operands)),
            _launch([(job, work)]).on_others(len(work.operands)),
        )
        for work in _works(kind, output, grad_input)
    ]

    def run(job: Job) -> None:
        if kind.aligned and job.weight.data_ptr() % 16:
            prune([job], output, grad_input)
            return
        mask = None if job.mask is None else job.mask.view(torch.uint8)
        operands = job.weight, job.output, job.grad_input, mask
        for used, launch in parts:
            launch(*used(operands))

    return run


def launches(
    jobs: Sequence[Job], output: Pattern | None, grad_input: Pattern | None
) -> list[Launch]:
    """Return the launches of `prune`, one for each kind of weight.

    While a CUDA graph is captured, one for each weight: a table of where several lie from each
    other cannot be copied to the device then.
    """
    capturing = jobs[0].weight.is_cuda and torch.cuda.is_current_stream_capturing()
    together: dict[tuple[Any, ...], list[tuple[Job, Work]]] = {}
    for job in jobs:
        for work in _works(_kind(job), output, grad_input):
            alone = len(together) if capturing else None
            together.setdefault((work.kernel, work.constants, alone), []).append((job, work))
    return [_launch(members) for members in together.values()]


def _kind(job: Job) -> Kind:
    weight = job.weight
    results = {name: getattr(job, name) for name in OPERANDS[1:]}
    written = {name: tensor for name, tensor in results.items() if tensor is not None}
    result = written.get("output", written.get("grad_input", weight))
    return Kind(
        tuple(weight.shape),
        weight.stride(),
        job.groups,
        weight.dtype,
        result.dtype,
        frozenset(written),
        all(t.is_meta or t.data_ptr() % 16 == 0 for t in (weight, *written.values())),
        weight.device,
    )


def _launch(members: Sequence[tuple[Job, Work]]) -> Launch:
    first, work = members[0]
    device = first.weight.device
    align = dict(work.constants)["ALIGN"]
    rows = [(*_distances(job, first, each, align), *each.numbers) for job, each in members]
    table = _row(rows[0], device) if len(rows) == 1 else _copied(torch.tensor(rows), device)
    places = _places(tuple(each.tiles for _, each in members), device)
    given = (_operand(first, name) for name in work.operands)
    operands = (first.weight if t is None else _as_bytes(t) for t in given)
    return Launch(work.kernel, (len(places),), (*operands, table, places), dict(work.constants))


def _operand(job: Job, name: str | None) -> Tensor | None:
    return None if name is None else getattr(job, name)


def _distances(job: Job, first: Job, work: Work, align: int) -> list[int]:
    """Return the offsets of the operands from the first job's, in units of ``align`` elements."""
    pairs = ((_operand(job, name), _operand(first, name)) for name in work.operands)
    return [
        0 if t is None or t.is_meta else (t.data_ptr() - f.data_ptr()) // (align * t.itemsize)
        for t, f in pairs
    ]


@functools.lru_cache(maxsize=KINDS)
def _works(kind: Kind, output: Pattern | None, grad_input: Pattern | None) -> tuple[Work, ...]:
    works = _planned(kind, output, grad_input)
    for work in works:  # tables that a later capture, in which nothing can be copied, will look up
        _row((*[0] * len(work.operands), *work.numbers), kind.device)
        _places((work.tiles,), kind.device)
    return works


def _planned(kind: Kind, output: Pattern | None, grad_input: Pattern | None) -> tuple[Work, ...]:
    wanted = output if kind.written & {"output", "mask"} else None
    also = grad_input if "grad_input" in kind.written else None
    sizes = {pattern[1] for pattern in (wanted, also) if pattern}
    if sizes and max(sizes) <= 4 and len(sizes) == 1 and sizes != {3}:
        return (_pair(kind, wanted or (0, 0), also or (0, 0), sizes.pop()),)
    runs = []
    if wanted:
        names = ("weight", "output", "mask")
        runs.append(_run(kind, names, strided_layout(kind.shape, kind.strides), 1, *wanted))
    if also:
        rest = math.prod(kind.shape[1:])
        across = Layout(1, kind.shape[0], rest, 0, kind.strides[0], 1)
        runs.append(_run(kind, ("weight", "grad_input", None), across, kind.groups, *also))
    return tuple(runs)


def _pair(kind: Kind, output: Pattern, grad_input: Pattern, m: int) -> Work:
    outputs, channels, height, width = kind.shape
    taps = height * width
    steps = (kind.strides[0], kind.strides[1], kind.strides[3] if taps > 1 else 1)
    flat = (steps[1] == 1 or channels == 1) and channels % m == 0 and kind.aligned
    flat = flat and channels % 4 == 0 and steps[0] % 4 == 0 and (taps == 1 or steps[2] % 4 == 0)
    columns = 16 if flat else 64
    rows = LANES // columns
    align = 4 if flat else 1
    across = triton.cdiv(channels, m) * (1 if flat else taps)
    down = kind.groups * triton.cdiv(outputs // kind.groups, m) * (taps if flat else 1)
    constants = {
        "N_OUTPUT": output[0],
        "N_GRAD_INPUT": grad_input[0],
        "LOG": m.bit_length() - 1 if flat else 0,
        "ROWS": rows,
        "COLUMNS": columns,
        "FLAT": flat,
        "ALIGN": align,
        "num_warps": WARPS,
        **_common(kind, m),
    }
    numbers = (
        outputs,
        channels // align,
        taps,
        outputs // kind.groups,
        steps[0] // align,
        steps[1],
        (steps[2] if taps > 1 else align) // align,
    )
    tiles = triton.cdiv(across, columns) * triton.cdiv(down, rows)
    return Work(_pair_kernel, tuple(constants.items()), OPERANDS, numbers, tiles)


def _run(
    kind: Kind, operands: tuple[str | None, ...], layout: Layout, groups: int, n: int, m: int
) -> Work:
    (layout,) = collapse(layout)
    tile = tile_of(layout, layout, m, groups, kind.weight.itemsize)
    flat = tile.flat and kind.aligned
    tile = tile._replace(flat=flat, align=4 if flat else 1, log=tile.log if flat else 0)
    position_tiles, group_tiles = tile.grid(layout, m, groups)
    constants = {
        "N": n,
        **tile.constants(),
        **_common(kind, m),
        "MASK": "mask" in operands and "mask" in kind.written,
        "WRITE": operands[1] in kind.written,
    }
    numbers = (
        layout.positions,
        layout.channels,
        layout.channels // groups,
        layout.sample,
        layout.channel,
        layout.position // tile.align if tile.flat else layout.position,
        position_tiles,
        group_tiles,
    )
    tiles = layout.samples * position_tiles * group_tiles
    return Work(_run_kernel, tuple(constants.items()), operands, numbers, tiles)


def _common(kind: Kind, m: int) -> dict[str, Any]:
    return {
        "M": m,
        "NETWORK": sorting_network(m),
        "WEIGHT": _TRITON[kind.weight],
        "RESULT": _TRITON[kind.result],
        "MASK": "mask" in kind.written,
        "WRITE": "output" in kind.written,
    }


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


@functools.lru_cache(maxsize=KINDS)
def _row(row: tuple[int, ...], device: torch.device) -> Tensor:
    """The table of one weight."""
    return _copied(torch.tensor([row]), device)


@functools.lru_cache(maxsize=KINDS)
def _places(tiles: tuple[int, ...], device: torch.device) -> Tensor:
    """For each program: its row of the table, and which of that weight's tiles it handles."""
    counts = torch.tensor(tiles)
    entry = torch.repeat_interleave(torch.arange(len(tiles)), counts)
    first = torch.cumsum(counts, 0) - counts
    local = torch.arange(len(entry)) - first[entry]
    return _copied(torch.stack([entry, local], 1).contiguous(), device)


def _copied(table: Tensor, device: torch.device) -> Tensor:
    """On the device, without a host synchronisation."""
    source = table.pin_memory() if device.type == "cuda" else table
    return source.to(device, non_blocking=True)
