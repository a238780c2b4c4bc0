"""Writes one HTML page from runs: python tools/report.py RUNS... -o report.html (--help)."""

import sys

from fst.studies.reporting.cli import main

if __name__ == "__main__":
    sys.exit(main())
