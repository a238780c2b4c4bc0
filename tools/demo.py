"""Dense against sparse training on real digits: python tools/demo.py (--help lists options)."""

import sys
from pathlib import Path

from fst.studies.demo import main

if __name__ == "__main__":
    sys.exit(main(root=Path(__file__).resolve().parents[1]))
