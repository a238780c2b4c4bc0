"""Numbers about a model: the command `fst analyze`."""

import sys

from fst.cli import main

if __name__ == "__main__":
    sys.exit(main(["analyze", *sys.argv[1:]]))
