"""What command lines share: types and options of argparse."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mmengine.config import DictAction


class OptionAction(DictAction):
    """``key=value`` pairs, and what is wrong with others."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        for value in values:
            if not value.partition("=")[0] or "=" not in value:
                parser.error(f"argument {option_string}: {value!r} is not of the form key=value")
            if any(value.count(a) != value.count(b) for a, b in ("()", "[]")):
                parser.error(f"argument {option_string}: {value!r} has unbalanced brackets")
        super().__call__(parser, namespace, values, option_string)


def add_cfg_options(
    parser: argparse.ArgumentParser, meaning: str = "changes to the config"
) -> None:
    """--cfg-options KEY=VALUE ..."""
    parser.add_argument(
        "--cfg-options",
        nargs="+",
        action=OptionAction,
        default={},
        metavar="KEY=VALUE",
        help=meaning,
    )


def check_out(out: str, checkpoint: str) -> None:
    """Check that what is made of a checkpoint can be written to the argument OUT.

    Raises:
        FileNotFoundError: its folder does not exist.
        ValueError: it is a folder, or the checkpoint.
    """
    path = Path(out)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder of OUT={out!r} does not exist.")
    if path.is_dir():
        raise ValueError(f"OUT={out!r} is a folder; it must be a file.")
    if path.exists() and Path(checkpoint).exists() and path.samefile(checkpoint):
        raise ValueError(f"OUT={out!r} is the checkpoint, which would be lost: name another file.")
