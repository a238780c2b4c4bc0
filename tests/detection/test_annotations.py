"""Single boxes, images and files; the report."""

import cv2
import pytest
from PIL import Image

from fst.detection.annotations import Kind, Problems, check_box, read_coco
from fst.detection.images import image_size


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        ((0, 0, 10, 10), ((0, 0, 10, 10), None)),
        ((3, 3, 3.5, 9), (None, Kind.NO_AREA)),
        ((5, 5, 4, 9), (None, Kind.NO_AREA)),
        ((-9, 0, 0, 5), (None, Kind.OUTSIDE)),
        ((0, 20, 5, 25), (None, Kind.OUTSIDE)),
        ((-5, -5, 25, 15), ((0, 0, 20, 10), Kind.REACHING)),
        ((0, 0, 21, 11), ((0, 0, 21, 11), None)),
    ],
)
def test_check_box(box, expected):
    assert check_box(box, (20, 10)) == expected


@pytest.mark.parametrize("extension", ["jpg", "png", "bmp", "webp", "tiff", "gif"])
def test_image_size(tmp_path, extension):
    path = tmp_path / f"image.{extension}"
    with pytest.raises(FileNotFoundError):
        image_size(str(path))
    Image.new("RGB", (90, 60)).save(path)
    assert image_size(str(path)) == (90, 60)
    path.write_bytes(path.read_bytes()[:4])
    with pytest.raises(ValueError):
        image_size(str(path))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_size_is_that_of_the_loaded_image(tmp_path, orientation):
    path, exif = str(tmp_path / "image.jpg"), Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (90, 60)).save(path, exif=exif)
    assert image_size(path) == cv2.imread(path).shape[1::-1]


def test_report_counts_by_kind():
    problems = Problems("a.json")
    problems.raise_if_any()
    for number in range(5):
        problems.add(Kind.MISSING_IMAGE, f"{number}.jpg")
    with pytest.raises(FileNotFoundError, match="5 x image missing: 0.jpg; 1.jpg; 2.jpg; and 2 mo"):
        problems.raise_if_any()
    problems.add(Kind.NO_AREA, "box")
    with pytest.raises(ValueError, match="6 problems"):
        problems.raise_if_any()


def test_read_coco_adds_absent_annotations(tmp_path):
    (tmp_path / "a.json").write_text('{"images": [{}], "categories": [{"id": 1, "name": "a"}]}')
    assert read_coco(str(tmp_path / "a.json"))["annotations"] == []
