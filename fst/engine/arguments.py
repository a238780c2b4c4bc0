"""What command lines that write a file check."""

from __future__ import annotations

from pathlib import Path


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
