"""What backends there are, and building the CUDA C++ kernels ahead of their first use.

python -m fst.ops
python -m fst.ops build --arch 9.0a
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence

import torch

from fst.backends import describe, sources


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, or build."""
    parser = argparse.ArgumentParser(
        prog="python -m fst.ops",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("list", help="print the backends, their state, and what is missing here")
    build = commands.add_parser(
        "build", help="compile the CUDA C++ kernels into torch's extension cache"
    )
    build.add_argument(
        "--arch",
        nargs="+",
        type=_architecture,
        help="compute capabilities, such as 8.0 or 9.0a; without it, those of the GPUs that are "
        "here. Sets TORCH_CUDA_ARCH_LIST, which must be the same when the kernels are used",
    )
    options = parser.parse_args(arguments)
    if options.command == "build":
        named = options.arch or os.environ.get("TORCH_CUDA_ARCH_LIST")
        if not named and not torch.cuda.is_available():
            build.error("--arch is needed: there is no GPU here whose capability could be taken.")
        _build(options.arch)
    else:
        print(describe())


def _architecture(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d[a-z]?", text) or float(text.rstrip("abf")) < 8:
        raise argparse.ArgumentTypeError(f"{text!r} must be a compute capability from 8.0 on")
    return text


def _build(architectures: list[str] | None) -> None:
    if architectures:
        os.environ["TORCH_CUDA_ARCH_LIST"] = ";".join(architectures)
    begin = time.perf_counter()
    try:
        built = sources.load("sparse24.extension").extension()
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    print(f"{built.__name__}: {time.perf_counter() - begin:.0f} s, {built.__file__}")


if __name__ == "__main__":
    main()
