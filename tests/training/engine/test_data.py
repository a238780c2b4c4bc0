"""Datasets, samplers and loaders: contents, balance, randomness independent of workers."""

import hashlib
import itertools

import numpy as np
import pytest
import torch
from mmengine.registry import DATASETS
from PIL import Image
from timm.data import create_transform

from fst.training.engine import CIFAR10, ClutteredDigits, Digits, ImageFolder
from fst.training.engine.data.base import EpochSampler, balanced_subset
from fst.training.engine.data.loader import build_dataloader, collate
from fst.training.engine.data.transforms import ProgressiveRandomResizedCrop, build_transforms
from fst.training.engine.random_state import isolated, mixed_seed, seed_all, splitmix64
from tests.images import write_images


@pytest.fixture
def folder(tmp_path):
    return write_images(tmp_path, dict.fromkeys(("train/cat", "train/dog", "train/emu"), 4))


CROP = [
    dict(type="RandomResizedCrop", size=16),
    dict(type="RandomHorizontalFlip"),
    dict(type="RandAugment"),
]


def loader(dataset, workers=0, seed=0, shuffle=True, **options):
    sampler = dict(type="DefaultSampler", shuffle=shuffle)
    config = dict(dataset=dataset, batch_size=5, num_workers=workers, sampler=sampler, **options)
    return build_dataloader(config, seed)


def epoch_of(dataloader, epoch):
    dataloader.sampler.set_epoch(epoch)
    batches = list(dataloader)
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def test_augmentation_depends_on_seed_epoch_and_index_alone(folder):
    dataset = dict(type="ImageFolder", data_root=str(folder), split="train", transforms=CROP)
    alone = loader(dataset)
    first, second = epoch_of(alone, 0), epoch_of(alone, 1)
    assert not torch.equal(first["inputs"].sort(0).values, second["inputs"].sort(0).values)
    torch.manual_seed(99)
    for workers, persistent in ((2, True), (1, False)):
        shared = loader(dataset, workers, persistent_workers=persistent)
        for epoch, expected in enumerate((first, second)):
            found = epoch_of(shared, epoch)
            assert all(torch.equal(found[name], expected[name]) for name in expected)
    other = epoch_of(loader(dataset, seed=1), 0)
    assert not torch.equal(other["keys"].sort().values, first["keys"].sort().values)


def test_transforms_leave_the_global_generators_alone(folder):
    dataset = ImageFolder(str(folder), "train", transforms=CROP)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    dataset[0]
    assert torch.equal(torch.rand(3), expected)


def test_image_folder(folder):
    dataset = ImageFolder(str(folder), "train", transforms=[dict(type="Resize", size=(8, 9))])
    assert dataset.metainfo == {"classes": ("cat", "dog", "emu")} and len(dataset) == 12
    batch = collate(dataset.__getitems__([0, 5, 11]))
    assert batch["inputs"].shape == (3, 3, 8, 9) and batch["inputs"].dtype == torch.uint8
    assert batch["labels"].tolist() == [0, 1, 2]
    assert dataset[5]["inputs"].equal(batch["inputs"][1])
    with pytest.raises(ValueError, match="several sizes"):
        collate(ImageFolder(str(folder), "train").__getitems__([0, 1]))
    (folder / "train" / "fox").mkdir()
    with pytest.raises(FileNotFoundError, match="no valid file for the classes fox"):
        ImageFolder(str(folder), "train")


def test_transform_errors():
    for config, message in (
        (dict(type="RandomResizeCrop", size=3), "Did you mean 'RandomResizedCrop'"),
        (dict(type="ToTensor"), "images stay uint8 .* use its mean and std"),
        (dict(type="MixUp", num_classes=9), "use its mixup"),
        (dict(type="Resize", sise=3), "sise"),
        (dict(type="timm", input_size=8, is_training=True, re_prob=0.5), "re_prob"),
        (dict(type="ProgressiveRandomResizedCrop", min_size=100), "multiples of"),
        (dict(type="ProgressiveRandomResizedCrop", start_epoch=2, end_epoch=2), "start_epoch=2"),
    ):
        with pytest.raises(ValueError, match=message):
            build_transforms([config])
    with pytest.raises(ValueError, match="must be a list"):
        build_transforms(dict(type="Resize", size=3))


def test_timm_transform(folder):
    """The values are those of timm's own transform, drawn from the same seed."""
    options = dict(input_size=16, is_training=True, auto_augment="rand-m9-mstd0.5")
    dataset = ImageFolder(str(folder), "train", transforms=[dict(type="timm", **options)])
    images = [item["inputs"] for item in dataset.__getitems__(range(12))]
    assert images[0].shape == (3, 16, 16) and images[0].dtype == torch.uint8
    transform = create_transform(**options, use_prefetcher=True)
    for index, (path, image) in enumerate(zip(dataset.paths, images, strict=True)):
        with isolated():
            seed_all(mixed_seed(0, 0, index))
            assert np.array_equal(transform(Image.open(path)), image.numpy())


