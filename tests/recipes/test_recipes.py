"""Each recipe runs as its first lines say, on tiny inputs, where its package is installed."""

import importlib.util
import os
import re
from pathlib import Path

import pytest
import torch

import fst
from tests.images import write_images
from tests.programs import ROOT, python

pytestmark = [pytest.mark.system, pytest.mark.slow]

RECIPES = ROOT / "examples" / "recipes"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


OFFLINE = {"HF_HUB_OFFLINE": "1", "YOLO_AUTOINSTALL": "false", "YOLO_OFFLINE": "true"}


def run(folder, *words):
    """What a program prints; it runs in ``folder``."""
    return python(*words, folder=folder, **OFFLINE, YOLO_CONFIG_DIR=str(folder)).stdout


def folded(path, model):
    """The folded file: ``model``, unconverted, loads it."""
    model.load_state_dict(torch.load(path, weights_only=True))
    return fst.verify(path)


def write_squares(folder):
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
    ("package", "recipe", "options"),
    [
        ("sklearn", "from_asp_or_modelopt", "--epochs 2"),
        ("segmentation_models_pytorch", "segmentation", "--net Unet"),
        ("segmentation_models_pytorch", "segmentation", "--net DeepLabV3Plus"),
        ("transformers", "hugging_face", "--model resnet --epochs 1 --out saved"),
        ("transformers", "hugging_face", "--model convnext --epochs 1 --out saved"),
        ("transformers", "hugging_face", "--model vit --epochs 1 --out saved"),
        ("ultralytics", "ultralytics_yolo", "--epochs 1 --size 64 --data d.yaml"),
    ],
)
def test_a_recipe_trains_folds_and_is_2_of_4(package, recipe, options, tmp_path):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    write_squares(tmp_path)
    printed = run(tmp_path, RECIPES / f"{recipe}.py", *options.split())
    reports = re.findall(r"^(.*); coverage", printed, re.MULTILINE)
    assert reports and all("are 2:4" in report and "not 2:4" not in report for report in reports)


# accelerate makes shards on GPUs alone, but for this line
ON_CPUS = """
import runpy, sys
from accelerate import PartialState
from accelerate.utils import DistributedType
PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("strategy", ["srste", "asp"])
def test_accelerate_with_fsdp2(tmp_path, strategy):
    """Two processes (gloo)."""
    pytest.importorskip("accelerate")
    models = pytest.importorskip("torchvision").models
    (tmp_path / "on_cpus.py").write_text(ON_CPUS)
    recipe = RECIPES / "accelerate_fsdp2.py"
    run(tmp_path, *TORCHRUN, "on_cpus.py", recipe, "--strategy", strategy)
    report = folded(tmp_path / "folded.pth", models.resnet18(num_classes=10))
    assert report.ok and sum(not check.is_exempt for check in report.layers) == 19


@pytest.mark.skipif("TIMM_TRAIN" not in os.environ, reason="TIMM_TRAIN names no train.py of timm")
def test_timm_s_train_script(tmp_path):
    timm = pytest.importorskip("timm")
    folders = (f"{split}/{name}" for split in ("train", "val") for name in ("cats", "raccoons"))
    write_images(tmp_path / "data", dict.fromkeys(folders, 4))
    options = "--model resnet18 --num-classes 2 --input-size 3 32 32 --epochs 1 --batch-size 4"
    options += " --warmup-epochs 0 --workers 0 --device cpu --output out --model-ema --mixup 0.1"
    script = Path(os.environ["TIMM_TRAIN"]).resolve()
    run(tmp_path, RECIPES / "timm_train.py", script, "data", *options.split())
    assert folded(tmp_path / "folded.pth", timm.create_model("resnet18", num_classes=2)).ok


@pytest.mark.parametrize(
    "model", ["fasterrcnn_mobilenet_v3_large_320_fpn", "ssdlite320_mobilenet_v3_large"]
)
def test_torchvision_s_detectors(tmp_path, model):
    for library in ("torchvision", "pycocotools", "cv2"):
        pytest.importorskip(library)
    from torchvision.models import get_model

    from tests.training.detection import toy

    drawn = toy.draw_images(tmp_path / "drawn")
    data = (drawn / "JPEGImages", drawn / "train.json")
    assert "loss" in run(tmp_path, RECIPES / "torchvision_detection.py", *data, "--model", model)
    plain = get_model(model, weights=None, weights_backbone=None, num_classes=4)
    assert folded(tmp_path / "folded.pth", plain).ok
