"""Constants that the pages name are those of the code, of setup.cfg and of the configs."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from torch import nn

import fst
from fst.api.export import SIZE
from fst.backends import choice, record
from fst.files.onnx_file import LEAST_DYNAMO
from fst.ops.backends import prune_cpp, zeros_maps, zeros_weight

ROOT = Path(__file__).resolve().parents[1]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
PYTORCH = re.search(r"torch>=(\S+)", SETUP["options"]["install_requires"])[1]
PYTHONS = re.findall(r"Python :: (3\.\d+)", SETUP["metadata"]["classifiers"])


def recipe(name: str) -> Config:
    return Config.fromfile(ROOT / "configs" / name)


def stated() -> list[tuple[str, str]]:
    """(page, words that it must have)."""
    of_fst, of_cifar = recipe("fst_resnet50_imagenet.py"), recipe("fst_resnet18_cifar10.py")
    of_sdgp = recipe("sdgp/sdgp_resnet18_imagenet_rescaled.py")
    size = of_sdgp.train_dataloader.dataset.transforms[0]
    epochs, warmup = of_fst.train_cfg.max_epochs, of_fst.param_scheduler[0].end
    decay, least = fst.get_strategy("fst").decay, zeros_weight.LEAST_CHANNELS
    assert least == zeros_maps.LEAST_CHANNELS
    assert (choice.LEAST_SAVED, record.STEPS) == (0.5, 8)
    kernels = [
        f"M ≤ {prune_cpp.MOST_M} (random ones: {prune_cpp.MOST_DRAWN_M})",
        f"float64, M > {prune_cpp.MOST_M},",
        f"at least {choice.LEAST_GAIN - 1:.0%}".replace("%", " % faster, and half a millisecond"),
        f"counted in every {record.COUNTED}th step",
        "share of zeros in eighths",
        f"groups of fewer than {least} channels",
    ]
    configs = [
        f"batch {of_fst.train_dataloader.batch_size}, {epochs} epochs, {warmup} of warm-up, cosine,"
        f" λ {decay:.0e}".replace("e-0", "e-"),
        f"ResNet-18 for small images, {of_cifar.train_cfg.max_epochs} epochs",
        f"{of_sdgp.train_cfg.max_epochs} epochs, {size.min_size} → {size.max_size} pixels",
        f"ResNet-9, {recipe('sdgp/sdgp_resnet9_cifar10_dense.py').train_cfg.max_epochs} epochs",
        f"epoch_{epochs}.pth",
    ]
    deploy = [f"Below {LEAST_DYNAMO} torch's older exporter", SIZE[0].removeprefix("it with ")]
    install = f"Python {PYTHONS[0]}-{PYTHONS[-1]}"
    pages = {
        "README.md": [f"{install} and PyTorch {PYTORCH} or newer"],
        "docs/index.md": [f"{install}, PyTorch {PYTORCH} or newer"],
        "docs/kernels.md": kernels,
        "docs/configs.md": configs,
        "docs/deploy.md": deploy,
    }
    return [(page, words) for page, found in pages.items() for words in found]


@pytest.mark.parametrize(("page", "words"), stated())
def test_a_page_has_the_constant_of_the_code(page: str, words: str) -> None:
    assert words in " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_the_least_version_is_the_first_that_trains() -> None:
    text = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+\.\d+)\.[^|]*\| (no|yes)\b", text, re.MULTILINE)
    assert {version: trains for version, trains in rows}[PYTORCH] == "yes"
    assert all(
        trains == "yes" or tuple(map(int, version.split("."))) < tuple(map(int, PYTORCH.split(".")))
        for version, trains in rows
    )


def test_the_opset_of_a_file_is_the_one_that_the_page_names(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    text = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    named = re.search(r"exporter: (\d+) \(IR version (\d+)\) with torch (\d+\.\d+)", text)
    if not torch.__version__.startswith(named[3]):
        pytest.skip(f"the page is about torch {named[3]}")
    fst.export(nn.Conv2d(4, 4, 1), tmp_path / "m.onnx", torch.randn(1, 4, 4, 4))
    written = onnx.load(tmp_path / "m.onnx")
    assert (written.opset_import[0].version, written.ir_version) == (int(named[1]), int(named[2]))
