"""Single boxes, images and COCO files."""

import json
import math

import cv2
import pytest
from PIL import Image

from fst.training.detection.annotations import check_box, read_coco
from fst.training.detection.images import image_size


@pytest.mark.parametrize(
    ("box", "usable", "is_wrong"),
    [
        ((0, 0, 10, 10), (0, 0, 10, 10), False),
        ((3, 3, 3.5, 9), None, True),
        ((5, 5, 4, 9), None, True),
        ((-9, 0, 0, 5), None, True),
        ((0, 20, 5, 25), None, True),
        ((-5, -5, 25, 15), (0, 0, 20, 10), True),
        ((0, 0, 21, 11), (0, 0, 21, 11), False),
        ((math.nan, 0, 10, 10), None, True),
        ((0, 0, 10, math.nan), None, True),
    ],
)
def test_check_box(box, usable, is_wrong):
    result, fault = check_box(box, (20, 10))
    assert result == usable and bool(fault) == is_wrong


@pytest.mark.parametrize("extension", ["jpg", "png", "bmp", "webp", "tiff", "gif"])
def test_image_size(tmp_path, extension):
    path = tmp_path / f"image.{extension}"
    with pytest.raises(FileNotFoundError):
        image_size(str(path))
    Image.new("RGB", (90, 60)).save(path)
    assert image_size(str(path)) == (90, 60)
    written = path.read_bytes()
    for length in (4, len(written) // 2):
        path.write_bytes(written[:length])
        with pytest.raises(ValueError):
            image_size(str(path))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_size_is_that_of_the_loaded_image(tmp_path, orientation):
    path, exif = str(tmp_path / "image.jpg"), Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (90, 60)).save(path, exif=exif)
    assert image_size(path) == cv2.imread(path).shape[1::-1]


IMAGE = {"id": 1, "file_name": "a.jpg"}
CATEGORY = {"id": 1, "name": "a"}
ANNOTATION = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4]}


def coco_file(folder, images=(IMAGE,), categories=(CATEGORY,), **more):
    path = folder / "a.json"
    path.write_text(json.dumps({"images": images, "categories": categories, **more}))
    return str(path)


def test_read_coco_adds_what_is_absent(tmp_path):
    assert read_coco(coco_file(tmp_path))["annotations"] == []
    (annotation,) = read_coco(coco_file(tmp_path, annotations=[ANNOTATION]))["annotations"]
    assert annotation == {**ANNOTATION, "area": 12, "iscrowd": 0}
    given = {**ANNOTATION, "area": 5, "iscrowd": 1}
    assert read_coco(coco_file(tmp_path, annotations=[given]))["annotations"] == [given]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"images": [IMAGE, IMAGE]}, r"at images\[1\]: id 1 is used twice"),
        ({"annotations": [ANNOTATION] * 2}, r"at annotations\[1\]: id 1 is used twice"),
        ({"categories": [CATEGORY, {"id": 1, "name": "b"}]}, r"at categories\[1\]: id 1 is used"),
        ({"images": [{"id": 1}]}, r"at images\[0\]: no file_name"),
        ({"images": [3]}, r"at images\[0\]: "),
        ({"images": [{**IMAGE, "id": [2]}]}, r"at images\[0\]: "),
        ({"categories": [{"id": 1}]}, r"at categories\[0\]: no name"),
        ({"annotations": [{"id": 1}]}, r"at annotations\[0\]: no bbox, category_id, image_id"),
        ({"annotations": [{**ANNOTATION, "bbox": [1, 2, 3]}]}, r"at annotations\[0\]: "),
        ({"annotations": [{**ANNOTATION, "bbox": [1, 2, None, 4]}]}, r"at annotations\[0\]: "),
        ({"annotations": [{**ANNOTATION, "bbox": [1, 2, "x", 4]}]}, r"at annotations\[0\]: .*'x'"),
        ({"annotations": 3}, "'int' object is not iterable"),
    ],
)
def test_coco_files_of_another_form(tmp_path, content, expected):
    with pytest.raises(ValueError, match=f"COCO annotation file '.*a.json'.*{expected}"):
        read_coco(coco_file(tmp_path, **content))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", "Expecting value"), ("[]", "mapping"), ("{}", "no 'images'"), ("{", "Expecting")],
)
def test_other_files(tmp_path, text, expected):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=f"COCO annotation file '.*a.json': .*{expected}"):
        read_coco(str(tmp_path / "a.json"))
