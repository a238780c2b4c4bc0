"""Trains a grid of settings and seeds: the command `fst ablate`."""

import sys

from fst.cli import main

if __name__ == "__main__":
    sys.exit(main(["ablate", *sys.argv[1:]]))
