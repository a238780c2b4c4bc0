"""``python -m fst COMMAND ...``, which torchrun can start too: the command `fst`."""

import sys

from fst.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
