"""Writes a checkpoint's pruned weights as a state_dict: tools/fold.py CONFIG CHECKPOINT OUT."""

import sys

from fst.engine.cli import fold

if __name__ == "__main__":
    sys.exit(fold())
