"""Checks the N:M pattern of a checkpoint: python tools/verify.py CHECKPOINT [--n N --m M]."""

import sys

from fst.engine.cli import verify

if __name__ == "__main__":
    sys.exit(verify())
