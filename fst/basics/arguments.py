"""Types of command line arguments."""

from __future__ import annotations

import argparse

import torch


def positive(text: str) -> int:
    """An integer of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 1")
    return int(text)


def usable_device(text: str) -> torch.device:
    """A device on which a tensor can be made."""
    try:
        torch.empty(1, device=text)
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: {error}") from error
    return torch.device(text)
