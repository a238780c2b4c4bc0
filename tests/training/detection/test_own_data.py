"""Data of one's own: layouts that are found, anchors that are compared with the boxes."""

import json
import shutil

import pytest
import torch

from fst.training.detection.anchors import fitted_sizes, fitting
from fst.training.engine.config import load_config
from tests.training.detection import toy

CONFIG = "fst::configs/detection/ssd_r18_small_bccd{}.py"


def coco_2017(root):
    for split in ("train", "val"):
        names = [
            image["file_name"]
            for image in json.loads((root / f"{split}.json").read_text())["images"]
        ]
        (root / f"{split}2017").mkdir()
        for name in names:
            shutil.move(root / "JPEGImages" / name, root / f"{split}2017" / name)
        (root / "annotations").mkdir(exist_ok=True)
        shutil.move(root / f"{split}.json", root / "annotations" / f"instances_{split}2017.json")


def voc_devkit(root):
    folder = root / "VOCdevkit" / "VOC2012"
    folder.mkdir(parents=True)
    for part in ("JPEGImages", "Annotations", "ImageSets"):
        shutil.move(root / part, folder / part)


@pytest.mark.parametrize(
    ("suffix", "arrange"),
    [
        ("_coco", lambda root: None),
        ("_coco", coco_2017),
        ("", voc_devkit),
    ],
)
@pytest.mark.usefixtures("mmdet_scope")
def test_layouts_are_found(own_drawn, suffix, arrange):
    from mmdet.registry import DATASETS

    arrange(own_drawn)
    config = load_config(CONFIG.format(suffix), {"data_root": str(own_drawn)})
    assert sorted(config.classes) == sorted(toy.CLASSES)
    for name, count in (("train", toy.TRAIN), ("val", toy.VAL), ("test", toy.VAL)):
        dataset = DATASETS.build(config[f"{name}_dataloader"].dataset)
        assert len(dataset) == count and dataset[0]["inputs"].shape[0] == 3


def test_fitted_sizes_fit():
    generator = torch.Generator().manual_seed(0)
    boxes = 30 + 200 * torch.rand(500, 2, generator=generator)
    assert fitting(boxes, torch.tensor([[14.0, 14.0], [30.0, 30.0]])) < 0.1
    least, most = fitted_sizes(boxes, 3)
    sides = torch.tensor([least, most]).float()
    assert least == sorted(least) and most[:-1] == least[1:]
    square = torch.cat([sides[0], (sides[0] * sides[1]).sqrt()])
    anchors = torch.cat([torch.stack([square * r**0.5, square / r**0.5], 1) for r in (1, 2, 0.5)])
    assert fitting(boxes, anchors) > 0.9
    assert fitted_sizes(torch.ones(9, 2), 3) == ([1, 2, 3], [2, 3, 4])


@pytest.mark.system
def test_a_training_says_whether_anchors_fit(train):
    def said(name, *options, extra=""):
        work_dir = train(name, "ssd", *options, extra=extra)
        return next(work_dir.glob("*/*.log")).read_text().partition("Anchors: ")[2]

    assert "of the training boxes, as Resize makes them, overlap the shape" in said("fits")
    tiny = "min_sizes=[2, 3, 4, 5], max_sizes=[3, 4, 5, 6]"
    text = said("misfits", extra=f"model['bbox_head']['anchor_generator'].update({tiny})\n")
    fitted = text.partition("Fitted to the boxes: ")[2].splitlines()[0].replace(", ", ",")
    assert fitted.startswith("model.bbox_head.anchor_generator.min_sizes=[")
    assert "Fitted to the boxes" not in said("fitted", "--cfg-options", *fitted.split())
