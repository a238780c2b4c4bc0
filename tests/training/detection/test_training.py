"""SSD and Faster R-CNN through the command lines: train, resume, test, verify, fold."""

import itertools
import json
import math
import re

import pytest
import torch
from mmdet.apis import inference_detector, init_detector

import fst
from fst.cli import main
from fst.files.checkpoint import load_checkpoint_safely
from fst.layers.modules import SparseConv2d
from tests.training.detection import toy

DETECTORS = ("ssd", "faster-rcnn")
FST = 'dict(strategy="fst", log_interval=2)'
SDGP = 'dict(strategy="sdgp", rule="random", log_interval=2)'
STRATEGIES = ("dense", "fst", "sdgp", "srste")
FROZEN = ("backbone.conv1", "backbone.layer1.")
QUICK = (("ssd", "fst"), ("faster-rcnn", "sdgp"))  # of the trainings, those of `make test`
# the losses of each iteration, not their means
EACH = "log_processor = dict(window_size=1)\n"


def losses(work_dir):
    """The losses of all iterations, each a dict."""
    (path,) = work_dir.glob("*/vis_data/scalars.json")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if "loss" in k} for line in lines if "loss" in line]


@pytest.mark.parametrize(
    ("detector", "strategy"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.system)
        for pair in itertools.product(DETECTORS, STRATEGIES)
    ],
)
def test_trains(train, detector, strategy):
    work_dir = train("run", detector, sparsity=f'dict(strategy="{strategy}")', extra=EACH)
    found = losses(work_dir)
    assert len(found) == 8
    assert all(math.isfinite(value) for line in found for value in line.values())
    first, last = (sum(line["loss"] for line in half) for half in (found[:4], found[4:]))
    assert last < 0.9 * first
    checkpoint = load_checkpoint_safely(work_dir / "epoch_2.pth")
    convolutions = {
        name.removesuffix(".weight")
        for name, value in checkpoint["state_dict"].items()
        if value.ndim == 4 and "l2_norm" not in name
    }
    if detector == "faster-rcnn":  # a frozen stage
        convolutions = {name for name in convolutions if not name.startswith(FROZEN)}
    elif strategy == "sdgp":
        convolutions.remove("backbone.conv1")  # three input channels
    assert set(checkpoint["sparsity"]) == convolutions


def test_the_console_starts_with_the_data(train, capsys):
    train("run", "ssd", sparsity=FST, extra="train_cfg = dict(max_epochs=1, val_interval=1)\n")
    console = capsys.readouterr().out
    data = re.search(r"train\.\S+: 8 images, boxes: RBC \d+, WBC \d+, Platelets \d+\n", console)
    assert data
    assert data.start() < console.index("converted, ")


@pytest.mark.parametrize(
    ("detector", "format"),
    [
        ("ssd", "voc"),
        pytest.param("faster-rcnn", "coco", marks=pytest.mark.system),
        pytest.param("ssd", "coco", marks=pytest.mark.exhaustive),
        pytest.param("faster-rcnn", "voc", marks=pytest.mark.exhaustive),
    ],
)
def test_both_formats_of_bccd(train, shared_data, detector, format):
    extra = EACH + "train_cfg = dict(max_epochs=1, val_interval=1)\n"
    for split, count in (("train", 8), ("val", 4)):  # images
        extra += f"{split}_dataloader['dataset']['indices'] = {count}\n"
    root = shared_data / "bccd"
    work_dir = train("run", detector, root=root, format=format, sparsity=FST, extra=extra)
    assert all(math.isfinite(line["loss"]) for line in losses(work_dir))
    scalars = next(work_dir.glob("*/vis_data/scalars.json")).read_text()
    assert ("coco/bbox_mAP_50" if format == "coco" else "pascal_voc/AP50") in scalars


VALIDATED = "train_cfg = dict(max_epochs=2, val_interval=1)\n"
WORKERS = "train_dataloader.update(dict(num_workers=2, persistent_workers=True))\n"


@pytest.mark.parametrize(
    ("detector", "sparsity", "options", "extra"),
    [
        ("ssd", FST, (), ""),
        pytest.param("ssd", "None", (), WORKERS, marks=pytest.mark.system),
        pytest.param("faster-rcnn", SDGP, ("--amp",), VALIDATED, marks=pytest.mark.system),
    ],
    ids=["ssd-fst", "ssd-dense-workers", "rcnn-sdgp-amp"],
)
def test_resume_is_bit_exact(
    train, train_with_stop, assert_same_state, detector, sparsity, options, extra
):
    whole = train("whole", detector, *options, sparsity=sparsity, extra=EACH + extra)
    parts = train_with_stop("parts", detector, *options, sparsity=sparsity, extra=extra)
    assert_same_state(whole / "epoch_2.pth", parts / "epoch_2.pth")
    assert all(math.isfinite(line["loss"]) for line in losses(whole))


def test_mixed_precision_trains_in_bfloat16(train, monkeypatch):
    seen = set()
    original = SparseConv2d.forward

    def forward(layer, input):
        output = original(layer, input)
        seen.add(output.dtype)
        return output

    monkeypatch.setattr(SparseConv2d, "forward", forward)
    work_dir = train("run", "faster-rcnn", "--amp", sparsity=FST, extra=EACH)
    assert torch.bfloat16 in seen
    found = losses(work_dir)
    assert sum(x["loss"] for x in found[4:]) < 0.9 * sum(x["loss"] for x in found[:4])
    weights = load_checkpoint_safely(work_dir / "epoch_2.pth")["state_dict"]
    assert {v.dtype for v in weights.values() if v.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("detector", ["ssd", pytest.param("faster-rcnn", marks=pytest.mark.system)])
def test_a_folded_detector_finds_the_same_boxes(
    train, write_config, tmp_path, drawn, capsys, detector
):
    work_dir = train("run", detector, sparsity=FST)
    trained, folded = str(work_dir / "epoch_2.pth"), str(tmp_path / "folded.pth")
    config = write_config(detector, sparsity=FST)
    main(["fold", config, trained, folded])
    assert main(["verify", folded]) == 0
    assert main(["verify", trained]) == 1
    plain = init_detector(write_config(detector), folded, device="cpu")
    sparse = init_detector(write_config(detector), trained, device="cpu")
    dense = init_detector(write_config(detector), trained, device="cpu")
    fst.convert(sparse, "fst")
    images = sorted(str(path) for path in (drawn / "JPEGImages").iterdir())[-toy.VAL :]
    results = [inference_detector(model, images) for model in (plain, sparse, dense)]
    boxes, scores = (
        [torch.cat([sample.pred_instances[key] for sample in found]) for found in results]
        for key in ("bboxes", "scores")
    )
    assert len(boxes[0]) > 0
    assert torch.equal(boxes[0], boxes[1]) and torch.equal(scores[0], scores[1])
    assert boxes[0].shape != boxes[2].shape or not torch.equal(boxes[0], boxes[2])
    capsys.readouterr()
    measured = []
    for checkpoint in (trained, folded):
        main(["test", config, checkpoint, "--work-dir", str(tmp_path / f"test{len(measured)}")])
        lines = [x for x in capsys.readouterr().out.splitlines() if "pascal_voc/mAP" in x]
        measured.append(lines[-1].split("pascal_voc/mAP:")[1].split()[0])
    assert measured[0] == measured[1]
