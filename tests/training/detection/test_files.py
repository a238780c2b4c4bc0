"""VOC's and COCO's files: what is read, what is refused, and that mmdet reads the same."""

import re
import shutil

import cv2
import pytest
from mmdet.datasets import CocoDataset, VOCDataset, XMLDataset

from fst.training.detection import data
from fst.training.detection.classes import classes_of
from tests.training.detection import toy
from tests.training.detection.damage import coco, edit_json, edit_xml, image_path, infos, voc


@pytest.mark.parametrize("extension", [".png", ".JPG", ".Jpg", ".jpeg", ".bmp", ".gif"])
def test_voc_images_of_other_formats(own_drawn, extension):
    pixels = cv2.imread(str(image_path(own_drawn)))
    image_path(own_drawn).unlink()
    path = image_path(own_drawn).with_suffix(extension)
    cv2.imwrite(str(path), pixels)
    assert voc(own_drawn).get_data_info(0)["img_path"] == str(path)


def test_voc_annotation_files(own_drawn, warned):
    (own_drawn / "Annotations" / "drawn_000.xml").unlink()
    with pytest.raises(ValueError, match="No such file .*drawn_000.xml"):
        voc(own_drawn)
    (own_drawn / "Annotations" / "drawn_000.xml").write_text("<annotation><object>")
    with pytest.raises(ValueError, match="drawn_000.xml: ParseError"):
        voc(own_drawn)
    split = own_drawn / "ImageSets" / "Main" / "train.txt"
    split.write_text("drawn_002\n" + split.read_text() + "\n\n")
    with pytest.raises(ValueError, match="train.txt.* drawn_002 is listed 2 times"):
        voc(own_drawn)
    assert len(voc(own_drawn, bad_annotations="skip")) == 7
    assert "2 faults" in warned[-1]
    split.write_text("\n")
    with pytest.raises(ValueError, match="no image with an object"):
        voc(own_drawn)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<name>.*?</name>", ""),
        ("<bndbox>.*?</bndbox>", ""),
        ("<xmin>.*?</xmin>", "<xmin>left</xmin>"),
        ("<ymax>.*?</ymax>", "<ymax>inf</ymax>"),
        ("<ymax>.*?</ymax>", "<ymax>nan</ymax>"),
    ],
)
def test_malformed_voc_objects(own_drawn, old, new, warned):
    edit_xml(own_drawn, old, new)
    with pytest.raises(ValueError, match="drawn_000.xml: "):
        voc(own_drawn)
    assert len(voc(own_drawn, bad_annotations="skip")) == 7


@pytest.mark.parametrize("what", ["images", "annotations", "categories"])
def test_ids_that_are_used_twice(own_drawn, what):
    edit_json(own_drawn, lambda c: c[what].append(dict(c[what][0])))
    for policy in ("error", "skip"):
        with pytest.raises(ValueError, match=f"train.json' at {what}.*: id 1 is used twice"):
            coco(own_drawn, bad_annotations=policy)


def test_a_class_without_a_category(drawn):
    for policy in ("error", "skip"):
        with pytest.raises(ValueError, match="no category named 'Amoeba'.*RBC, WBC, Platelets"):
            coco(drawn, metainfo={"classes": ("RBC", "Amoeba")}, bad_annotations=policy)


@pytest.mark.parametrize("filter_cfg", [None, dict(filter_empty_gt=True, min_size=100)])
def test_voc_equals_mmdet(own_drawn, filter_cfg, warned):
    edit_xml(own_drawn, "<difficult>0", "<difficult>1")
    edit_xml(own_drawn, "<height>96", "<height>96.0", name="drawn_001")
    edit_xml(own_drawn, "<height>96.0", "<height>96", name="drawn_001")
    options = {"filter_cfg": filter_cfg and {**filter_cfg, "min_size": 90, "bbox_min_size": 25}}
    ours, theirs = (voc(own_drawn, kind, **options) for kind in (data.VOCFormatDataset, XMLDataset))
    assert infos(ours) == infos(theirs)
    assert any(i["ignore_flag"] for info in infos(ours) for i in info["instances"])