def test_progressive_resizing_reaches_persistent_workers(folder):
    crop = dict(
        type="ProgressiveRandomResizedCrop",
        min_size=16,
        max_size=32,
        start_epoch=1,
        end_epoch=3,
        multiple=8,
        interpolation="bilinear",
    )
    dataset = dict(type="ImageFolder", data_root=str(folder), split="train", transforms=[crop])
    dataloader = loader(dataset, workers=1, persistent_workers=True)
    sides = [epoch_of(dataloader, epoch)["inputs"].shape[-1] for epoch in range(5)]
    assert sides == [16, 16, 24, 32, 32]
    recipe = ProgressiveRandomResizedCrop(160, 192, 65, 76)
    for epoch, side in ((0, 160), (65, 160), (76, 192), (87, 192)):
        recipe.set_epoch(epoch)
        assert recipe.size == (side, side)


def test_digits():
    train, test = Digits("train"), Digits("test", size=12)
    assert (len(train), len(test)) == (1438, 359)
    assert train.images.shape == (1438, 1, 8, 8) and train.images.max() == 255
    assert test.images.shape == (359, 1, 12, 12)
    for arguments, message in (
        (dict(split="val"), "split='val'"),
        (dict(size=0), "size=0 must be an integer >= 1"),
        (dict(subset=0), "subset=0"),
    ):
        with pytest.raises(ValueError, match=message):
            Digits(**arguments)


def test_cluttered_digits():
    """The digit is found again in each image, and no two runs or splits see other ones."""
    options = dict(size=12, fragments=0, noise=0, scenes=2)
    plain, scenes = Digits("test"), ClutteredDigits("test", **options)
    assert scenes.images.shape == (718, 1, 12, 12)
    assert scenes.labels.equal(plain.labels.repeat(2))
    windows = scenes.images.unfold(2, 8, 1).unfold(3, 8, 1).flatten(1, 3)
    same = (windows == plain.images.repeat(2, 1, 1, 1)).flatten(2).all(2)
    assert same.any(1).all()
    places = same.float().argmax(1)
    assert len(places.unique()) == 25 and not places[:359].equal(places[359:])

    crowded, quiet, lone = (
        ClutteredDigits("test", fragments=fragments, side=4, noise=noise).images.int()
        for fragments, noise in ((4, 32), (4, 0), (0, 0))
    )
    assert crowded.equal(ClutteredDigits("test", fragments=4, side=4, noise=32).images.int())
    assert (crowded - quiet).min() == 0 and (crowded - quiet).max() == 32
    assert 1.5 < quiet.sum() / lone.sum() < 3
    for arguments, message in (
        (dict(split="val"), "split='val'"),
        (dict(size=8), "size=8 must be an integer from 9"),
        (dict(fragments=-1), "fragments=-1"),
        (dict(side=9), "side=9"),
        (dict(noise=256), "noise=256"),
        (dict(noise=True), "noise=True must be"),
        (dict(scenes=0), "scenes=0"),
    ):
        with pytest.raises(ValueError, match=message):
            ClutteredDigits(**arguments)


def test_subset_is_balanced_and_deterministic():
    labels = torch.tensor([0, 0, 0, 0, 1, 2, 2, 1, 0])
    assert balanced_subset(labels, 6).tolist() == [0, 1, 4, 5, 6, 7]
    assert balanced_subset(labels, 9).tolist() == list(range(9))
    assert balanced_subset(labels, 4).tolist()[0] == 0
    dataset = Digits(subset=100)
    assert torch.bincount(dataset.labels).tolist() == [10] * 10
    for bad in (0, 10, 2.0, True):
        with pytest.raises(ValueError, match="subset="):
            balanced_subset(labels, bad)


@pytest.mark.parametrize("skip", [0, 3, 10])
def test_what_is_skipped_is_what_a_subset_keeps(skip):
    labels = torch.randint(3, (40,), generator=torch.Generator().manual_seed(0))
    first = balanced_subset(labels, skip).tolist() if skip else []
    rest = balanced_subset(labels, None, skip).tolist()
    assert sorted(first + rest) == list(range(40))
    assert set(balanced_subset(labels, 12, skip).tolist()) <= set(rest)
    for bad in (-1, 40, 1.0, True):
        with pytest.raises(ValueError, match="skip="):
            balanced_subset(labels, None, bad)
    with pytest.raises(ValueError, match="subset=38 .* to 37 with skip=3"):
        balanced_subset(labels, 38, 3)


def images_of(dataset):
    """The images as bytes, and how many there are of each class."""
    images = {image.numpy().tobytes() for image in dataset.images}
    return images, torch.bincount(dataset.labels).tolist()


@pytest.mark.system
def test_a_split_for_choices_is_disjoint_and_balanced(shared_data):
    """Of CIFAR-10, behind the images that the subset's trainings see."""
    root = str(shared_data / "cifar10")
    train, counts = images_of(CIFAR10(root, "train", subset=10000))
    choices, of_choices = images_of(CIFAR10(root, "train", subset=5000, skip=10000))
    test, _ = images_of(CIFAR10(root, "test"))
    assert counts == [1000] * 10 and of_choices == [500] * 10
    assert not train & choices and not test & choices and not train & test


