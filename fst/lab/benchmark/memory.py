"""Memory of a training step: what torch allocates at most, and what autograd keeps for backward.

Used by `fst bench`.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from fst.lab.benchmark import PLAIN, Function, Training
from fst.rules.strategy import Strategy


class StepMemory(NamedTuple):
    """Bytes.

    Attributes:
        peak: most that torch's allocator had given out at once, in the second of two steps (on a
            CPU in both): parameters, gradients, momentum, activations and temporaries. On a CPU
            the scratch memory of oneDNN is not in it.
        saved: storages that autograd keeps for the backward pass, without the parameters; each
            counts once and as a whole.
    """

    peak: int
    saved: int


def measure_memory(training: Training, strategies: Mapping[str, Strategy]) -> dict[str, StepMemory]:
    """`StepMemory` of the plain model ("torch") and of each strategy, one after the other."""
    return {
        name: _measure(training, strategy) for name, strategy in {PLAIN: None, **strategies}.items()
    }


def _measure(training: Training, strategy: Strategy | None) -> StepMemory:
    gc.collect()
    cuda = training.device.type == "cuda"
    peak = _cuda_peak(training, strategy) if cuda else _cpu_peak(training, strategy)
    model, step = training.candidate(strategy)
    return StepMemory(peak, saved_bytes(model, step))


def _cuda_peak(training: Training, strategy: Strategy | None) -> int:
    before = torch.cuda.memory_allocated(training.device)
    _, step = training.candidate(strategy)
    step()
    torch.cuda.reset_peak_memory_stats(training.device)
    step()
    return torch.cuda.max_memory_allocated(training.device) - before


def _cpu_peak(training: Training, strategy: Strategy | None) -> int:
    kinds = [ProfilerActivity.CPU]
    with profile(activities=kinds, profile_memory=True, acc_events=True) as profiler:
        _, step = training.candidate(strategy)
        step()
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
    live = peak = 0
    for _, change in sorted(changes, key=lambda change: change[0]):
        live += change
        peak = max(peak, live)
    return peak


def saved_bytes(model: nn.Module, step: Function) -> int:
    """Bytes of the storages that autograd saves for backward in ``step``, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = max(storage.nbytes(), saved.get(storage.data_ptr(), 0))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(saved.values())
