"""COCO's metric, with classes in any order and images left out."""

import json
from pathlib import Path

import pytest
import torch
from mmdet.registry import DATASETS, METRICS

from fst.training.engine.config import load_config
from tests.training.detection import toy

CONFIGS = Path(__file__).resolve().parents[3] / "configs" / "detection"

pytestmark = pytest.mark.usefixtures("mmdet_scope")


def found(dataset, classes):
    """Results as a perfect detector gives them, with labels in the order of `classes`."""
    samples = []
    for index in range(len(dataset)):
        info = dataset.get_data_info(index)
        names = [dataset.metainfo["classes"][i["bbox_label"]] for i in info["instances"]]
        boxes = torch.tensor([i["bbox"] for i in info["instances"]], dtype=torch.float32)
        prediction = {
            "bboxes": boxes,
            "scores": torch.ones(len(boxes)),
            "labels": torch.tensor([classes.index(name) for name in names]),
        }
        samples.append(
            {
                "pred_instances": prediction,
                "img_id": info["img_id"],
                "ori_shape": (info["height"], info["width"]),
            }
        )
    return samples


@pytest.mark.parametrize("classes", [toy.CLASSES, ("Platelets", "RBC", "WBC"), ("WBC", "RBC")])
def test_metric_follows_the_order_of_classes(own_drawn, classes, caplog):
    path = own_drawn / "val.json"
    content = json.loads(path.read_text())
    content["categories"] = content["categories"][::-1]
    for annotation in content["annotations"]:
        del annotation["area"], annotation["iscrowd"]
    path.write_text(json.dumps(content))
    dataset = DATASETS.build(
        dict(
            type="COCOFormatDataset",
            metainfo=dict(classes=classes),
            data_root=str(own_drawn),
            ann_file="val.json",
            data_prefix=dict(img="JPEGImages"),
            bad_annotations="skip",
        )
    )
    metric = METRICS.build(dict(type="COCOFormatMetric", ann_file=str(path), classwise=True))
    metric.dataset_meta = dataset.metainfo
    metric.process({}, found(dataset, classes))
    assert metric.evaluate(toy.VAL)["coco/bbox_mAP"] == pytest.approx(1, abs=1e-3)

    # one class found nowhere: its own value falls, not another's
    results = found(dataset, classes)
    for sample in results:
        kept = sample["pred_instances"]["labels"] != 0
        sample["pred_instances"] = {k: v[kept] for k, v in sample["pred_instances"].items()}
    metric.process({}, results)
    values = metric.evaluate(toy.VAL)
    for label, name in enumerate(classes):
        assert values[f"coco/{name}_precision"] == (1 if label else 0)


def test_images_left_out_do_not_count(own_drawn, monkeypatch):
    lines = []
    monkeypatch.setattr(
        "fst.training.detection.metric.print_log", lambda text, *_: lines.append(text)
    )
    first = json.loads((own_drawn / "val.json").read_text())["images"][0]["file_name"]
    (own_drawn / "JPEGImages" / first).unlink()
    options = {"data_root": str(own_drawn), "classes": list(toy.CLASSES)}
    config = load_config(
        str(CONFIGS / "ssd_r18_small_bccd_coco.py"), {**options, "bad_annotations": "skip"}
    )
    dataset = DATASETS.build(config.val_dataloader.dataset)
    metric = METRICS.build(config.val_evaluator)
    metric.dataset_meta = dataset.metainfo
    metric.process({}, found(dataset, toy.CLASSES))
    assert metric.evaluate(toy.VAL - 1)["coco/bbox_mAP"] == pytest.approx(1, abs=1e-3)
    assert lines == [
        f"CocoMetric: {toy.VAL - 1} of {toy.VAL} images of the annotation file were evaluated; "
        "the others do not count"
    ]
