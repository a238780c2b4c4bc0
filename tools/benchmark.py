"""Times convolutions and training steps: the command `fst bench`."""

import sys

from fst.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
