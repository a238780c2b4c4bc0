"""Bad annotations and images: an error that names them, or a counted, logged skip."""

import json
import re
import shutil
from types import SimpleNamespace

import cv2
import pytest
from mmdet.datasets import CocoDataset, VOCDataset, XMLDataset
from mmengine.logging import MMLogger
from PIL import Image

from fst.detection import data, images
from fst.detection.annotations import Kind, split_name
from fst.detection.classes import classes_of
from fst.detection.config import check_files
from fst.detection.drawing import DrawDetectionsHook
from fst.detection.images import probe_image
from fst.engine.config import load_config
from tests.detection import toy

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


def punch(root):
    """A hole in the middle: start, size and last bytes are those of a whole file."""
    content = image_path(root).read_bytes()
    middle = len(content) // 2
    image_path(root).write_bytes(content[:middle] + bytes(200) + content[middle + 200 :])


def truncate(root):
    content = image_path(root).read_bytes()
    image_path(root).write_bytes(content[: len(content) * 2 // 3])


# what to break, the kind of problem, what the message names, what "skip" leaves of 8 images and of
# the first image's boxes (None: the image is gone)
BREAKAGES = {
    "zero size": (lambda r: first_box(r, (30, 20, 30, 40)), Kind.NO_AREA, "drawn_000", 8, -1),
    "negative": (lambda r: first_box(r, (30, 40, 50, 20)), Kind.NO_AREA, "drawn_000", 8, -1),
    "outside": (lambda r: first_box(r, (200, 20, 230, 40)), Kind.OUTSIDE, "128 x 96", 8, -1),
    "reaching": (lambda r: first_box(r, (100, 20, 140, 40)), Kind.REACHING, "drawn_000", 8, 0),
    "class": (lambda r: first_class(r, "Amoeba"), Kind.UNKNOWN_CLASS, "'Amoeba'", 8, -1),
    "missing": (lambda r: image_path(r).unlink(), Kind.MISSING_IMAGE, "drawn_000.jpg", 7, None),
    "truncated": (truncate, Kind.BROKEN_IMAGE, "drawn_000.jpg", 7, None),
    "broken middle": (punch, Kind.BROKEN_IMAGE, "drawn_000.jpg (damaged in the middle", 7, None),
    "empty image": (
        lambda r: image_path(r).write_bytes(b""),
        Kind.BROKEN_IMAGE,
        "drawn_000.jpg",
        7,
        None,
    ),
    "no image": (
        lambda r: image_path(r).write_text("<html>404</html>"),
        Kind.BROKEN_IMAGE,
        "drawn_000.jpg",
        7,
        None,
    ),
}


@pytest.fixture
def said(monkeypatch):
    """The text logged so far: a summary of each data set, and what is wrong with it."""
    lines = []
    monkeypatch.setattr(data, "print_log", lambda text, *_: lines.append(text))
    return lines


@pytest.fixture
def log(monkeypatch):
    """What was logged as wrong so far."""
    lines = []
    monkeypatch.setattr(
        data, "print_log", lambda text, _, level=None: lines.append(text) if level else None
    )
    return lines


@pytest.mark.parametrize("make", [voc, coco])
@pytest.mark.parametrize("name", BREAKAGES)
def test_bad_input(own_drawn, make, name, log):
    whole = {info["img_path"]: info["instances"] for info in infos(make(own_drawn))}
    breakage, kind, expected, images, boxes = BREAKAGES[name]
    breakage(own_drawn)
    error = FileNotFoundError if kind is Kind.MISSING_IMAGE else ValueError
    with pytest.raises(error) as raised:
        make(own_drawn)
    message = str(raised.value)
    assert f"1 x {kind.value[0]}" in message and expected in message
    assert "bad_annotations='skip'" in message and not log

    left = infos(make(own_drawn, bad_annotations="skip"))
    assert len(left) == images
    (report,) = log
    assert f"1 x {kind.value[0]} ({kind.value[1]}): " in report and expected in report
    first = str(image_path(own_drawn))
    by_path = {info["img_path"]: info["instances"] for info in left}
    if boxes is None:
        assert first not in by_path
    else:
        assert len(by_path.pop(first)) == len(whole[first]) + boxes
    assert by_path == {path: whole[path] for path in by_path}


@pytest.mark.parametrize("make", [voc, coco])
def test_a_box_that_reaches_out_is_clipped(own_drawn, make, log):
    first_box(own_drawn, (100, -10, 140, 40))
    (info, *_) = infos(make(own_drawn, bad_annotations="skip"))
    assert info["instances"][0]["bbox"] == [100, 0, 128, 40]


@pytest.mark.parametrize("make", [voc, coco])
def test_a_pixel_over_the_edge_is_no_problem(own_drawn, make):
    first_box(own_drawn, (100, -1, 129, 40))
    (info, *_) = infos(make(own_drawn))
    assert info["instances"][0]["bbox"] == [100, -1, 129, 40]


@pytest.mark.parametrize("make", [voc, coco])
def test_no_usable_image(own_drawn, make, log):
    for path in (own_drawn / "JPEGImages").iterdir():
        path.unlink()
    for policy in ("error", "skip"):
        with pytest.raises((ValueError, FileNotFoundError), match="8 x image missing|no usable"):
            make(own_drawn, bad_annotations=policy)
    assert "8 x image missing" in log[0] and "and 5 more" in log[0]


@pytest.mark.parametrize("make", [voc, coco])
def test_no_box_of_the_classes(own_drawn, make, log):
    classes = ("Amoeba",)
    if make is coco:
        edit_json(own_drawn, lambda c: c["categories"].append({"id": 9, "name": "Amoeba"}))
    for filtered in (True, False):
        with pytest.raises(ValueError, match="no usable image is left.* 0 boxes of .*Amoeba"):
            make(
                own_drawn,
                metainfo={"classes": classes},
                bad_annotations="skip",
                filter_cfg=dict(filter_empty_gt=filtered),
            )


@pytest.mark.parametrize("make", [voc, coco])
def test_wrong_arguments(drawn, make):
    with pytest.raises(ValueError, match="bad_annotations='ignore' must be one of error, skip"):
        make(drawn, bad_annotations="ignore")
    with pytest.raises(ValueError, match="needs its class names"):
        make(drawn, metainfo={})
    with pytest.raises(FileNotFoundError, match="absent"):
        make(drawn, split="absent")


@pytest.mark.parametrize("make", [voc, coco])
def test_annotated_size(own_drawn, make, log):
    edit_xml(own_drawn, "<width>128", "<width>256")
    edit_json(own_drawn, lambda content: content["images"][0].update(width=256))
    with pytest.raises(ValueError, match="256 x 96 instead of 128 x 96"):
        make(own_drawn)
    (info, *_) = infos(make(own_drawn, bad_annotations="skip"))
    assert (info["width"], info["height"]) == (128, 96)


@pytest.mark.parametrize("make", [voc, coco])
@pytest.mark.parametrize("is_zero", [False, True])
def test_absent_size_is_read_from_the_image(own_drawn, make, is_zero):
    new = "<size><width>0</width><height>0</height></size>" if is_zero else ""
    edit_xml(own_drawn, "<size>.*?</size>", new)

    def change(content):
        content["images"][0].update(width=0)
        if not is_zero:
            del content["images"][0]["width"], content["images"][0]["height"]

    edit_json(own_drawn, change)
    for check in (True, False):
        (info, *_) = infos(make(own_drawn, check_images=check))
        assert (info["width"], info["height"]) == (128, 96)


@pytest.mark.parametrize("make", [voc, coco])
def test_images_are_not_checked_if_unwanted(own_drawn, make):
    truncate(own_drawn)
    assert len(make(own_drawn, check_images=False)) == 8


@pytest.mark.parametrize("extension", [".png", ".JPG", ".Jpg", ".jpeg", ".bmp", ".gif"])
def test_voc_images_of_other_formats(own_drawn, extension):
    pixels = cv2.imread(str(image_path(own_drawn)))
    image_path(own_drawn).unlink()
    path = image_path(own_drawn).with_suffix(extension)
    cv2.imwrite(str(path), pixels)
    assert voc(own_drawn).get_data_info(0)["img_path"] == str(path)


def test_voc_annotation_files(own_drawn, log):
    (own_drawn / "Annotations" / "drawn_000.xml").unlink()
    with pytest.raises(FileNotFoundError, match="1 x annotation file missing: .*drawn_000.xml"):
        voc(own_drawn)
    (own_drawn / "Annotations" / "drawn_001.xml").write_text("<annotation><object>")
    with pytest.raises(ValueError, match="1 x annotation file malformed: .*drawn_001.xml"):
        voc(own_drawn)
    split = own_drawn / "ImageSets" / "Main" / "train.txt"
    split.write_text(split.read_text() + "\ndrawn_002\n\n")
    with pytest.raises(ValueError, match="1 x id used twice: .*train.txt: drawn_002"):
        voc(own_drawn)
    assert len(voc(own_drawn, bad_annotations="skip")) == 6
    assert "3 problems" in log[-1]
    split.write_text("\n")
    with pytest.raises(ValueError, match="no usable image"):
        voc(own_drawn)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("<name>.*?</name>", "", "<object> without <name>"),
        ("<bndbox>.*?</bndbox>", "", "without a <bndbox> of four numbers"),
        ("<xmin>.*?</xmin>", "<xmin>left</xmin>", "without a <bndbox> of four numbers"),
        ("<ymax>.*?</ymax>", "<ymax>inf</ymax>", "without a <bndbox> of four numbers"),
    ],
)
def test_malformed_voc_objects(own_drawn, old, new, expected, log):
    boxes = len(voc(own_drawn).get_data_info(0)["instances"])
    edit_xml(own_drawn, old, new)
    with pytest.raises(ValueError, match=f"annotation malformed: .*object 1: .*{expected}"):
        voc(own_drawn)
    info = voc(own_drawn, bad_annotations="skip").get_data_info(0)
    assert len(info["instances"]) == boxes - 1


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "is no JSON"),
        ('{"images": ' + "[" * 200_000, "it nests too deep"),
        ('{"images": ' + "1" * 5000, "is no JSON: Exceeds the limit"),
        (
            '{"images": [{"id": 1}], "categories": [{"id": [1], "name": "a"}]}',
            r"'categories' has .*\[1\].*; an id must be",
        ),
        ('{"images": [', "is no JSON"),
        ("[]", "holds a list"),
        ('{"images": [], "categories": [{"id": 1, "name": "RBC"}]}', "lists no images"),
        ('{"images": [{"id": 1}]}', "lists no categories"),
        (
            '{"images": [{"id": 1}], "categories": [{"id": 1, "name": "a"}], "annotations": 3}',
            "is no list",
        ),
        (
            '{"images": [{}], "categories": [{"id": 1, "name": "a"}, {"id": 1, "name": "b"}]}',
            "id 1 twice",
        ),
        (
            '{"images": [{}], "categories": [{"id": 1, "name": "a"}, {"id": 2, "name": "a"}]}',
            "name a twice",
        ),
        ('{"images": [{}], "categories": [{"id": 1}]}', "a category without name"),
    ],
)
def test_coco_files(own_drawn, content, expected):
    (own_drawn / "train.json").write_text(content)
    for policy in ("error", "skip"):
        with pytest.raises(ValueError, match=f"train.json.*{expected}"):
            coco(own_drawn, bad_annotations=policy)


