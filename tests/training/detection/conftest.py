"""Tiny detectors on a few images, and what tests do with them."""

import itertools
import os
import sys

import pytest

pytest.importorskip("mmdet", reason="needs the det extra: pip install 'fst-train[det]'")

from mmengine.registry import DefaultScope

from fst.cli import main
from fst.training.detection import data, ops
from tests.training.detection import toy
from tests.training.engine.conftest import (  # noqa: F401 (fixtures)
    assert_same_state,
    error_of,
    shared_data,
    train_with_stop,
)

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    # laying out the text of a config for the log takes mmengine as long as these trainings
    monkeypatch.setattr("yapf.yapflib.yapf_api.FormatCode", lambda text, **_: (text, True))


@pytest.fixture
def mmdet_scope():
    """Names in configs are looked up among mmdet's, as in a run of it."""
    with DefaultScope.overwrite_default_scope("mmdet"):
        yield


@pytest.fixture
def stand_in(monkeypatch):
    """mmcv's Python functions with torchvision's under them, even where mmcv is compiled."""
    extension = ops.StandIn(ops.EXTENSION)
    monkeypatch.setattr(sys.modules["mmcv.ops.nms"], "ext_module", extension)
    monkeypatch.setattr(sys.modules["mmcv.ops.roi_align"], "roi_align", ops.roi_align)


@pytest.fixture(scope="session")
def drawn(tmp_path_factory):
    """Eight images to train on and four to test, in bccd's folders. Do not write to it."""
    return toy.draw_images(tmp_path_factory.mktemp("data") / "drawn")


@pytest.fixture
def own_drawn(tmp_path):
    """A copy of the drawn images that the test may change."""
    return toy.draw_images(tmp_path / "own_drawn")


@pytest.fixture
def write_config(tmp_path, drawn):
    """Writes the config of a detector, each time under a new name, and returns its path.

    Arguments as `toy.config_text`: detector, root, format, sparsity, lr, extra.
    """

    def write(detector, root=None, **options):
        path = tmp_path / f"{detector}{os.getpid()}_{next(_numbers)}.py"
        text = toy.config_text(detector, root or drawn, **options)
        # mmdet calls every visualizer "visualizer", and mmengine keeps one per name and process
        path.write_text(f'{text}visualizer = dict(name="{path.stem}")\n')
        return str(path)

    return write


@pytest.fixture
def train(tmp_path, write_config):
    """Trains in this process and returns the work dir; errors are raised as they are."""

    def run(name, detector, *arguments, **options):
        path = write_config(detector, **options)
        main(["train", path, "--work-dir", str(tmp_path / name), "--traceback", *arguments])
        return tmp_path / name

    return run


@pytest.fixture
def warned(monkeypatch):
    """The warnings of data sets so far."""
    lines = []
    monkeypatch.setattr(
        data, "print_log", lambda text, _, level=None: lines.append(text) if level else None
    )
    return lines
