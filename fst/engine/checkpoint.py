"""The checkpoints of a run: which is the newest, and where mmengine finds others.

Importing this module replaces mmengine's loaders (through their public registry): those fall back
to an unrestricted unpickler, with a mere warning, when a file needs one.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from mmengine.logging import print_log
from mmengine.runner import CheckpointLoader
from mmengine.runner.checkpoint import get_external_models, get_torchvision_models

from fst.checkpoint import commit_file, load_checkpoint_safely, state_dict_of


def newest_checkpoint(work_dir: str | os.PathLike[str]) -> str | None:
    """Path of the newest checkpoint in ``work_dir`` that can be read; None if there is none at all.

    Raises:
        ValueError: there are checkpoints, and none of them can be read.
    """
    found = [*Path(work_dir).glob("epoch_*.pth"), *Path(work_dir).glob("iter_*.pth")]
    found.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    broken = []
    for path in found:
        try:
            checkpoint = load_checkpoint_safely(path)
            state_dict_of(checkpoint, path)
            if "meta" not in checkpoint:
                raise ValueError(f"{path} holds weights alone, no training state.")
        except ValueError as error:
            broken.append(str(error))
            continue
        for message in broken:
            print_log(
                f"Resuming from {path} instead of a newer file: {message}",
                logger="current",
                level=logging.WARNING,
            )
        return str(path)
    if broken:
        raise ValueError(f"no checkpoint in {str(work_dir)!r} can be read: {'; '.join(broken)}.")
    return None


def _from_url(url: str, map_location: Any = None, **_: Any) -> Any:
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / url.rpartition("/")[2]
    if not path.is_file():
        partial = f"{path}.{os.getpid()}.tmp"
        torch.hub.download_url_to_file(url, partial, progress=os.isatty(0))
        commit_file(partial, path)
    return load_checkpoint_safely(path, map_location)


def _from_local(filename: str, map_location: Any = None) -> Any:
    return load_checkpoint_safely(filename, map_location)


def _from_torchvision(filename: str, map_location: Any = None) -> Any:
    return _from_url(get_torchvision_models()[filename.partition("://")[2]], map_location)


def _from_openmmlab(filename: str, map_location: Any = None) -> Any:
    name = filename.partition("://")[2]
    models = get_external_models()
    if name not in models:
        raise ValueError(f"{filename!r} names no OpenMMLab checkpoint.")
    return _from_url(models[name], map_location)


def _refused(filename: str, map_location: Any = None) -> Any:
    raise ValueError(
        f"checkpoint {filename!r}: this storage is not supported; copy the file to a local path."
    )


for _prefixes, _loader in {
    "": _from_local,
    ("http://", "https://"): _from_url,
    ("modelzoo://", "torchvision://"): _from_torchvision,
    ("open-mmlab://", "openmmlab://"): _from_openmmlab,
    (r"(\S+\:)?s3://", r"(\S+\:)?petrel://", "pavi://", "mmcls://"): _refused,
}.items():
    CheckpointLoader.register_scheme(_prefixes, _loader, force=True)