@pytest.mark.parametrize(
    ("change", "kind", "expected", "images"),
    [
        (lambda c: c["images"].append(dict(c["images"][0])), Kind.DUPLICATE, "image id 1", 8),
        (
            lambda c: c["annotations"].append(dict(c["annotations"][2])),
            Kind.DUPLICATE,
            "annotation id 3",
            8,
        ),
        (lambda c: c["images"].pop(0), Kind.ORPHAN, "annotation 1 of image 1", 7),
        (lambda c: c["images"][1].pop("file_name"), Kind.MALFORMED, "image number 1", 7),
        (lambda c: c["annotations"][0].pop("bbox"), Kind.MALFORMED, "annotation 1 of drawn_0", 8),
        (
            lambda c: c["annotations"][0].update(bbox=[1, 2, None, 4]),
            Kind.MALFORMED,
            "annotation 1 of drawn_0",
            8,
        ),
        (lambda c: c["annotations"][0].update(category_id=77), Kind.MALFORMED, "annotation 1", 8),
        (lambda c: c["annotations"][0].update(area=0), Kind.NO_AREA, "annotation 1", 8),
        (lambda c: c["annotations"].append("text"), Kind.MALFORMED, "annotation number", 8),
        (lambda c: c["images"][1].update(id=[2]), Kind.MALFORMED, "image number 1: {'f", 7),
        (lambda c: c["images"][1].update(file_name=7), Kind.MALFORMED, "file_name=7 is no", 7),
        (lambda c: c["images"][1].update(width="wide"), Kind.MALFORMED, "width='wide' is no", 7),
        (lambda c: c["annotations"][0].update(id=[1]), Kind.MALFORMED, "annotation number 0", 8),
        (
            lambda c: c["annotations"][0].update(image_id=[1], category_id={}),
            Kind.MALFORMED,
            "annotation 1: image_id=[1] is no number",
            8,
        ),
        (
            lambda c: c["annotations"][0].update(category_id=[1]),
            Kind.MALFORMED,
            "annotation 1 of drawn_000.jpg: category_id=[1]",
            8,
        ),
        (
            lambda c: c["annotations"][0].update(bbox=[1, 2, 10**400, 4]),
            Kind.MALFORMED,
            "annotation 1 of drawn_000.jpg: bbox=[1, 2, 1000",
            8,
        ),
        (
            lambda c: c["annotations"][0].update(area="big"),
            Kind.MALFORMED,
            "area='big' is no number",
            8,
        ),
    ],
)
def test_coco_entries(own_drawn, change, kind, expected, images, log):
    edit_json(own_drawn, change)
    with pytest.raises(ValueError) as raised:
        coco(own_drawn)
    assert kind.value[0] in str(raised.value) and expected in str(raised.value)
    assert len(coco(own_drawn, bad_annotations="skip")) == images
    assert kind.value[0] in log[-1]


