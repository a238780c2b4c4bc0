"""Times convolutions and training steps, backend by backend: python tools/benchmark.py (--help)."""

import sys

from fst.studies.benchmark.cli import main

if __name__ == "__main__":
    sys.exit(main())
