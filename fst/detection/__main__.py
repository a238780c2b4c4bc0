"""``python -m fst.detection SCRIPT ARGS...``: any Python script, with mmcv's operators there."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from fst.detection import ops
from fst.environment import versions

DESCRIPTION = """\
Run a Python script that imports mmdet, mmseg or mmpose where mmcv was installed without its
compiled extension. The extension is used if there is one; if not, NMS and RoIAlign come
from torchvision. Faults of mmdet that stop SSD from predicting are mended.

Without SCRIPT: print which operators are in use."""

EPILOG = """\
examples:
  python -m fst.detection
  python -m fst.detection path/to/mmdet/tools/train.py CONFIG --work-dir DIR
  torchrun --nproc-per-node=2 -m fst.detection path/to/mmdet/tools/train.py CONFIG \\
      --launcher pytorch"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script as ``python SCRIPT ARGS...`` would."""
    parser = argparse.ArgumentParser(
        "python -m fst.detection",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="a Python file")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")
    arguments = parser.parse_args(argv)
    if arguments.script is None:
        print(describe())
        return 0
    if not Path(arguments.script).is_file():
        parser.error(f"SCRIPT {arguments.script!r} is no file")
    sys.argv[:] = [arguments.script, *arguments.args]
    sys.path[0] = str(Path(arguments.script).resolve().parent)
    runpy.run_path(arguments.script, run_name="__main__")
    return 0


def describe() -> str:
    """The installed packages, and where mmcv's operators come from."""
    installed = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = [installed, "", f"mmcv's operators: {ops.source()}"]
    if ops.source() != "compiled":
        lines.append(f"  torchvision's: {', '.join(ops.OPS)}")
        lines.append(
            "  all others raise UnavailableOpError when they are called. To get them, compile"
        )
        lines.append(f"  mmcv, {ops.HOW_TO_COMPILE}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
