"""Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python(
    *words: object, folder: Path = ROOT, status: int = 0, timeout: int = 600, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, in ``folder``; it ends with ``status``.

    It finds this checkout first, and has one thread; ``variables`` are those of the environment.
    """
    places = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done