def test_coco_equals_mmdet(own_drawn):
    def change(content):
        content["annotations"][1]["iscrowd"] = 1
        content["annotations"][2]["ignore"] = True
        content["annotations"][3]["segmentation"] = [[1, 1, 9, 1, 9, 9]]
        del content["annotations"][-4:]

    edit_json(own_drawn, change)
    for options in ({"filter_cfg": None}, {"filter_cfg": dict(filter_empty_gt=True, min_size=32)}):
        ours, theirs = (
            coco(own_drawn, kind, **options) for kind in (data.COCOFormatDataset, CocoDataset)
        )
        assert infos(ours) == infos(theirs)


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_bccd_is_whole_and_equals_mmdet(shared_data, split):
    root = shared_data / "bccd"
    options = {"test_mode": split != "train"}
    assert infos(voc(root, split=split, **options)) == infos(
        voc(root, XMLDataset, split=split, **options)
    )
    assert infos(coco(root, split=split, **options)) == infos(
        coco(root, CocoDataset, split=split, **options)
    )


def test_pascal_voc_and_coco_keep_their_classes(own_drawn):
    folder = own_drawn / "VOC2007"
    folder.mkdir()
    for part in ("JPEGImages", "Annotations", "ImageSets"):
        shutil.move(own_drawn / part, folder / part)
    for path in (folder / "Annotations").iterdir():
        path.write_text(re.sub("<name>.*?</name>", "<name>cat</name>", path.read_text()))
    dataset = data.CheckedVOCDataset(
        data_root=str(own_drawn),
        ann_file="VOC2007/ImageSets/Main/train.txt",
        data_prefix=dict(sub_data_root="VOC2007/"),
    )
    assert dataset.metainfo["classes"] == VOCDataset.METAINFO["classes"]
    assert dataset.metainfo["dataset_type"] == "VOC2007"
    assert dataset[0]["instances"][0]["bbox_label"] == 7

    def change(content):
        content["categories"] = [
            {"id": 2 * i, "name": n} for i, n in enumerate(CocoDataset.METAINFO["classes"])
        ]
        for annotation in content["annotations"]:
            annotation["category_id"] = 14

    edit_json(own_drawn, change)
    dataset = data.CheckedCocoDataset(
        data_root=str(own_drawn),
        ann_file="train.json",
        data_prefix=dict(img="VOC2007/JPEGImages"),
    )
    assert dataset[0]["instances"][0]["bbox_label"] == 7


def test_voc_files_of_unknown_encoding(own_drawn, warned):
    path = own_drawn / "Annotations" / "drawn_000.xml"
    path.write_text(f"<?xml version='1.0' encoding='klingon'?>{path.read_text()}")
    with pytest.raises(ValueError, match="000.xml: .*unknown encoding: klingon"):
        voc(own_drawn)
    assert len(voc(own_drawn, bad_annotations="skip")) == 7


def test_split_files(own_drawn):
    """They may begin with a byte order mark; names have no suffix and no flag."""
    names = [info["img_id"] for info in infos(voc(own_drawn))]
    split = own_drawn / "ImageSets" / "Main" / "train.txt"
    config = dict(data_root=str(own_drawn), ann_file="ImageSets/Main/train.txt")
    split.write_text("\ufeff" + "\n ".join(names) + "\r\n", encoding="utf-8")
    assert [info["img_id"] for info in infos(voc(own_drawn))] == names
    assert classes_of(config, "voc") == sorted(toy.CLASSES)
    split.write_text(f"{names[0]}.jpg\n")
    with pytest.raises(ValueError, match=f"{names[0]}.jpg.xml"):
        voc(own_drawn)
