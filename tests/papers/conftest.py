"""The scripts of benchmarks/papers import each other by name."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("mmengine")
pytest.importorskip("matplotlib")
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "papers"))
