"""The two formats' data sets of drawn images, and what can be wrong with their files."""

import json
import re

from fst.training.detection import data
from tests.training.detection import toy

META = {"classes": toy.CLASSES}


def voc(root, kind=data.VOCFormatDataset, split="train", **options):
    options = {"metainfo": META, "filter_cfg": dict(filter_empty_gt=True), **options}
    return kind(
        data_root=str(root),
        ann_file=f"ImageSets/Main/{split}.txt",
        data_prefix=dict(sub_data_root=""),
        **options,
    )


def coco(root, kind=data.COCOFormatDataset, split="train", **options):
    options = {"metainfo": META, "filter_cfg": dict(filter_empty_gt=True), **options}
    return kind(
        data_root=str(root), ann_file=f"{split}.json", data_prefix=dict(img="JPEGImages"), **options
    )


def infos(dataset):
    return [dataset.get_data_info(index) for index in range(len(dataset))]


def edit_xml(root, old, new, name="drawn_000", count=1):
    path = root / "Annotations" / f"{name}.xml"
    text = path.read_text()
    changed = re.sub(old, new, text, count=count, flags=re.DOTALL)
    assert changed != text
    path.write_text(changed)


def edit_json(root, change, split="train"):
    path = root / f"{split}.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def first_box(root, values):
    """Gives the first object other corners, in both formats: VOC's count from 1, COCO's from 0."""
    x1, y1, x2, y2 = values
    corners = zip(("xmin", "ymin", "xmax", "ymax"), values, strict=True)
    edit_xml(
        root,
        "<bndbox>.*?</bndbox>",
        f"<bndbox>{''.join(f'<{tag}>{value + 1}</{tag}>' for tag, value in corners)}</bndbox>",
    )
    bbox = [x1, y1, x2 - x1, y2 - y1]
    edit_json(root, lambda content: content["annotations"][0].update(bbox=bbox))


def first_class(root, name):
    edit_xml(root, "<name>.*?</name>", f"<name>{name}</name>")

    def change(content):
        content["categories"].append({"id": 9, "name": name})
        content["annotations"][0]["category_id"] = 9

    edit_json(root, change)


def image_path(root, name="drawn_000"):
    return root / "JPEGImages" / f"{name}.jpg"
