"""Image files as users have them: 16 bits, bombs, pipes, folders that link to themselves."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from fst.training.engine import ImageFolder
from fst.training.engine.data.images import faults, opened

WIDE = np.array([[0, 128, 129, 257], [32767, 32896, 65278, 65535]], dtype=np.uint16)
EIGHT = np.array([[0, 0, 1, 1], [127, 128, 254, 255]], dtype=np.uint8)  # of value / 257, rounded


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_16_bits_are_scaled_to_8(tmp_path, suffix):
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / f"wide.{suffix}"
    Image.fromarray(WIDE).save(path)
    assert np.array_equal(np.asarray(opened(str(path))), EIGHT)
    pixels = ImageFolder(str(tmp_path))[0]["inputs"]
    assert np.array_equal(pixels.numpy(), np.stack([EIGHT] * 3))


@pytest.mark.parametrize(("dtype", "mode"), [("int32", "I"), ("float32", "F")])
def test_modes_without_a_scale_are_refused(tmp_path, dtype, mode):
    path = str(tmp_path / "wide.tif")
    Image.fromarray(np.ones((2, 2), dtype)).save(path)
    with pytest.raises(ValueError, match=f"wide.tif' cannot be read: its mode '{mode}'"):
        opened(path)
    assert f"mode '{mode}'" in faults([path], "")[path]


def test_a_decompression_bomb_is_named(tmp_path, monkeypatch):
    path = str(tmp_path / "bomb.png")
    Image.new("L", (40, 40)).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match="bomb.png' cannot be read: .* decompression bomb"):
        opened(path)
    assert faults([path], "").keys() == {path}


def test_a_pipe_is_no_image(tmp_path):
    path = str(tmp_path / "pipe.jpg")
    os.mkfifo(path)
    assert "no regular file" in faults([path], "")[path]
    with pytest.raises(ValueError, match="pipe.jpg' cannot be read: it is no regular file"):
        opened(path)


KINDS = ("jpg", "png", "bmp", "gif", "webp", "tif", "ppm")


def test_whole_files_and_parts_of_files(tmp_path):
    """Of nothing but the header, of a half, and of all but the end."""
    pixels = np.random.default_rng(0).integers(0, 255, (60, 50, 3), dtype=np.uint8)
    whole = [str(tmp_path / f"{n}.{kind}") for n, kind in enumerate(KINDS)]
    parts = []
    for path in whole:
        Image.fromarray(pixels).save(path)
        written = Path(path).read_bytes()
        for length in (6, len(written) // 2, len(written) - 8):
            parts.append(f"{path}-{length}")
            Path(parts[-1]).write_bytes(written[:length])
    assert faults(whole, "") == {}
    assert list(faults(parts, "")) == parts


def test_what_follows_an_image_is_no_fault(tmp_path, monkeypatch):
    """Padding, and the films behind the pictures of telephones; those files alone are decoded."""
    paths = [str(tmp_path / name) for name in ("plain.jpg", "padded.jpg", "film.jpg")]
    for path, behind in zip(paths, (b"", bytes(40), b"film" * 99), strict=True):
        Image.new("RGB", (9, 8)).save(path)
        with open(path, "ab") as file:
            file.write(behind)
    decoded, load = [], JpegImageFile.load
    monkeypatch.setattr(JpegImageFile, "load", lambda i: decoded.append(i.filename) or load(i))
    assert faults(paths, "") == {} and set(decoded) == {paths[2]}
