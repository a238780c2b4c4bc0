"""Host side of the Triton kernels that prune weights: a whole network in one or few launches."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import DTYPES, LANES, WARPS, Launch, Layout, collapse, layout_of, tile_of
from .prune_weight_triton import COLUMNS, _pair_kernel, _run_kernel
from .select_triton import sorting_network

ARRANGEMENTS = 256  # of weights in memory whose launches are kept
TABLES = 4096  # that are kept on the device, some hundred bytes each
OPERANDS = ("weight", "output", "grad_input", "mask", "gradient")
_TRITON = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


class Job(NamedTuple):
    """One weight (Cout, Cin/groups, kh, kw) and where its results go.

    Attributes:
        output, grad_input: S(W) and S(Wᵀ) in the compute dtype, strides of the weight, or None.
        mask: of S(W), bool, strides of the weight, or None.
        gradient: dtype and strides of the weight; gets λ(W − S(W)) added, and nothing else is
            written then.
    """

    weight: Tensor
    groups: int
    output: Tensor | None = None
    grad_input: Tensor | None = None
    mask: Tensor | None = None
    gradient: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The fields `OPERANDS`."""
        return self.weight, self.output, self.grad_input, self.mask, self.gradient


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


class Plan(NamedTuple):
    """A launch but for its tensors, which are those of the ``index``-th job."""

    work: Work
    index: int
    table: Tensor
    places: Tensor

    def launch(self, jobs: Sequence[Job], decay: float) -> Launch:
        """The launch for these jobs."""
        job = jobs[self.index]
        given = _chosen(job, self.work.operands)
        operands = (job.weight if t is None else _as_bytes(t) for t in given)
        arguments = (*operands, self.table, self.places, decay)
        return Launch(self.work.kernel, (len(self.places),), arguments, dict(self.work.constants))


_PLANS: dict[tuple[Hashable, ...], list[Plan]] = {}


def supports(weight: Tensor) -> str:
    """Why a weight cannot be pruned by these kernels; "" if it can."""
    if weight.dtype not in DTYPES:
        return f"dtype {weight.dtype}"
    if weight.dim() != 4 or not (
        weight.is_contiguous() or weight.is_contiguous(memory_format=torch.channels_last)
    ):
        return f"shape {tuple(weight.shape)} with strides {weight.stride()}"
    return ""


def prune(
    jobs: Sequence[Job],
    output: tuple[int, int] | None,
    grad_input: tuple[int, int] | None,
    decay: float = 0.0,
) -> None:
    """Prune all weights: ``output`` and ``grad_input`` are the (n, m) of S(W) and S(Wᵀ), or None.

    Raises:
        ValueError: a weight that `supports` names a reason against, or a result whose strides are
            not the weight's.
    """
    for launch in launches(jobs, output, grad_input, decay):
        launch.run()


def launches(
    jobs: Sequence[Job],
    output: tuple[int, int] | None,
    grad_input: tuple[int, int] | None,
    decay: float = 0.0,
) -> list[Launch]:
    """How `prune` runs: one launch for each kind of weight.

    What the host computes for them is kept for as long as tensors lie as before. While a CUDA graph
    is captured, an arrangement that is new takes one launch for each weight: a table of where they
    lie from each other cannot be copied to the device then.
    """
    key = (output, grad_input, *_arrangement(jobs))
    plans = _PLANS.get(key)
    if plans is None:
        capturing = jobs[0].weight.is_cuda and torch.cuda.is_current_stream_capturing()
        plans = _plan(jobs, output, grad_input, apart=capturing)
        if not capturing:
            _PLANS[key] = plans
            if len(_PLANS) > ARRANGEMENTS:
                del _PLANS[next(iter(_PLANS))]
    return [plan.launch(jobs, decay) for plan in plans]


def _arrangement(jobs: Sequence[Job]) -> Iterator[Hashable]:
    """All that plans depend on: kinds of tensors, and where they lie from the first of their kind.

    Addresses themselves do not count, so that a single weight's plan serves wherever it lies.
    """
    starts: list[int | None] = [None] * len(OPERANDS)
    yield jobs[0].weight.device
    for job in jobs:
        yield job.groups
        for place, tensor in enumerate(job.tensors()):
            if tensor is None:
                yield None
                continue
            address = 0 if tensor.is_meta else tensor.data_ptr()
            if starts[place] is None:
                starts[place] = address
            distance = address - starts[place]
            yield distance, address % 16, tensor.dtype, tensor.shape, tensor.stride()


def _plan(
    jobs: Sequence[Job],
    output: tuple[int, int] | None,
    grad_input: tuple[int, int] | None,
    *,
    apart: bool,
) -> list[Plan]:
    kinds: dict[tuple[Any, ...], list[tuple[int, Work]]] = {}
    for index, job in enumerate(jobs):
        _check(job)
        for work in _works(job, output, grad_input):
            alone = len(kinds) if apart else None
            kinds.setdefault((work.kernel, work.constants, alone), []).append((index, work))
    return [_planned(jobs, members) for members in kinds.values()]


def _planned(jobs: Sequence[Job], members: list[tuple[int, Work]]) -> Plan:
    index, first = members[0]
    device = jobs[index].weight.device
    align = dict(first.constants)["ALIGN"]
    tiles = []
    rows = []
    for other, work in members:
        distances = _distances(jobs[other], jobs[index], work, align)
        rows.append((*distances, *work.numbers))
        tiles.append(work.tiles)
        # what a later capture will look up
        _table(((*[0] * len(distances), *work.numbers),), device)
        _places((work.tiles,), device)
    places = _places(tuple(tiles), device)
    return Plan(first, index, _table(tuple(rows), device), places)


