"""Detections drawn on the test images."""

from __future__ import annotations

import os.path as osp
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

import mmcv
from mmdet.visualization import DetLocalVisualizer
from mmengine.fileio import get
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from fst.detection.images import follows_exif


@HOOKS.register_module()
class DrawDetectionsHook(Hook):
    """Drawings of what a detector finds in each test image: a PNG named after the image.

    Images in several folders keep their folders below `folder`.

    Args:
        folder: Where the files go; it is created.
        score_thr: Detections of a lower score are not drawn.
    """

    def __init__(self, folder: str, score_thr: float = 0.3) -> None:
        if not 0 <= score_thr <= 1:
            raise ValueError(f"score_thr={score_thr!r} must be between 0 and 1.")
        if Path(folder).exists() and not Path(folder).is_dir():
            raise ValueError(f"{folder!r} is a file: detections are drawn into a folder.")
        self.folder, self.score_thr = folder, score_thr
        self._names: dict[str, str] = {}
        self._flag = "color"
        self._visualizer: DetLocalVisualizer | None = None

    def before_test(self, runner: Any) -> None:
        """Name the files, for all images together: no two get the same."""
        dataset = runner.test_loop.dataloader.dataset
        paths = [dataset.get_data_info(index)["img_path"] for index in range(len(dataset))]
        self._names = output_names(paths)
        transforms = getattr(getattr(dataset, "pipeline", None), "transforms", ())
        self._flag = "color" if follows_exif(transforms) else "color_ignore_orientation"
        self._visualizer = DetLocalVisualizer()
        self._visualizer.dataset_meta = dataset.metainfo

    def after_test_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Sequence[Any] = ()
    ) -> None:
        """Draw one batch."""
        for sample in outputs:
            image = mmcv.imfrombytes(get(sample.img_path), self._flag, channel_order="rgb")
            self._visualizer.add_datasample(
                "detections",
                image,
                sample.cpu(),
                draw_gt=False,
                pred_score_thr=self.score_thr,
                out_file=osp.join(self.folder, self._names[sample.img_path]),
            )

    def after_test(self, runner: Any) -> None:
        """Say where the files are."""
        runner.logger.info(
            f"Drew detections of a score from {self.score_thr:g} on: {len(self._names)} images in "
            f"{self.folder}"
        )


def output_names(paths: Sequence[str]) -> dict[str, str]:
    """A PNG's name for each image: its own below their common folder, whole where it is ambiguous.

    "a/1.jpg", "a/2.jpg" give "1.png", "2.png"; "a/1.jpg", "b/1.bmp", "b/1.jpg" give "a/1.png",
    "b/1.bmp.png", "b/1.jpg.png".
    """
    common = osp.commonpath([osp.dirname(osp.abspath(path)) for path in paths]) if paths else ""
    inner = {path: PurePath(osp.relpath(path, common)) for path in dict.fromkeys(paths)}
    uses = Counter(path.with_suffix("") for path in inner.values())
    return {
        path: str(short.with_suffix(".png") if uses[short.with_suffix("")] == 1 else f"{short}.png")
        for path, short in inner.items()
    }
