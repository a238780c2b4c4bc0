"""Single boxes, images and files; the report."""

import numpy as np
import pytest
from PIL import Image

from fst.detection.annotations import Kind, Problems, check_box, read_coco
from fst.detection.images import probe_image


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
def test_probe_image(tmp_path, extension):
    path = tmp_path / f"whole.{extension}"
    pixels = np.random.default_rng(0).integers(256, size=(60, 90, 3), dtype="u1")
    # the end marker within the file, as an embedded thumbnail has it, does not make it whole
    Image.fromarray(pixels).save(path, **({"comment": b"\xff\xd9"} if extension == "jpg" else {}))
    assert probe_image(str(path)).stored == (90, 60)
    content = path.read_bytes()
    path.write_bytes(content + b"\0" * 5000)
    assert probe_image(str(path)).stored == (90, 60)
    for length in (len(content) * 2 // 3, 80, 10, 0):
        path.write_bytes(content[:length])
        assert probe_image(str(path)).problem is Kind.BROKEN_IMAGE
    path.unlink()
    assert probe_image(str(path)).problem is Kind.MISSING_IMAGE


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
