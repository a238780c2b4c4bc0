"""tools/test.py --show-dir: a file per test image, with the annotated boxes and those found."""

import cv2
import pytest
import torch

from fst.cli import main


@pytest.mark.system
def test_show_dir(train, write_config, drawn, tmp_path):
    work_dir = train("run", "ssd", "--cfg-options", "train_cfg.max_epochs=1")
    trained = (write_config("ssd"), str(work_dir / "epoch_1.pth"))
    names = (drawn / "ImageSets" / "Main" / "val.txt").read_text().split()
    found = {}
    for threshold in ("0.0", "1"):
        folder = tmp_path / f"drawn{threshold}"
        options = ("--show-dir", str(folder), "--show-score-thr", threshold)
        main(["test", *trained, "--work-dir", str(tmp_path / "test"), *options])
        assert sorted(path.name for path in folder.iterdir()) == [f"{n}.jpg" for n in sorted(names)]
        found[threshold] = [cv2.imread(str(folder / f"{name}.jpg")).astype(int) for name in names]
    for name, with_boxes, without in zip(names, found["0.0"], found["1"], strict=True):
        height, width, _ = cv2.imread(str(drawn / "JPEGImages" / f"{name}.jpg")).shape
        assert with_boxes.shape == without.shape == (height, 2 * width, 3)
        assert abs(with_boxes - without)[:, :width].mean() < 1  # the annotated boxes
        assert (abs(with_boxes - without)[:, width:].max(-1) > 16).mean() > 0.05


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--show-score-thr", "0.5"), "--show-score-thr needs --show-dir"),
        (
            ("--show-dir", "new", "--show-score-thr", "30"),
            "--show-score-thr=30.0 must be a number in",
        ),
        (("--show-dir", __file__), "is a file"),
    ],
)
def test_wrong_options(write_config, tmp_path, options, expected, error_of):
    torch.save({}, checkpoint := tmp_path / "a.pth")
    given = (write_config("ssd"), checkpoint, "--work-dir", tmp_path / "never")
    assert expected in error_of("test", *given, *options)
    assert not (tmp_path / "never").exists()


def test_classifiers_have_no_boxes(tmp_path, error_of):
    config = tmp_path / "a.py"
    config.write_text("model = dict(type='Classifier')\n")
    torch.save({}, checkpoint := tmp_path / "a.pth")
    message = error_of("test", config, checkpoint, "--show-dir", tmp_path / "drawn")
    assert "--show-dir draws the boxes of a detector" in message
