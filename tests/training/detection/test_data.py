"""mmdet's data sets, checked: wrong annotations and images are named by file and id."""

import json
import re

import pytest
from mmdet.datasets import CocoDataset, VOCDataset, XMLDataset
from PIL import Image

from fst.training.detection.data import CheckedCocoDataset, CheckedVOCDataset, CheckedXMLDataset
from tests.training.detection import toy

META = {"classes": toy.CLASSES}
MAKERS = {
    "voc": (CheckedXMLDataset, "ImageSets/Main/{}.txt", {"sub_data_root": ""}),
    "coco": (CheckedCocoDataset, "{}.json", {"img": "JPEGImages"}),
}


def make(root, format, kind=None, split="train", **options):
    checked, file, prefix = MAKERS[format]
    options = {"metainfo": META, "filter_cfg": dict(filter_empty_gt=True), **options}
    return (kind or checked)(
        data_root=str(root), ann_file=file.format(split), data_prefix=prefix, **options
    )


def infos(dataset):
    return [dataset.get_data_info(index) for index in range(len(dataset))]


def edit_xml(root, old, new):
    path = root / "Annotations" / "drawn_000.xml"
    text = path.read_text()
    changed = re.sub(old, new, text, count=1, flags=re.DOTALL)
    assert changed != text
    path.write_text(changed)


def edit_json(root, change):
    path = root / "train.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def first_box(root, *corners):
    """Gives the first object other corners, in both formats: VOC's count from 1, COCO's from 0."""
    x1, y1, x2, y2 = corners
    named = zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True)
    box = "".join(f"<{tag}>{value + 1}</{tag}>" for tag, value in named)
    edit_xml(root, "<bndbox>.*?</bndbox>", f"<bndbox>{box}</bndbox>")
    edit_json(root, lambda c: c["annotations"][0].update(bbox=[x1, y1, x2 - x1, y2 - y1]))


def first_class(root):
    edit_xml(root, "<name>.*?</name>", "<name>Amoeba</name>")
    edit_json(root, lambda c: c["categories"].append({"id": 9, "name": "Amoeba"}))
    edit_json(root, lambda c: c["annotations"][0].update(category_id=9))


def size(root, width, height):
    new = f"<width>{width}</width><height>{height}</height>"
    edit_xml(root, "<width>128</width><height>96</height>", new)
    edit_json(root, lambda c: c["images"][0].update(width=width, height=height))


def turned(root):
    """Turn an image's stored pixels and write EXIF's orientation, which turns them back."""
    exif, path = Image.Exif(), root / "JPEGImages" / "drawn_000.jpg"
    exif[0x0112] = 6
    with Image.open(path) as image:
        pixels = image.transpose(Image.Transpose.ROTATE_90)
    pixels.save(path, exif=exif)
    assert len(make(root, "coco")) == 8
    size(root, 96, 128)


def image(root):
    return root / "JPEGImages" / "drawn_000.jpg"


FAULTS = {  # what to break, what the message names
    "zero size": (lambda r: first_box(r, 30, 20, 30, 40), "(30, 20, 30, 40) is no box"),
    "negative": (lambda r: first_box(r, 30, 40, 50, 20), "(30, 40, 50, 20) is no box"),
    "outside": (lambda r: first_box(r, 200, 20, 230, 40), "is no box within 128 x 96"),
    "reaching": (lambda r: first_box(r, 100, 20, 130, 40), "is no box within 128 x 96"),
    "class": (first_class, "class 'Amoeba' is not in `classes`"),
    "size": (lambda r: size(r, 256, 96), "is 128 x 96, but annotated as 256 x 96"),
    "turned": (turned, "is 128 x 96, but annotated as 96 x 128"),
    "missing": (lambda r: image(r).unlink(), "drawn_000.jpg cannot be read"),
    "no image": (lambda r: image(r).write_text("<html>404"), "drawn_000.jpg cannot be read"),
}


@pytest.mark.parametrize("format", MAKERS)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_by_file_and_id(own_drawn, format, name, warned):
    breakage, expected = FAULTS[name]
    breakage(own_drawn)
    with pytest.raises(ValueError) as raised:
        make(own_drawn, format)
    message = str(raised.value)
    assert f"{MAKERS[format][1].format('train')}' has " in message and expected in message
    assert "drawn_000" in message and "bad_annotations='skip'" in message
    if format == "coco" and ("box" in expected or "class" in expected):
        assert "annotation 1 of " in message
    assert not warned and make(own_drawn, format, bad_annotations="skip")
    assert expected in warned[0]


