"""Host side of the Triton kernels that prune weights: a whole network in one or few launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import DTYPES, LANES, WARPS, Launch, Layout, collapse, layout_of, tile_of
from .prune_weight_triton import COLUMNS, _pair_kernel, _run_kernel
from .select_triton import sorting_network

TABLES = 4096  # that are kept on the device, some hundred bytes each
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
        """In the order of the table's first columns."""
        return self.weight, self.output, self.grad_input, self.mask, self.gradient


class Work(NamedTuple):
    """One weight's part in a launch.

    Attributes:
        kernel, constants: works that have these in common share a launch.
        tensors: operands in the order of the kernel's arguments; None where there is none.
        numbers: the sizes of its row of the table.
        tiles: how many programs it needs.
    """

    kernel: Any
    constants: tuple[tuple[str, Any], ...]
    tensors: tuple[Tensor | None, ...]
    numbers: tuple[int, ...]
    tiles: int


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

    While a CUDA graph is captured, one for each weight: where tensors lie from each other is new
    then, and a table of that cannot be copied to the device.
    """
    kinds: dict[tuple[Any, ...], list[Work]] = {}
    for job in jobs:
        _check(job)
        for work in _works(job, output, grad_input):
            alone = len(kinds) if _capturing(job.weight) else None
            kinds.setdefault((work.kernel, work.constants, alone), []).append(work)
    return [_launch(works, decay) for works in kinds.values()]


def _capturing(weight: Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def _launch(works: list[Work], decay: float) -> Launch:
    first = works[0]
    device = first.tensors[0].device
    align = dict(first.constants)["ALIGN"]
    rows = tuple((*_distances(work, first, align), *work.numbers) for work in works)
    table, places = _tables(rows, tuple(work.tiles for work in works), device)
    for work in works:  # what a later capture will look up
        _tables(((*_distances(work, work, align), *work.numbers),), (work.tiles,), device)
    operands = (first.tensors[0] if t is None else t for t in first.tensors)
    arguments = (*operands, table, places, decay)
    return Launch(first.kernel, (len(places),), arguments, dict(first.constants))


def _distances(work: Work, first: Work, align: int) -> tuple[int, ...]:
    """How far the operands lie from those of the first work, in units of ``align`` elements."""
    return tuple(
        0 if t is None or t.is_meta else (t.data_ptr() - f.data_ptr()) // (align * t.itemsize)
        for t, f in zip(work.tensors, first.tensors, strict=True)
    )


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
        outputs = (job.output, job.mask, job.gradient)
        runs.append(_run(job.weight, outputs, layout_of(job.weight), 1, *wanted))
    if also:
        channels, rest = job.weight.shape[0], job.weight[0].numel()
        layout = Layout(1, channels, rest, 0, job.weight.stride(0), 1)
        runs.append(_run(job.weight, (job.grad_input, None, None), layout, job.groups, *also))
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
    return Work(_pair_kernel, tuple(constants.items()), _as_bytes(job.tensors()), numbers, tiles)


def _run(
    weight: Tensor,
    results: tuple[Tensor | None, Tensor | None, Tensor | None],
    layout: Layout,
    groups: int,
    n: int,
    m: int,
) -> Work:
    (layout,) = collapse(layout)
    tile = tile_of(layout, layout, m, groups, weight.itemsize)
    flat = tile.flat and _aligned((weight, *results))
    tile = tile._replace(flat=flat, align=4 if flat else 1, log=tile.log if flat else 0)
    position_tiles, group_tiles = tile.grid(layout, m, groups)
    output, mask, gradient = results
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
    tensors = _as_bytes((weight, *results))
    return Work(_run_kernel, tuple(constants.items()), tensors, numbers, tiles)


def _results(weight: Tensor, result: Tensor | None, m: int) -> dict[str, Any]:
    return {
        "WEIGHT": _TRITON[weight.dtype],
        "RESULT": _TRITON[weight.dtype if result is None else result.dtype],
        "NETWORK": sorting_network(m),
    }


def _aligned(tensors: Sequence[Tensor | None]) -> bool:
    return all(t is None or t.is_meta or t.data_ptr() % 16 == 0 for t in tensors)


def _as_bytes(tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(
        t.view(torch.uint8) if t is not None and t.dtype == torch.bool else t for t in tensors
    )


@functools.lru_cache(maxsize=TABLES)
def _tables(
    rows: tuple[tuple[int, ...], ...], tiles: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """The tables on the device; copied there once for as long as distances stay."""
    if any(len(row) != COLUMNS for row in rows):
        raise ValueError(f"rows of {COLUMNS} numbers are needed, not {rows}.")
    counts = torch.tensor(tiles)
    entry = torch.repeat_interleave(torch.arange(len(tiles)), counts)
    first = torch.cumsum(counts, 0) - counts
    local = torch.arange(len(entry)) - first[entry]
    table = torch.tensor(rows, dtype=torch.int64)
    return table.to(device), torch.stack([entry, local], 1).contiguous().to(device)
