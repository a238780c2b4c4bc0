"""Image files as users have them: 16 bits, bombs, pipes, parts of files."""

import os

import numpy as np
import pytest
from PIL import Image

from fst.training.engine import ImageFolder
from fst.training.engine.data.folder import opened

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


def test_a_decompression_bomb_is_named(tmp_path, monkeypatch):
    path = str(tmp_path / "bomb.png")
    Image.new("L", (40, 40)).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match="bomb.png' cannot be read: .* decompression bomb"):
        opened(path)


def test_a_pipe_is_no_image(tmp_path):
    path = str(tmp_path / "pipe.jpg")
    os.mkfifo(path)
    with pytest.raises(ValueError, match="pipe.jpg' cannot be read: it is no regular file"):
        opened(path)


@pytest.mark.parametrize("kind", ["jpg", "png", "bmp", "gif", "webp", "tif", "ppm"])
def test_parts_of_files_are_named(tmp_path, kind):
    """Nothing but the begin is found before a training, by its header; a half when it is read."""
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / f"0.{kind}"
    pixels = np.random.default_rng(0).integers(0, 255, (60, 50, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    ImageFolder.check(data_root=str(tmp_path))
    assert ImageFolder(str(tmp_path))[0]["inputs"].shape == (3, 60, 50)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=f"0.{kind}' cannot be read"):
        ImageFolder(str(tmp_path))[0]
    path.write_bytes(whole[:6])
    with pytest.raises(ValueError, match=f"0.{kind}' cannot be read"):
        ImageFolder.check(data_root=str(tmp_path))
