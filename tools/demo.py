"""Dense against sparse training on real digits: the command `fst demo`."""

import sys

from fst.cli import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
