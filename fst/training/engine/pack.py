"""The command `fst pack`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import fst
from fst.api.verify import check_records
from fst.files.checkpoint import replacing
from fst.files.pt2_file import write_program
from fst.training.engine.config import load_config
from fst.training.engine.export import deployable
from fst.training.engine.trained import trained_model

SUFFIXES = (".pt", ".pt2")


def main(arguments: argparse.Namespace) -> int:
    """Pack a checkpoint's model for this CPU, and write it."""
    path = Path(arguments.out)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"OUT={arguments.out!r}: its suffix must be {' or '.join(SUFFIXES)}.")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    config = load_config(arguments.config, arguments.cfg_options, arguments.checkpoint)
    model = trained_model(config, arguments.checkpoint)
    check_records(model)
    if not hasattr(model.data_preprocessor, "mean"):
        raise ValueError("the config's data_preprocessor has no mean: use fst.pack instead.")
    channels = model.data_preprocessor.mean.numel()
    example = torch.randn(arguments.batch, channels, *arguments.size)
    packed = fst.pack(deployable(model), example)
    with replacing(path) as partial, torch.no_grad():
        if path.suffix == ".pt2":
            write_program(torch.export.export(packed, (example,)), partial)
        else:
            torch.save(packed, partial)
    print(f"{packed.report}\n\nwritten: {path}")
    return 0
