"""Wrong annotations and images: an error that names file and id, or a counted, logged skip."""

import pytest
from mmengine.logging import MMLogger
from PIL import Image

from tests.training.detection.damage import (
    coco,
    edit_json,
    edit_xml,
    first_box,
    first_class,
    image_path,
    infos,
    voc,
)

CORNERS = {"xmin": 9, "ymin": 9, "xmax": 9, "ymax": 9}
NO_BOX = f"<bndbox>{''.join(f'<{tag}>{at}</{tag}>' for tag, at in CORNERS.items())}</bndbox>"
# what to break, what the message names, what "skip" leaves of 8 images and of the first image's
# boxes (None: the image is gone)
BREAKAGES = {
    "zero size": (lambda r: first_box(r, (30, 20, 30, 40)), "(30, 20, 30, 40)", 8, -1),
    "negative": (lambda r: first_box(r, (30, 40, 50, 20)), "(30, 40, 50, 20)", 8, -1),
    "outside": (lambda r: first_box(r, (200, 20, 230, 40)), "128 x 96", 8, -1),
    "reaching": (lambda r: first_box(r, (100, 20, 140, 40)), "128 x 96", 8, 0),
    "class": (lambda r: first_class(r, "Amoeba"), "'Amoeba'", 8, -1),
    "missing": (lambda r: image_path(r).unlink(), "drawn_000.jpg", 7, None),
    "empty image": (lambda r: image_path(r).write_bytes(b""), "drawn_000.jpg", 7, None),
    "no image": (lambda r: image_path(r).write_text("<html>404"), "drawn_000.jpg", 7, None),
}


@pytest.mark.parametrize("make", [voc, coco])
@pytest.mark.parametrize("name", BREAKAGES)
def test_bad_input(own_drawn, make, name, warned):
    whole = {info["img_path"]: info["instances"] for info in infos(make(own_drawn))}
    breakage, expected, images, boxes = BREAKAGES[name]
    breakage(own_drawn)
    with pytest.raises(ValueError) as raised:
        make(own_drawn)
    message = str(raised.value)
    assert "train" in message and "drawn_000" in message and expected in message
    if make is coco and boxes is not None:
        assert "annotation 1 of " in message
    assert "bad_annotations='skip'" in message and not warned

    left = infos(make(own_drawn, bad_annotations="skip"))
    assert len(left) == images
    (warning,) = warned
    assert "1 fault" in warning and "drawn_000" in warning and expected in warning
    first = str(image_path(own_drawn))
    by_path = {info["img_path"]: info["instances"] for info in left}
    if boxes is None:
        assert first not in by_path
    else:
        assert len(by_path.pop(first)) == len(whole[first]) + boxes
    assert by_path == {path: whole[path] for path in by_path}


@pytest.mark.parametrize("make", [voc, coco])
def test_an_image_without_a_usable_box_is_empty(own_drawn, make, warned):
    edit_xml(own_drawn, "<bndbox>.*?</bndbox>", NO_BOX, count=0)

    def shrink(content):
        for annotation in content["annotations"]:
            if annotation["image_id"] == content["images"][0]["id"]:
                annotation["bbox"][2:] = [0, 0]

    edit_json(own_drawn, shrink)
    assert len(make(own_drawn, bad_annotations="skip")) == 7
    assert len(make(own_drawn, bad_annotations="skip", test_mode=True)) == 8
    assert "faults left out" in warned[0]


def test_a_box_that_is_no_number(own_drawn, warned):
    edit_json(own_drawn, lambda c: c["annotations"][0].update(bbox=[1, 2, float("nan"), 9]))
    with pytest.raises(ValueError, match="annotation 1 of .*drawn_000.jpg: .*nan"):
        coco(own_drawn)
    assert len(coco(own_drawn, bad_annotations="skip")) == 8


def test_a_category_that_the_file_does_not_list(own_drawn):
    edit_json(own_drawn, lambda c: c["annotations"][0].update(category_id=77))
    with pytest.raises(ValueError, match="annotation 1 of .*drawn_000.jpg: class 77 is not in"):
        coco(own_drawn)


@pytest.mark.parametrize("make", [voc, coco])
def test_a_box_that_reaches_out_is_clipped(own_drawn, make, warned):
    first_box(own_drawn, (100, -10, 140, 40))
    (info, *_) = infos(make(own_drawn, bad_annotations="skip"))
    assert info["instances"][0]["bbox"] == [100, 0, 128, 40]


@pytest.mark.parametrize("make", [voc, coco])
def test_a_pixel_over_the_edge_is_no_problem(own_drawn, make):
    first_box(own_drawn, (100, -1, 129, 40))
    (info, *_) = infos(make(own_drawn))
    assert info["instances"][0]["bbox"] == [100, -1, 129, 40]


