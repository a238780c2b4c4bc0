"""Measured times, here and on disk: a line each, a file for each device and set of versions."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import warnings
from pathlib import Path
from typing import Any, cast

import torch

from fst.backends.sources import cpp_checksum
from fst.basics.machine import processor
from fst.basics.version import __version__

Times = dict[str, float]  # backend -> milliseconds
_KNOWN: dict[str, dict[str, Times]] = {}  # file -> key -> times


def folder() -> Path:
    """FST_CACHE_DIR, or fst/ below XDG_CACHE_HOME or ~/.cache."""
    chosen = os.environ.get("FST_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fst"


def environment(device: torch.device) -> dict[str, Any]:
    """The versions and the machine: like the layer, they decide how long a run takes."""
    found: dict[str, Any] = {"fst": __version__, "torch": torch.__version__}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()
    else:
        found["device"] = f"{device.type} {platform.machine()} {processor()}".strip()
        found["kernels"] = f"{cpp_checksum():08x}"
    return found | settings(device)


def settings(device: torch.device) -> dict[str, Any]:
    """The part of the `environment` that a process may change: how libraries choose kernels."""
    if device.type != "cuda":
        return {
            "threads": torch.get_num_threads(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
        }
    matmul, cudnn = torch.backends.cuda.matmul, cast(Any, torch.backends.cudnn)
    old = not hasattr(matmul, "fp32_precision")  # before PyTorch 2.9
    return {
        "benchmark": cudnn.benchmark,
        "deterministic": cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
        "conv": cudnn.allow_tf32 if old else cudnn.conv.fp32_precision,
        "matmul": matmul.allow_tf32 if old else matmul.fp32_precision,
    }


def path(surroundings: dict[str, Any]) -> Path:
    """The file of an `environment`."""
    name = "_".join(str(value) for value in surroundings.values())
    return folder() / f"times_{re.sub(r'[^A-Za-z0-9.+-]+', '-', name)}.jsonl"


def read(surroundings: dict[str, Any]) -> dict[str, Times]:
    """Times by key; lines that are none of this environment are not used."""
    file = path(surroundings)
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    except OSError as error:
        warnings.warn(f"{file} cannot be read and is not used: {error}", stacklevel=2)
        return {}
    found = [_entry(line, surroundings) for line in lines if line]
    if None in found:
        reason = "broken, or of another format or environment"
        warnings.warn(f"{file}: a line is {reason} and is not used.", stacklevel=2)
    return dict(entry for entry in found if entry is not None)


def _entry(line: str, surroundings: dict[str, Any]) -> tuple[str, Times] | None:
    """Read a line that `add` wrote; None if the line is anything else."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.keys() != {"environment", "key", "times"}:
        return None
    key, times = found["key"], found["times"]
    fits = (
        found["environment"] == surroundings
        and isinstance(key, str)
        and isinstance(times, dict)
        and all(type(time) in (int, float) and time > 0 for time in times.values())
        and min(times.values(), default=math.inf) < math.inf
    )
    return (key, times) if fits else None


def known(surroundings: dict[str, Any], key: str) -> Times:
    """Times of this process or of earlier ones; empty where there are none."""
    file = str(path(surroundings))
    if file not in _KNOWN:
        _KNOWN[file] = read(surroundings)
    return _KNOWN[file].get(key, {})


def add(surroundings: dict[str, Any], key: str, times: Times) -> None:
    """Keep times, here and on disk; of several for one key the last ones hold.

    One line in one write: processes that do so at the same time lose nothing of each other.
    """
    file = path(surroundings)
    _KNOWN.setdefault(str(file), {})[key] = times
    line = json.dumps({"environment": surroundings, "key": key, "times": times})
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab", buffering=0) as stream:
            # Begins a line even behind one that a full disk has cut off.
            stream.write(f"\n{line}\n".encode())
    except OSError as error:
        warnings.warn(f"{file} cannot be written, times stay here: {error}", stacklevel=2)


def forget() -> None:
    """Forget the times that this process knows; the files on disk stay and are read anew."""
    _KNOWN.clear()
