"""COCO's average precision for data sets of any classes, some images of which may be left out."""

from __future__ import annotations

import logging
from typing import Any

from mmdet.datasets.api_wrappers import COCO
from mmdet.evaluation import CocoMetric
from mmdet.registry import METRICS
from mmengine.fileio import get_local_path
from mmengine.logging import print_log

from fst.training.detection.annotations import category_ids, read_coco


@METRICS.register_module()
class COCOFormatMetric(CocoMetric):
    """mmdet's CocoMetric where labels follow ``classes``, not the file's order of categories.

    It evaluates the images that were seen, and says so if the annotation file lists more. Boxes
    that a data set left out still count as objects to find. ``area`` and ``iscrowd`` may be absent.

    Raises:
        ValueError: ``ann_file`` is no COCO file.
    """

    def __init__(self, ann_file: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._ann_file = ann_file
        if ann_file is not None:
            with get_local_path(ann_file, backend_args=self.backend_args) as path:
                self._coco_api = _indexed(read_coco(path))

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """The metrics of the images in ``results``."""
        if self._coco_api is not None:
            self._ids_of_labels = category_ids(
                self._coco_api.dataset, self.dataset_meta["classes"], self._ann_file
            )
            self.cat_ids = sorted(self._ids_of_labels)  # the order of COCOeval's results
            listed = self._coco_api.get_img_ids()
            seen = {ground_truth["img_id"] for ground_truth, _ in results}
            self.img_ids = [image for image in listed if image in seen]
            if len(self.img_ids) < len(listed):
                print_log(
                    f"CocoMetric: {len(self.img_ids)} of {len(listed)} images of the annotation "
                    "file were evaluated; the others do not count",
                    "current",
                    logging.WARNING,
                )
        return super().compute_metrics(results)

    def results2json(self, results: Any, outfile_prefix: str) -> dict[str, str]:
        """Write predictions with the category ids of their labels."""
        if self._coco_api is None or self.cat_ids is None:
            return super().results2json(results, outfile_prefix)
        evaluated, self.cat_ids = self.cat_ids, self._ids_of_labels
        try:
            return super().results2json(results, outfile_prefix)
        finally:
            self.cat_ids = evaluated


def _indexed(data: dict[str, Any]) -> COCO:
    api = COCO()
    api.dataset = data
    api.createIndex()
    api.img_ann_map, api.cat_img_map = api.imgToAnns, api.catToImgs
    return api
