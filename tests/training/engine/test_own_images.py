"""`data_root`: a folder of images trains at once, classes are counted, outputs follow."""

import shutil

import pytest
from PIL import Image

from fst.cli import main
from fst.training.engine.config import load_config
from tests.images import write_images

OWN = """
_base_ = "fst::configs/own_images.py"
model = dict(
    architecture=dict(_delete_=True, source="timm", name="resnet18", channels=(8, 8, 8, 8))
)
train_cfg = dict(max_epochs=1, val_interval=1)
train_dataloader = dict(
    batch_size=4, num_workers=0, persistent_workers=False,
    dataset=dict(transforms=[dict(type="RandomResizedCrop", size=32)]),
)
val_dataloader = dict(
    batch_size=4, num_workers=0, persistent_workers=False,
    dataset=dict(transforms=[dict(type="Resize", size=(32, 32))]),
)
"""


@pytest.fixture
def images(tmp_path):
    counts = {"train/cats": 3, "train/raccoons": 5, "val/cats": 1, "val/raccoons": 2}
    return write_images(tmp_path / "mine", counts)


@pytest.fixture
def config(tmp_path):
    # names the run's log: two runs of one name within a second would share it
    path = tmp_path / f"{tmp_path.name}.py"
    path.write_text(OWN)
    return str(path)


def test_a_folder_of_images_is_trained_tested_and_folded(images, config, tmp_path, capsys):
    options = ["--cfg-options", f"data_root={images}"]
    work_dir = tmp_path / "run"
    assert main(["train", config, "--work-dir", str(work_dir), *options]) == 0
    said = capsys.readouterr().out
    train = f"{images}/train: 8 images of 2 classes (cats 3, raccoons 5), 3 x 32 x 32"
    assert train in said and f"{images}/val: 3 images of 2 classes (cats 1, raccoons 2)" in said
    checkpoint, folded = str(work_dir / "epoch_1.pth"), str(tmp_path / "folded.pth")
    assert main(["fold", config, checkpoint, folded, *options]) == 0
    shutil.rmtree(images / "train")  # the checkpoint names the classes
    assert main(["test", config, checkpoint, "--work-dir", str(tmp_path / "test"), *options]) == 0


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_an_image_that_is_broken_inside_is_named_in_one_line(
    images, config, tmp_path, workers, error_of
):
    """Only its decoding shows it, also where a process of its own decodes."""
    broken = images / "train" / "cats" / "1.png"
    Image.effect_noise((50, 40), 90).convert("P").save(broken, "GIF")
    whole = broken.read_bytes()
    broken.write_bytes(whole[: len(whole) // 2] + b";")
    options = ["--cfg-options", f"data_root={images}", f"train_dataloader.num_workers={workers}"]
    message = error_of("train", config, "--work-dir", tmp_path / "run", *options)
    assert message.startswith(f"error: image {str(broken)!r} cannot be read: ")


def test_outputs_and_topk_follow_the_classes(images, config, tmp_path):
    loaded = load_config(config, {"data_root": str(images)})
    assert loaded.model.architecture.num_classes == 2
    assert loaded.val_evaluator.topk == loaded.test_evaluator.topk == (1,)
    assert loaded.val_dataloader.dataset.data_root == str(images)
    loaded.dump(str(tmp_path / "dumped.py"))  # as a work dir keeps it
    for again in ({}, {"data_root": str(images)}):
        dumped = load_config(str(tmp_path / "dumped.py"), again)
        assert dumped.model.architecture.num_classes == 2
    loaded = load_config("fst::configs/srste_resnet50_imagenet.py", {"data_root": str(images)})
    assert loaded.model.architecture.num_classes == 2


def test_a_data_root_that_changes_nothing_is_refused(images, config, tmp_path):
    option = {"data_root": str(images)}
    for name in ("train", "val", "test"):
        option[f"{name}_dataloader.dataset.data_root"] = "elsewhere"
    with pytest.raises(ValueError, match="changes nothing"):
        load_config(config, option)
    with pytest.raises(ValueError, match="changes nothing"):
        load_config("fst::configs/demo_digits.py", {"data_root": str(images)})


def test_a_folder_without_splits_says_how_to_sort_it(images, config, tmp_path, error_of):
    options = ["--cfg-options", f"data_root={images / 'train'}"]
    message = error_of("train", config, "--work-dir", tmp_path / "run", *options)
    assert "sort them into data_root/train/<class>/" in message


def test_a_class_without_a_folder_to_validate_is_named(images, config, tmp_path, error_of):
    shutil.rmtree(images / "val" / "raccoons")
    options = ["--work-dir", str(tmp_path / "run"), "--cfg-options", f"data_root={images}"]
    message = error_of("train", config, *options)
    assert f"{images}/val: its classes are not those of the training" in message
    assert "missing: raccoons" in message


def test_a_broken_image_stops_before_the_training(images, config, tmp_path, error_of):
    broken = images / "val" / "raccoons" / "0.png"
    broken.write_text("no image")
    options = ["--work-dir", str(tmp_path / "run"), "--cfg-options", f"data_root={images}"]
    assert f"{broken}" in error_of("train", config, *options)
    assert not (tmp_path / "run").exists()


def test_epochs_set_the_training_and_its_schedules(images, config, tmp_path):
    data = {"data_root": str(images)}
    loaded = load_config("fst::configs/own_images.py", {**data, "epochs": 12})
    assert loaded.train_cfg.max_epochs == 12
    assert (loaded.param_scheduler[1].T_max, loaded.param_scheduler[1].end) == (11, 12)
    with pytest.raises(ValueError, match="epochs=1 must be at least 2.*LinearLR"):
        load_config("fst::configs/own_images.py", {**data, "epochs": 1})


@pytest.mark.system
def test_the_option_epochs_is_kept(images, tmp_path):
    changes = [f"data_root={images}", "train_dataloader.batch_size=4"]
    options = ["--work-dir", str(tmp_path / "run"), "--cfg-options", *changes]
    assert main(["train", "fst::configs/own_images.py", "--epochs", "2", *options]) == 0
    assert (tmp_path / "run" / "epoch_2.pth").is_file()
    kept = load_config(str(tmp_path / "run" / "own_images.py"))
    assert kept.train_cfg.max_epochs == 2 and kept.param_scheduler[1].end == 2
