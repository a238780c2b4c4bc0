"""timm's data sets: folders, torchvision's, Hugging Face's from a local folder, webdataset."""

import io
import sys
import tarfile

import numpy as np
import pytest
import torch
from mmengine.registry import DATASETS
from PIL import Image

from fst.engine import ImageFolder, TimmDataset, TimmStream
from fst.engine.checks import check_config
from fst.engine.data import build_dataloader

CROP = [dict(type="RandomResizedCrop", size=16), dict(type="RandomHorizontalFlip")]
SHARDS = "train-{0000..0001}.tar|12"


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


@pytest.fixture
def shards(tmp_path):
    """Two .tar files of six images; the label of image n is n modulo 3."""
    pytest.importorskip("webdataset")
    (tmp_path / "shards").mkdir()
    for shard in range(2):
        with tarfile.open(tmp_path / "shards" / f"train-{shard:04d}.tar", "w") as file:
            for number in range(6 * shard, 6 * shard + 6):
                png = io.BytesIO()
                picture(number).save(png, "PNG")
                label = str(number % 3).encode()
                for name, content in (("png", png.getvalue()), ("cls", label)):
                    member = tarfile.TarInfo(f"{number:03d}.{name}")
                    member.size = len(content)
                    file.addfile(member, io.BytesIO(content))
    return tmp_path / "shards"


def stream(root, workers=0, shuffle=True, batch_size=4, **changes):
    dataset = dict(type="TimmStream", root=str(root), split=SHARDS, transforms=CROP, **changes)
    sampler = dict(type="DefaultSampler", shuffle=shuffle)
    loader = dict(dataset=dataset, batch_size=batch_size, num_workers=workers, sampler=sampler)
    return build_dataloader(loader, 3)


def epoch_of(loader, epoch):
    loader.dataset.set_epoch(epoch)
    loader.generator.manual_seed(epoch)  # as RandomStateHook does
    batches = list(loader)
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


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
    loader = build_dataloader(
        dict(
            dataset=dict(
                type="TimmStream",
                root=str(tmp_path / "cache"),
                name=f"hfids/{folder}",
                num_samples=6,
                transforms=CROP,
            ),
            batch_size=3,
        ),
        0,
    )
    assert loader.dataset.metainfo == {"classes": ("cat", "dog")}
    assert sorted(epoch_of(loader, 0)["labels"].tolist()) == [0, 0, 0, 1, 1, 1]


def test_webdataset_epochs_differ_and_repeat(shards):
    for workers in (0, 2):
        loader = stream(shards, workers)
        first, second, again = (epoch_of(loader, epoch) for epoch in (0, 1, 0))
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert first["inputs"].shape[1:] == (3, 16, 16) and first["inputs"].dtype == torch.uint8
        assert len(first["labels"]) == 4 * len(loader) >= 12
        assert not torch.equal(first["keys"], second["keys"])
        assert not torch.equal(first["inputs"], second["inputs"])
        assert len(first["keys"].unique()) == len(first["keys"])
    for workers in (0, 2):  # without shuffling every image once
        loader = stream(shards, workers, shuffle=False, batch_size=5)
        assert len(loader.dataset) == 12
        assert torch.bincount(epoch_of(loader, 0)["labels"]).tolist() == [4, 4, 4]


STREAM = """
train_dataloader["dataset"] = dict(
    type="TimmStream", root={root!r}, split="train-{{0000..0001}}.tar|12",
    transforms=[dict(type="Resize", size=(8, 8)), dict(type="Grayscale")],
)
train_dataloader["batch_size"] = 4
"""


def test_a_run_on_shards_resumes_exactly(train, train_with_stop, shards, assert_same_state):
    extra = STREAM.format(root=str(shards))
    whole = train("whole", sparsity="None", extra=extra)
    parts = train_with_stop("parts", sparsity="None", extra=extra)
    assert_same_state(whole / "epoch_2.pth", parts / "epoch_2.pth")
    with pytest.raises(ValueError, match="read by epochs"):
        train("iterations", extra=extra + "train_cfg = dict(by_epoch=False, max_iters=4)\n")


def refused(loader="train_dataloader", **dataset):
    from mmengine.config import Config

    check_config(Config(dict(model={}, train_dataloader=dict(dataset=dataset))), (loader,))


def test_what_is_refused(folder, shards, monkeypatch):
    root = str(shards)
    for dataset, message in (
        (dict(type="TimmDataset", name="wds/", root=root), "use type='TimmStream'"),
        (dict(type="TimmStream", name="hfds/x", root=root), "use type='TimmDataset'"),
        (dict(type="TimmStream", name="tfds/x", root=root), "name='tfds/x' is unknown. .*wds/"),
        (dict(type="TimmDataset", name="", root=None), "root=None"),
        (dict(type="TimmDataset", root=str(folder), split="tset"), "split='tset': .*but train"),
        (dict(type="TimmDataset", root=str(folder), split="val"), "no folder .*val"),
        (dict(type="TimmDataset", root=str(folder / "train"), split="val"), "but cat, dog"),
        (dict(type="TimmDataset", root=root, splt="x"), "key 'splt' is unknown. .*'split'"),
        (dict(type="ImageFolder", data_root=str(folder), spilt="train"), "key 'spilt' is unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            refused(**dataset)
    for dataset in (
        dict(type="TimmDataset", root="no/where"),
        dict(type="TimmDataset", name="hfds//no/where", root=root),
        dict(type="TimmStream", root="no/where"),
    ):
        with pytest.raises(FileNotFoundError, match="no/where"):
            refused(**dataset)
    for arguments, message in (
        (dict(name="", download=True), "download=True: only torch/"),
        (dict(name="", target_key="label"), "target_key='label': data sets of name='' have none"),
        (dict(name="torch/cifar10", class_map="x"), "class_map='x': data sets of name='torch/"),
    ):
        with pytest.raises(ValueError, match=message):
            TimmDataset(str(folder), **arguments)
    with pytest.raises(ValueError, match="num_workers=3: 2 shards cannot be shared by 3 workers"):
        stream(shards, workers=3)
    with pytest.raises(ValueError, match="does not say how many images"):
        loader = dict(dataset=dict(type="TimmStream", root=root, split="train-0000.tar"))
        build_dataloader(loader, 0)
    sampler = dict(type="InfiniteSampler")
    with pytest.raises(ValueError, match="TimmStream has an order of its own"):
        dataset = dict(type="TimmStream", root=root, split=SHARDS)
        build_dataloader(dict(dataset=dataset, sampler=sampler), 0)
    monkeypatch.setitem(sys.modules, "webdataset", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'fst-train\[data\]'"):
        refused(type="TimmStream", root=root)
    assert DATASETS.get("TimmStream") is TimmStream
