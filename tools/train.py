"""Trains the model of a config: the command `fst train`."""

import sys

from fst.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
