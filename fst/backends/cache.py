"""Decisions of the autotuner on disk: one JSON file for each device and set of versions."""

from __future__ import annotations

import json
import os
import platform
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from fst.basics.machine import processor
from fst.basics.version import __version__

FORMAT = 1


def folder() -> Path:
    """FST_CACHE_DIR, or fst/ below XDG_CACHE_HOME or ~/.cache."""
    chosen = os.environ.get("FST_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fst"


def environment(device: torch.device) -> dict[str, Any]:
    """What a measured time depends on besides the layer."""
    found: dict[str, Any] = {"fst": __version__, "torch": torch.__version__}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()
    else:
        found["device"] = f"{device.type} {platform.machine()} {processor()}".strip()
        found["threads"] = torch.get_num_threads()
    return found


def path(surroundings: dict[str, Any]) -> Path:
    """The file of an `environment`."""
    name = "_".join(str(value) for value in surroundings.values())
    return folder() / f"autotune_{re.sub(r'[^A-Za-z0-9.+-]+', '-', name)}.json"


def read(surroundings: dict[str, Any]) -> dict[str, Any]:
    """Key -> entry; empty where there is no readable file of this format and environment."""
    file = path(surroundings)
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(f"{file} cannot be read and is not used: {error}", stacklevel=2)
        return {}
    known = isinstance(found, dict) and found.get("format") == FORMAT
    if not known or found.get("environment") != surroundings:
        warnings.warn(f"{file} is of another format or environment and is not used.", stacklevel=2)
        return {}
    entries = found.get("decisions")
    return entries if isinstance(entries, dict) else {}


def write(surroundings: dict[str, Any], entries: dict[str, Any]) -> None:
    """Add entries to those on disk. The file is replaced as a whole, so readers see no half."""
    file = path(surroundings)
    content = {
        "format": FORMAT,
        "environment": surroundings,
        "decisions": {**read(surroundings), **entries},
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as stream:
                json.dump(content, stream, indent=1, sort_keys=True)
            os.replace(name, file)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        warnings.warn(f"{file} cannot be written, decisions stay here: {error}", stacklevel=2)