def test_a_split_of_a_folder_for_choices(folder):
    train = ImageFolder(str(folder), "train", subset=9)
    choices = ImageFolder(str(folder), "train", skip=9)
    assert choices.labels.tolist() == [0, 1, 2]
    assert not set(train.paths) & set(choices.paths)
    assert set(ImageFolder(str(folder), "train").paths) == {*train.paths, *choices.paths}


def test_cifar10_packed(shared_data):
    test = CIFAR10(str(shared_data / "cifar10"), "test")
    assert test.images.shape == (10000, 3, 32, 32)
    digest = hashlib.sha256(test.images.permute(0, 2, 3, 1).contiguous().numpy().tobytes())
    assert digest.hexdigest().startswith("25a508aee148b4ccf689df271258bb61")
    assert torch.bincount(test.labels).tolist() == [1000] * 10
    small = CIFAR10(str(shared_data / "cifar10"), "test", subset=50)
    assert torch.bincount(small.labels).tolist() == [5] * 10


def test_cifar10_of_torchvision(tmp_path, monkeypatch):
    import pickle

    from torchvision.datasets import CIFAR10 as Original

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = np.arange(5 * 3072, dtype=np.int64).astype(np.uint8).reshape(5, 3072)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": [0, 1, 2, 3, 4]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr(Original, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    (folder / "test_batch").unlink()
    with pytest.raises(FileNotFoundError, match="test_batch"):
        CIFAR10(str(tmp_path), "test")
    train = CIFAR10(str(tmp_path))
    assert train.images.shape == (25, 3, 32, 32)
    assert train.images[1].flatten().numpy().tolist() == pixels[1].tolist()
    assert train.labels[:6].tolist() == [0, 1, 2, 3, 4, 0]


def test_samples_carry_the_epoch():
    dataloader = loader(dict(type="Digits", subset=20))
    assert isinstance(dataloader.sampler, EpochSampler)
    dataloader.sampler.set_epoch(4)
    samples = list(dataloader.sampler)
    assert {sample.epoch for sample in samples} == {4}
    assert sorted(sample.index for sample in samples) == list(range(20))
    assert not hasattr(dataloader.sampler, "skip")
    endless, again = (
        EpochSampler(range(20), 0, dict(type="InfiniteSampler", shuffle=True)) for _ in range(2)
    )
    samples = list(itertools.islice(endless, 45))
    assert [sample.epoch for sample in samples] == [0] * 20 + [1] * 20 + [2] * 5
    again.skip(25)
    assert list(itertools.islice(again, 20)) == samples[25:]


def test_endless_epochs_are_those_of_all_ranks(monkeypatch):
    monkeypatch.setattr("mmengine.dataset.sampler.get_dist_info", lambda: (1, 2))
    sampler = EpochSampler(range(4), 0, {"type": "InfiniteSampler"})
    samples = itertools.islice(sampler, 6)
    assert [sample.epoch for sample in samples] == [0, 0, 1, 1, 2, 2]


def test_fewer_images_than_a_batch():
    config = dict(dataset=dict(type="Digits", subset=20), batch_size=30, drop_last=True)
    with pytest.raises(ValueError, match="batch_size=30 is more than the 20 images"):
        build_dataloader(config, 0)
    assert len(build_dataloader({**config, "drop_last": False}, 0)) == 1
    build_dataloader({**config, "sampler": dict(type="InfiniteSampler")}, 0)


def test_folders_without_images_are_found_without_reading_any(tmp_path):
    (tmp_path / "val").mkdir()
    images = dict(data_root=str(tmp_path), split="val")
    with pytest.raises(FileNotFoundError, match="val: Couldn't find any class folder"):
        ImageFolder.check(**images)
    (tmp_path / "val" / "cat").mkdir()
    (tmp_path / "val" / "cat" / "note.txt").touch()
    with pytest.raises(FileNotFoundError, match="val: .* no valid file for the classes cat"):
        ImageFolder.check(**images)


def test_keys_are_well_mixed():
    """As splitmix64's published test vectors, and as many keys as samples."""
    gamma = 0x9E3779B97F4A7C15
    seeds = [(1234567 + step * gamma) % 2**64 for step in range(3)]
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [splitmix64(seed) for seed in seeds] == published
    assert splitmix64(np.array(seeds, dtype=np.uint64)).tolist() == published
    keys = {mixed_seed(0, epoch, index) for epoch in range(20) for index in range(1000)}
    assert len(keys) == 20_000 and max(keys) < 2**63


@DATASETS.register_module(force=True)
class PlainImages(torch.utils.data.Dataset):
    """A data set that knows nothing of FST, as docs/training_options.md has one."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        image = torch.full((1, 8, 8), 3 * index, dtype=torch.uint8)
        return {"inputs": image, "labels": index % 10}


def test_a_registered_data_set_trains(train):
    plain = dict(type="PlainImages")
    loaders = "".join(f'{name}_dataloader["dataset"] = {plain}\n' for name in ("train", "val"))
    loaders += 'val_dataloader["sampler"] = dict(type="DefaultSampler", shuffle=False)\n'
    assert (train(extra=loaders) / "epoch_2.pth").is_file()