@pytest.mark.parametrize("make", [voc, coco])
def test_no_usable_image(own_drawn, make, warned):
    for path in (own_drawn / "JPEGImages").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="has 8 faults, the first: .*drawn_000.jpg"):
        make(own_drawn)
    with pytest.raises(ValueError, match="no image with an object"):
        make(own_drawn, bad_annotations="skip")
    assert "8 faults" in warned[0]


@pytest.mark.parametrize("make", [voc, coco])
def test_no_box_of_the_classes(own_drawn, make, warned):
    classes = ("Amoeba",)
    if make is coco:
        edit_json(own_drawn, lambda c: c["categories"].append({"id": 9, "name": "Amoeba"}))
    for filtered in (True, False):
        with pytest.raises(ValueError, match="no image with an object of the classes Amoeba"):
            make(
                own_drawn,
                metainfo={"classes": classes},
                bad_annotations="skip",
                filter_cfg=dict(filter_empty_gt=filtered),
            )


@pytest.mark.parametrize("make", [voc, coco])
def test_wrong_arguments(drawn, make):
    with pytest.raises(ValueError, match="bad_annotations='ignore' is unknown. Known: error, skip"):
        make(drawn, bad_annotations="ignore")
    with pytest.raises(ValueError, match="needs its class names"):
        make(drawn, metainfo={})
    with pytest.raises(FileNotFoundError, match="absent"):
        make(drawn, split="absent")


@pytest.mark.parametrize("make", [voc, coco])
def test_annotated_size(own_drawn, make, warned):
    edit_xml(own_drawn, "<width>128", "<width>256")
    edit_json(own_drawn, lambda content: content["images"][0].update(width=256))
    with pytest.raises(ValueError, match="drawn_000.jpg is 128 x 96, but annotated as 256 x 96"):
        make(own_drawn)
    assert len(make(own_drawn, bad_annotations="skip")) == 7


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
    (info, *_) = infos(make(own_drawn))
    assert (info["width"], info["height"]) == (128, 96)


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


def test_a_test_set_may_have_no_annotations(own_drawn, warned):
    edit_json(own_drawn, lambda content: content.pop("annotations"))
    assert len(coco(own_drawn, test_mode=True)) == 8
    assert "no image has an object, so metrics of it say nothing" in warned[-1]
    with pytest.raises(ValueError, match="no image with an object"):
        coco(own_drawn)


def test_annotations_of_no_image_are_named(own_drawn, warned):
    edit_json(own_drawn, lambda content: content["annotations"][0].update(image_id="0"))
    with pytest.raises(ValueError, match="annotation 1: image_id='0' is no image of the file"):
        coco(own_drawn)
    assert len(coco(own_drawn, bad_annotations="skip")) and "1 fault" in warned[0]


def test_crowds_are_nothing_to_learn(own_drawn):
    def crowd(content):
        for annotation in content["annotations"]:
            annotation["iscrowd"] = 1

    edit_json(own_drawn, crowd)
    with pytest.raises(ValueError, match="no image with an object"):
        coco(own_drawn)


def turn(root):
    """Turn an image's stored pixels and write EXIF's orientation, which turns them back."""
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(image_path(root)) as image:
        pixels = image.transpose(Image.Transpose.ROTATE_90)
    pixels.save(image_path(root), exif=exif)


@pytest.mark.parametrize("make", [voc, coco])
def test_boxes_of_the_stored_image_are_no_boxes_of_the_turned_one(own_drawn, make, warned):
    turn(own_drawn)
    assert len(make(own_drawn)) == 8
    edit_xml(own_drawn, "<width>128</width><height>96", "<width>96</width><height>128")
    edit_json(own_drawn, lambda c: c["images"][0].update(width=96, height=128))
    first_box(own_drawn, (10, 20, 30, 40))
    with pytest.raises(ValueError, match="000.jpg is 128 x 96, but annotated as 96 x 128"):
        make(own_drawn)
    assert len(make(own_drawn, bad_annotations="skip")) == 7


def test_the_warning_reaches_the_log(own_drawn, tmp_path):
    logger = MMLogger.get_instance("test_data", log_file=str(tmp_path / "log"), log_level="INFO")
    image_path(own_drawn).write_bytes(b"")
    voc(own_drawn, bad_annotations="skip")
    for handler in logger.handlers:
        handler.flush()
    text = (tmp_path / "log").read_text()
    assert "WARNING" in text and "drawn_000.jpg" in text and "7 images" in text
