"""Evaluates a checkpoint: python tools/test.py CONFIG CHECKPOINT."""

import sys

from fst.engine.cli import test

if __name__ == "__main__":
    sys.exit(test())
