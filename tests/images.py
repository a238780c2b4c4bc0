"""Images in folders of classes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image


def write_images(root: Path, counts: Mapping[str, int]) -> Path:
    """Files of noise, as ``{"train/cat": 4}`` names them; no two of a class have one height."""
    random = np.random.default_rng(0)
    for folder, count in counts.items():
        (root / folder).mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(0, 256, (40 + number, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / folder / f"{number}.png")
    return root
