"""tools/test.py --show-dir: a PNG per test image, with what the detector finds."""

import cv2
import numpy as np
import pytest

from fst.detection.drawing import output_names
from fst.engine import cli


def test_show_dir(train, write_config, drawn, tmp_path):
    work_dir = train("run", "ssd", "--cfg-options", "train_cfg.max_epochs=1")
    trained = (write_config("ssd"), str(work_dir / "epoch_1.pth"))
    names = (drawn / "ImageSets" / "Main" / "val.txt").read_text().split()
    images = {}
    for threshold in ("0.0", "1"):
        folder = tmp_path / f"drawn{threshold}"
        options = ("--show-dir", str(folder), "--show-score-thr", threshold)
        cli.test([*trained, "--work-dir", str(tmp_path / "test"), *options])
        assert sorted(path.name for path in folder.iterdir()) == [f"{n}.png" for n in sorted(names)]
        images[threshold] = [cv2.imread(str(folder / f"{name}.png")).astype(int) for name in names]
    for name, with_boxes, without in zip(names, images["0.0"], images["1"], strict=True):
        original = cv2.imread(str(drawn / "JPEGImages" / f"{name}.jpg"))
        assert np.abs(without - original).mean() < 8  # matplotlib moves it by up to half a pixel
        assert np.mean(np.abs(with_boxes - without).max(-1) > 16) > 0.05


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--show-score-thr", "0.5"), "--show-score-thr needs --show-dir"),
        (("--show-dir", "new", "--show-score-thr", "30"), "score_thr=30.0 must be between"),
        (("--show-dir", __file__), "is a file"),
    ],
)
def test_wrong_options(write_config, tmp_path, capsys, options, expected):
    with pytest.raises(SystemExit) as stopped:
        cli.test([write_config("ssd"), "a.pth", "--work-dir", str(tmp_path / "never"), *options])
    assert stopped.value.code == 2 and expected in capsys.readouterr().err
    assert not (tmp_path / "never").exists()


def test_classifiers_have_no_boxes(tmp_path, capsys):
    config = tmp_path / "a.py"
    config.write_text("model = dict(type='Classifier')\n")
    with pytest.raises(SystemExit):
        cli.test([str(config), "a.pth", "--show-dir", str(tmp_path / "drawn")])
    assert "--show-dir draws the boxes of a detector" in capsys.readouterr().err


def test_output_names():
    assert output_names(["a/1.jpg", "a/2.jpg"]) == {"a/1.jpg": "1.png", "a/2.jpg": "2.png"}
    names = output_names(["x/a/1.jpg", "x/b/1.bmp", "x/b/1.jpg", "x/b/2.jpg"])
    assert list(names.values()) == ["a/1.png", "b/1.bmp.png", "b/1.jpg.png", "b/2.png"]
    assert output_names([]) == {}
