"""Dense against sparse training on digits among clutter: the command `fst demo`."""

import sys

from fst.cli import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
