"""The papers' figures for any model and data: python tools/analyze.py SUBCOMMAND (--help)."""

import sys

from fst.studies.analysis.cli import main

if __name__ == "__main__":
    sys.exit(main())