@pytest.mark.parametrize("format", MAKERS)
def test_a_pixel_over_the_edge_is_no_fault(own_drawn, format):
    first_box(own_drawn, 100, -1, 129, 40)
    assert infos(make(own_drawn, format))[0]["instances"][0]["bbox"] == [100, -1, 129, 40]


def test_a_category_that_the_file_does_not_list(own_drawn):
    edit_json(own_drawn, lambda c: c["annotations"][0].update(category_id=77))
    with pytest.raises(ValueError, match="annotation 1 of .*drawn_000.jpg: class 77 is not in"):
        make(own_drawn, "coco")


@pytest.mark.parametrize("classes", [("Platelets", "RBC", "WBC"), ("RBC", "Amoeba"), ("Amoeba",)])
def test_classes_of_a_coco_file_are_in_its_order(drawn, classes):
    """mmdet labels in that order, whatever the names."""
    with pytest.raises(
        ValueError, match="must be categories of .*train.json', in its order: .'RBC"
    ):
        make(drawn, "coco", metainfo={"classes": classes}, bad_annotations="skip")


def test_labels_of_voc_follow_classes(drawn):
    def names(dataset):
        return [
            [(box["bbox"], dataset.metainfo["classes"][box["bbox_label"]]) for box in boxes]
            for boxes in (info["instances"] for info in infos(dataset))
        ]

    permuted = make(drawn, "voc", metainfo={"classes": ("Platelets", "RBC", "WBC")})
    assert names(permuted) == names(make(drawn, "voc"))


def test_an_annotation_without_an_area_is_named(own_drawn):
    edit_json(own_drawn, lambda c: c["annotations"][0].pop("area"))
    with pytest.raises(ValueError, match=r"train.json': no \{'area'\} in the annotation .*'id': 1"):
        make(own_drawn, "coco")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<annotation>", "<annotation><"),
        ("<bndbox>.*?</bndbox>", ""),
        ("<xmin>.*?</xmin>", "<xmin>left</xmin>"),
        ("<ymax>.*?</ymax>", "<ymax>nan</ymax>"),
    ],
)
def test_a_damaged_xml_file_is_named(own_drawn, old, new):
    edit_xml(own_drawn, old, new)
    with pytest.raises(ValueError, match="drawn_000.xml: "):
        make(own_drawn, "voc")


def test_an_image_that_is_listed_twice(own_drawn):
    split = own_drawn / "ImageSets" / "Main" / "train.txt"
    split.write_text(f"drawn_002\n{split.read_text()}")
    with pytest.raises(ValueError, match="train.txt' has 1 fault.*'drawn_002' is listed twice"):
        make(own_drawn, "voc")


@pytest.mark.parametrize("format", MAKERS)
def test_nothing_to_train_on(own_drawn, format):
    for path in (own_drawn / "Annotations").iterdir():
        path.write_text(re.sub("<object>.*</object>", "", path.read_text(), flags=re.DOTALL))
    edit_json(own_drawn, lambda c: c.update(annotations=[]))
    with pytest.raises(ValueError, match="has no box of the classes RBC, WBC, Platelets"):
        make(own_drawn, format)
    assert len(make(own_drawn, format, test_mode=True)) == 8


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_bccd_is_whole_and_equals_mmdet(shared_data, split):
    root, options = shared_data / "bccd", {"split": split, "test_mode": split != "train"}
    for format, kind in (("voc", XMLDataset), ("coco", CocoDataset)):
        assert infos(make(root, format, **options)) == infos(make(root, format, kind, **options))


def test_pascal_voc_keeps_its_classes(own_drawn):
    for path in (own_drawn / "Annotations").iterdir():
        path.write_text(re.sub("<name>.*?</name>", "<name>cat</name>", path.read_text()))
    dataset = make(own_drawn, "voc", CheckedVOCDataset, metainfo=None)
    assert dataset.metainfo["classes"] == VOCDataset.METAINFO["classes"]
    assert dataset[0]["instances"][0]["bbox_label"] == 7


def test_wrong_arguments(drawn):
    with pytest.raises(ValueError, match="bad_annotations='ignore' is unknown. Known: error, skip"):
        make(drawn, "voc", bad_annotations="ignore")