def _chosen(job: Job, operands: tuple[str | None, ...]) -> list[Tensor | None]:
    return [None if name is None else getattr(job, name) for name in operands]


def _distances(job: Job, first: Job, work: Work, align: int) -> list[int]:
    """How far the operands lie from those of the first job, in units of ``align`` elements."""
    pairs = zip(_chosen(job, work.operands), _chosen(first, work.operands), strict=True)
    return [
        0 if t is None or t.is_meta else (t.data_ptr() - f.data_ptr()) // (align * t.itemsize)
        for t, f in pairs
    ]


def _check(job: Job) -> None:
    reason = supports(job.weight)
    if reason:
        raise ValueError(f"weight cannot be pruned by the Triton kernels: {reason}.")
    for name, tensor in zip(Job._fields[2:], job.tensors()[1:], strict=True):
        if tensor is not None and tensor.stride() != job.weight.stride():
            raise ValueError(
                f"{name} has strides {tensor.stride()}, not those of the weight: "
                f"{job.weight.stride()}."
            )


def _works(
    job: Job, output: tuple[int, int] | None, grad_input: tuple[int, int] | None
) -> list[Work]:
    if job.gradient is not None:
        grad_input = None
    wanted = (job.output is not None or job.mask is not None or job.gradient is not None) and output
    also = job.grad_input is not None and grad_input
    sizes = {pattern[1] for pattern in (wanted, also) if pattern}
    if sizes and max(sizes) <= 4 and len(sizes) == 1 and sizes != {3}:
        return [_pair(job, wanted or (0, 0), also or (0, 0), sizes.pop())]
    runs = []
    if wanted:
        names = ("weight", "output", "mask", "gradient")
        runs.append(_run(job, names, layout_of(job.weight), 1, *wanted))
    if also:
        channels, rest = job.weight.shape[0], job.weight[0].numel()
        layout = Layout(1, channels, rest, 0, job.weight.stride(0), 1)
        names = ("weight", "grad_input", None, None)
        runs.append(_run(job, names, layout, job.groups, *also))
    return runs


def _pair(job: Job, output: tuple[int, int], grad_input: tuple[int, int], m: int) -> Work:
    weight = job.weight
    outputs, channels, height, width = weight.shape
    taps = height * width
    steps = (weight.stride(0), weight.stride(1), weight.stride(3) if taps > 1 else 1)
    flat = (steps[1] == 1 or channels == 1) and channels % m == 0
    flat = flat and channels % 4 == 0 and steps[0] % 4 == 0 and (taps == 1 or steps[2] % 4 == 0)
    flat = flat and _aligned(job.tensors())
    columns = 16 if flat else 64
    rows = LANES // columns
    align = 4 if flat else 1
    across = triton.cdiv(channels, m) * (1 if flat else taps)
    down = job.groups * triton.cdiv(outputs // job.groups, m) * (taps if flat else 1)
    constants = {
        "N_OUTPUT": output[0],
        "N_GRAD_INPUT": grad_input[0],
        "M": m,
        "LOG": m.bit_length() - 1 if flat else 0,
        "ROWS": rows,
        "COLUMNS": columns,
        "FLAT": flat,
        "ALIGN": align,
        "num_warps": WARPS,
        **_results(weight, job.output if job.output is not None else job.grad_input, m),
        "MASK": job.mask is not None,
        "WRITE": job.output is not None,
        "DECAY": job.gradient is not None,
    }
    numbers = (
        outputs,
        channels // align,
        taps,
        outputs // job.groups,
        steps[0] // align,
        steps[1],
        (steps[2] if taps > 1 else align) // align,
    )
    tiles = triton.cdiv(across, columns) * triton.cdiv(down, rows)
    return Work(_pair_kernel, tuple(constants.items()), OPERANDS, numbers, tiles)


def _run(
    job: Job,
    operands: tuple[str | None, ...],
    layout: Layout,
    groups: int,
    n: int,
    m: int,
) -> Work:
    weight, output, mask, gradient = _chosen(job, operands)
    (layout,) = collapse(layout)
    tile = tile_of(layout, layout, m, groups, weight.itemsize)
    flat = tile.flat and _aligned((weight, output, mask, gradient))
    tile = tile._replace(flat=flat, align=4 if flat else 1, log=tile.log if flat else 0)
    position_tiles, group_tiles = tile.grid(layout, m, groups)
    constants = {
        "N": n,
        **tile.constants(),
        **_results(weight, output, m),
        "M": m,
        "MASK": mask is not None,
        "WRITE": output is not None,
        "DECAY": gradient is not None,
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


def _results(weight: Tensor, result: Tensor | None, m: int) -> dict[str, Any]:
    return {
        "WEIGHT": _TRITON[weight.dtype],
        "RESULT": _TRITON[weight.dtype if result is None else result.dtype],
        "NETWORK": sorting_network(m),
    }


def _aligned(tensors: Sequence[Tensor | None]) -> bool:
    return all(t is None or t.is_meta or t.data_ptr() % 16 == 0 for t in tensors)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


@functools.lru_cache(maxsize=TABLES)
def _table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """One row for each weight: where its operands lie, and sizes."""
    if any(len(row) != COLUMNS for row in rows):
        raise ValueError(f"rows of {COLUMNS} numbers are needed, not {rows}.")
    return _copied(torch.tensor(rows, dtype=torch.int64), device)


@functools.lru_cache(maxsize=TABLES)
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
