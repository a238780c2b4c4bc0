"""Trains the model of a config: python tools/train.py CONFIG (--help lists the options)."""

import sys

from fst.engine.cli import train

if __name__ == "__main__":
    sys.exit(train())
