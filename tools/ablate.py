"""Trains a grid of settings and seeds: python tools/ablate.py GRID.yaml (--help lists options)."""

import sys
from pathlib import Path

from fst.studies.ablation.cli import main

if __name__ == "__main__":
    sys.exit(main(script=Path(__file__).with_name("train.py")))
