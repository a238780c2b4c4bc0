"""What a measurement was made on: device, driver, clocks, versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import fst
from fst.backends import autotune
from fst.basics.machine import processor

GPU_QUERY = {
    "driver": "driver_version",
    "power limit": "power.limit",
    "highest SM clock": "clocks.max.sm",
    "SM clock now": "clocks.sm",
}


def describe(device: torch.device) -> dict[str, Any]:
    """Name -> value of all that a time depends on besides the program and its options."""
    found: dict[str, Any] = {"device": f"CPU, {processor()}"}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found.update(_gpu_state(device))
        found["CUDA"] = torch.version.cuda
        found["cuDNN"] = torch.backends.cudnn.version()
    found["threads"] = torch.get_num_threads()
    found["python"] = platform.python_version()
    found["torch"] = torch.__version__
    for package in ("triton", "torchvision"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["fst"] = fst.__version__
    commit = _commit(Path(fst.__file__).parents[1])
    if commit:
        found["commit"] = commit
    found["autotuner"] = "on" if autotune.enabled(device) else "off"
    forced = os.environ.get("FST_BACKENDS")
    if forced:
        found["FST_BACKENDS"] = forced
    return found


def _gpu_state(device: torch.device) -> dict[str, str]:
    """From nvidia-smi; empty where that does not answer."""
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    except AttributeError:  # before torch 2.7
        uuid = str(index)
    query = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={','.join(GPU_QUERY.values())}"]
    answer = _output([*query, "--format=csv,noheader"])
    values = [value.strip() for value in answer.splitlines()[0].split(",")] if answer else []
    return dict(zip(GPU_QUERY, values, strict=False))


def _commit(root: Path) -> str:
    """Of the checkout that is ``root``, and whether it was changed since; "" if it is none."""
    if not (root / ".git").exists():
        return ""
    commit = _output(["git", "-C", str(root), "rev-parse", "--short", "HEAD"])
    tracked = ["--porcelain", "--untracked-files=no"]
    changed = commit and _output(["git", "-C", str(root), "status", *tracked])
    return f"{commit} with changes" if changed else commit


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
