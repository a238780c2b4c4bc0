"""Checks the N:M pattern: the command `fst verify`."""

import sys

from fst.cli import main

if __name__ == "__main__":
    sys.exit(main(["verify", *sys.argv[1:]]))
