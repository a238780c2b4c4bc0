"""Evaluates a checkpoint: the command `fst test`."""

import sys

from fst.cli import main

if __name__ == "__main__":
    sys.exit(main(["test", *sys.argv[1:]]))
