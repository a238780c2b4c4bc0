"""``python -m fst.training.detection SCRIPT ARGS...`` runs a script with mmcv's operators."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

DESCRIPTION = """\
Run a Python script that imports mmdet, mmseg or mmpose, such as an OpenMMLab project's own
train.py. Where mmcv has no compiled extension, NMS and RoIAlign come from torchvision."""


def main() -> None:
    """Run the script as ``python SCRIPT ARGS...`` would."""
    parser = argparse.ArgumentParser("python -m fst.training.detection", description=DESCRIPTION)
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")
    arguments = parser.parse_args()
    if not Path(arguments.script).is_file():
        parser.error(f"SCRIPT {arguments.script!r} is no file")
    sys.argv[:] = [arguments.script, *arguments.args]
    sys.path[0] = str(Path(arguments.script).resolve().parent)
    runpy.run_path(arguments.script, run_name="__main__")


if __name__ == "__main__":
    main()