def test_a_class_without_a_category(drawn):
    for policy in ("error", "skip"):
        with pytest.raises(ValueError, match="no category named 'Amoeba'.*RBC, WBC, Platelets"):
            coco(drawn, metainfo={"classes": ("RBC", "Amoeba")}, bad_annotations=policy)


@pytest.mark.parametrize("make", [voc, coco])
def test_labels_follow_classes_whatever_the_order_of_the_file(drawn, make):
    def names(dataset):
        return [
            [(i["bbox"], dataset.metainfo["classes"][i["bbox_label"]]) for i in info["instances"]]
            for info in infos(dataset)
        ]

    permuted = ("Platelets", "RBC", "WBC")
    assert names(make(drawn, metainfo={"classes": permuted})) == names(make(drawn))
    with pytest.raises(ValueError, match="not in `classes`"):
        make(drawn, metainfo={"classes": ("WBC",)})


@pytest.mark.parametrize("filter_cfg", [None, dict(filter_empty_gt=True, min_size=100)])
def test_voc_equals_mmdet(own_drawn, filter_cfg, log):
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


def test_a_test_set_may_have_no_annotations(own_drawn):
    edit_json(own_drawn, lambda content: content.pop("annotations"))
    assert len(coco(own_drawn, test_mode=True)) == 8
    with pytest.raises(ValueError, match="no usable image"):
        coco(own_drawn)


