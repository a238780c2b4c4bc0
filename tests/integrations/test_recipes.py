"""The recipes of other libraries on tiny inputs, where their packages are: the extra `recipes`."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.slow]

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"
CASES = [
    ("from_asp_or_modelopt", "sklearn", ["--epochs", "2"]),
    ("segmentation", "segmentation_models_pytorch", ["--net", "Unet", "--steps", "3"]),
    ("segmentation", "segmentation_models_pytorch", ["--net", "DeepLabV3Plus", "--steps", "3"]),
    *[
        ("hugging_face", "transformers", ["--model", name, "--epochs", "1", "--out", "saved"])
        for name in ("resnet", "convnext", "vit")
    ],
    ("ultralytics_yolo", "ultralytics", ["--epochs", "1", "--size", "64", "--data", "d.yaml"]),
]
OFFLINE = {"HF_HUB_OFFLINE": "1", "YOLO_AUTOINSTALL": "false", "YOLO_OFFLINE": "true"}


def write_squares(folder: Path) -> None:
    """A data set of Ultralytics' form: bright squares on dark images."""
    from PIL import Image

    for part in ("train", "val"):
        images, labels = folder / "images" / part, folder / "labels" / part
        images.mkdir(parents=True)
        labels.mkdir(parents=True)
        for i in range(4):
            image = Image.new("RGB", (64, 64), (20, 20, 20))
            image.paste((250, 250, 250), (8 * i, 8, 8 * i + 32, 40))
            image.save(images / f"{i}.png")
            (labels / f"{i}.txt").write_text(f"0 {(8 * i + 16) / 64} 0.375 0.5 0.5\n")
    described = f"path: {folder}\ntrain: images/train\nval: images/val\nnames: [square]\n"
    (folder / "d.yaml").write_text(described)


@pytest.mark.parametrize(
    ("recipe", "package", "options"), CASES, ids=[f"{c[0]}-{c[2][1]}" for c in CASES]
)
def test_a_recipe_trains_folds_and_is_2_of_4(recipe, package, options, tmp_path):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    write_squares(tmp_path)
    own = {"PYTHONPATH": str(RECIPES.parents[1]), "YOLO_CONFIG_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(RECIPES / f"{recipe}.py"), *options],
        cwd=tmp_path,
        env={**os.environ, **OFFLINE, **own, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    reports = re.findall(r"^(.*); coverage", done.stdout, re.MULTILINE)
    assert reports and all("are 2:4" in report and "not 2:4" not in report for report in reports)
