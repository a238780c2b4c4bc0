"""timm's data sets: folders, torchvision's, Hugging Face's from a local folder."""

import sys
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from fst.engine import ImageFolder, TimmDataset
from fst.engine.checks import check_config

CROP = [dict(type="RandomResizedCrop", size=16), dict(type="RandomHorizontalFlip")]


def picture(number):
    pixels = np.random.default_rng(number).integers(0, 256, (20, 22, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture
def folder(tmp_path):
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / "images" / "train" / name).mkdir(parents=True)
        for number in range(3):
            picture(10 * label + number).save(
                tmp_path / "images" / "train" / name / f"{number}.png"
            )
    return tmp_path / "images"


def test_a_folder_is_image_folders(folder):
    """The same images under the same keys, so the same augmentation; its .tar file likewise."""
    expected = ImageFolder(str(folder), "train", CROP).__getitems__([5, 0, 3])
    with tarfile.open(folder / "train.tar", "w") as file:
        file.add(folder / "train", "train")
    for root in (folder, folder / "train.tar"):
        dataset = TimmDataset(str(root), transforms=CROP)
        assert dataset.metainfo == {"classes": ("cat", "dog")} and len(dataset) == 6
        found = dataset.__getitems__([5, 0, 3])
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert found["labels"].tolist() == [1, 0, 1]


def test_a_folder_without_splits_is_train(folder, monkeypatch):
    assert len(TimmDataset(str(folder / "train"), transforms=CROP)) == 6
    (folder / "train").rename(folder / "val")
    with pytest.raises(ValueError, match="split='train': .*has no folder train or training"):
        TimmDataset(str(folder), transforms=CROP)
    monkeypatch.setenv("HOME", str(folder.parent))
    assert len(TimmDataset("~/images", split="validation", transforms=CROP)) == 6


def test_a_broken_image_is_an_error(folder):
    (folder / "train" / "cat" / "1.png").write_bytes(b"no image")
    with pytest.raises(OSError, match="cannot identify image file"):
        TimmDataset(str(folder), transforms=CROP)[1]


def test_a_local_hugging_face_data_set(folder, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    name = f"hfds/{folder}"
    dataset = TimmDataset(str(tmp_path / "cache"), name, transforms=CROP)
    assert dataset.metainfo == {"classes": ("cat", "dog")}
    expected = ImageFolder(str(folder), "train", CROP).__getitems__([4, 1])
    found = dataset.__getitems__([4, 1])
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def refused(loader="train_dataloader", **dataset):
    from mmengine.config import Config

    check_config(Config(dict(model={}, train_dataloader=dict(dataset=dataset))), (loader,))


def test_what_is_refused(folder, monkeypatch):
    root = str(folder)
    for dataset, message in (
        (dict(type="TimmDataset", name="tfds/x", root=root), "name='tfds/x' is unknown. .*hfds/"),
        (dict(type="TimmDataset", name="", root=None), "root=None"),
        (dict(type="TimmDataset", root=str(folder), split="tset"), "split='tset': .*but train"),
        (dict(type="TimmDataset", root=str(folder), split="val"), "no folder .*val"),
        (dict(type="TimmDataset", root=str(folder / "train"), split="val"), "but cat, dog"),
    ):
        with pytest.raises(ValueError, match=message):
            refused(**dataset)
    for dataset in (
        dict(type="TimmDataset", root="no/where"),
        dict(type="TimmDataset", name="hfds//no/where", root=root),
    ):
        with pytest.raises(FileNotFoundError, match="no/where"):
            refused(**dataset)
    for arguments, message in (
        (dict(name="", download=True), "download=True: data sets of name='' have none"),
        (dict(name="", target_key="label"), "target_key='label': data sets of name='' have none"),
        (dict(name="torch/cifar10", class_map="x"), "class_map='x': data sets of name='torch/"),
    ):
        with pytest.raises(ValueError, match=message):
            TimmDataset(str(folder), **arguments)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'fst-train\[data\]'"):
        refused(type="TimmDataset", name="hfds/x", root=root)