def turn(root, orientation):
    """Turn an image's stored pixels and write EXIF's orientation, which turns them back."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90}[orientation]
    with Image.open(image_path(root)) as image:
        pixels = image.transpose(stored)
    pixels.save(image_path(root), exif=exif)


def test_turned_image(own_drawn):
    turn(own_drawn, 6)
    assert cv2.imread(str(image_path(own_drawn))).shape[:2] == (96, 128)
    probe = probe_image(str(image_path(own_drawn)))
    assert (probe.stored, probe.turned) == ((96, 128), (128, 96))
    assert len(voc(own_drawn)) == 8


@pytest.mark.parametrize("make", [voc, coco])
@pytest.mark.parametrize("orientation", [3, 6])
def test_boxes_of_an_image_that_exif_turns(own_drawn, make, orientation, log):
    turn(own_drawn, orientation)
    if orientation == 6:  # the XML has the stored size; 3 leaves it as it is
        edit_xml(own_drawn, "<width>128</width><height>96", "<width>96</width><height>128")
        edit_json(own_drawn, lambda c: c["images"][0].update(width=96, height=128))
        first_box(own_drawn, (10, 20, 30, 40))
    with pytest.raises(ValueError, match=f"1 x .*turned by EXIF .*000.jpg: .*tion {orientation}"):
        make(own_drawn)
    assert len(make(own_drawn, bad_annotations="skip")) == 7
    assert "turned by EXIF" in log[0] and len(log) == 1
    # whoever loads the image as it is stored has said whose the boxes are
    stored = [dict(type="LoadImageFromFile", color_type="color_ignore_orientation")]
    dataset = make(own_drawn, pipeline=stored, bad_annotations="skip")
    assert len(dataset) == 8
    loaded = dataset[0]
    assert loaded["img"].shape[:2] == (loaded["height"], loaded["width"])
    hook = DrawDetectionsHook(str(own_drawn))
    loop = SimpleNamespace(dataloader=SimpleNamespace(dataset=dataset))
    hook.before_test(SimpleNamespace(test_loop=loop))
    assert hook._flag == "color_ignore_orientation"


def test_images_are_decoded_once(own_drawn, monkeypatch):
    looked = []
    look = images._look
    monkeypatch.setattr(images, "_look", lambda path, *a: looked.append(path) or look(path, *a))
    assert len(voc(own_drawn)) == len(looked) == 8
    looked.clear()
    assert infos(voc(own_drawn)) and not looked
    punch(own_drawn)
    for _ in range(2):  # what is broken is not remembered
        looked.clear()
        with pytest.raises(ValueError, match="1 x image truncated"):
            voc(own_drawn)
        assert set(looked) == {str(image_path(own_drawn))}
    next((images.cache_folder()).glob("images_*.json")).write_text("[")
    assert len(voc(own_drawn, bad_annotations="skip")) == 7


def test_voc_files_of_unknown_encoding(own_drawn, log):
    path = own_drawn / "Annotations" / "drawn_000.xml"
    path.write_text(f"<?xml version='1.0' encoding='klingon'?>{path.read_text()}")
    with pytest.raises(ValueError, match="malformed: .*000.xml .unknown encoding: klingon"):
        voc(own_drawn)
    assert len(voc(own_drawn, bad_annotations="skip")) == 7


def test_lines_of_voc_split_files(own_drawn):
    names = [info["img_id"] for info in infos(voc(own_drawn))]
    split = own_drawn / "ImageSets" / "Main" / "train.txt"
    config = dict(data_root=str(own_drawn), ann_file="ImageSets/Main/train.txt")
    for before, after in (("", ".jpg"), ("", ".PNG"), ("", "  1"), (" ", "\t-1"), ("", ".jpg 0")):
        lines = "\n".join(f"{before}{name}{after}" for name in names)
        split.write_text(f"\ufeff{lines}\r\n", encoding="utf-8")
        assert [info["img_id"] for info in infos(voc(own_drawn))] == names
        assert classes_of(config, "voc") == sorted(toy.CLASSES)
    split.write_bytes("größe".encode("latin-1"))
    for read in (lambda: voc(own_drawn), lambda: classes_of(config, "voc")):
        with pytest.raises(ValueError, match="split file .*train.txt' is no UTF-8"):
            read()
    assert split_name("drawn 1", {"drawn 1"}.__contains__) == "drawn 1"


@pytest.mark.parametrize("make", [voc, coco])
def test_images_without_objects_are_counted(own_drawn, make, said):
    edit_xml(own_drawn, "<object>.*</object>", "")
    edit_json(
        own_drawn,
        lambda c: c.update(annotations=[a for a in c["annotations"] if a["image_id"] != 1]),
    )
    assert len(make(own_drawn)) == 7
    assert "train" in said[0] and "1 of 8 images have no objects" in said[0]
    assert "left out: filter_cfg has filter_empty_gt=True" in said[0]
    assert len(make(own_drawn, test_mode=True)) == 8 and "(kept)" in said[1]


def test_missing_splits_are_named_before_anything_is_built(drawn, write_config):
    config = load_config(write_config("ssd", format="coco"))
    loaders = ["train_dataloader", "val_dataloader"]
    check_files(config, loaders)
    config.train_dataloader.dataset.ann_file = "trane.json"
    check_files(config, loaders[1:])
    config.val_dataloader.dataset.ann_file = "vall.json"
    config.val_evaluator.ann_file = "of_metric.json"
    with pytest.raises(FileNotFoundError) as raised:
        check_files(config, loaders)
    named = ("trane.json' of train_d", "vall.json' of val_d", "of_metric.json' of val_evaluator")
    assert all(text in str(raised.value) for text in named)


def test_the_report_reaches_the_log(own_drawn, tmp_path):
    logger = MMLogger.get_instance("test_data", log_file=str(tmp_path / "log"), log_level="INFO")
    truncate(own_drawn)
    voc(own_drawn, bad_annotations="skip")
    for handler in logger.handlers:
        handler.flush()
    assert "1 x image truncated or unreadable (image left out)" in (tmp_path / "log").read_text()
