"""Writes a checkpoint's pruned weights as a state_dict: the command `fst fold`."""

import sys

from fst.cli import main

if __name__ == "__main__":
    sys.exit(main(["fold", *sys.argv[1:]]))
