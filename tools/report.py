"""Writes one HTML page from runs: the command `fst report`."""

import sys

from fst.cli import main

if __name__ == "__main__":
    sys.exit(main(["report", *sys.argv[1:]]))
