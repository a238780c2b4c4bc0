"""Every detection recipe builds; `classes`, `bad_annotations` and `data_root` do what they say."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from mmdet.registry import DATASETS, METRICS, MODELS
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper

import fst
from fst.cli import main
from fst.lab.ablation.grid import load_grid
from fst.lab.ablation.runs import as_text, make_runs
from fst.training.detection.config import prepare, set_num_classes
from fst.training.detection.sample import random_batch
from fst.training.engine import SparsityHook
from fst.training.engine.config import load_config
from fst.training.engine.data_root import datasets_of
from tests.training.detection import toy

ROOT = Path(__file__).resolve().parents[3] / "configs" / "detection"
RECIPES = sorted(path.name for path in ROOT.glob("*.py"))
DETECTORS = ("ssd300_voc0712", "ssd300_coco")
DETECTORS += ("faster-rcnn_r50_fpn_voc0712", "faster-rcnn_r50_fpn_1x_coco")

pytestmark = pytest.mark.usefixtures("mmdet_scope")


def load(name, drawn):
    options = {} if name.startswith(("dense", "fst", "sdgp")) else {"data_root": str(drawn)}
    return load_config(str(ROOT / name), options)


def build(config, device="cpu"):
    with torch.device(device):
        return MODELS.build(config.model)


def convert(config, model):
    hook = SparsityHook(**config.sparsity)
    return fst.convert(model, hook.strategy, **hook.choice)


def test_a_grid_of_detectors_takes_the_keys_of_detectors(tmp_path, drawn):
    grid = {
        "title": "A grid",
        "base": str(ROOT / "ssd_r18_small_bccd.py"),
        "options": {"data_root": str(drawn)},
        "seeds": [0],
        "metrics": {"pascal_voc/mAP": {"label": "mAP"}},
        "settings": {"dense": {"sparsity": {"strategy": "dense"}}},
    }
    (tmp_path / "grid.yaml").write_text(json.dumps(grid))
    (run,) = make_runs(load_grid(tmp_path / "grid.yaml"), ["dense"], [0])
    (tmp_path / "run.py").write_text(as_text(run.config))
    config = load_config(str(tmp_path / "run.py"))
    assert config.train_dataloader.dataset.data_root == str(drawn)
    assert config.classes


def test_no_recipe_is_missing():
    needed = {f"{s}_{d}.py" for s in ("dense", "fst", "sdgp") for d in DETECTORS}
    models = ("ssd300", "faster-rcnn_r50_fpn")
    needed |= {f"{model}_{format}_format.py" for model in models for format in ("voc", "coco")}
    for model in ("ssd_r18_small", "faster-rcnn_r18_small"):
        needed |= {f"{model}_bccd.py", f"{model}_bccd_coco.py"}
    assert set(RECIPES) >= needed


EVERY_FOURTH = [
    pytest.param(name, marks=pytest.mark.exhaustive if index % 4 else ())
    for index, name in enumerate(RECIPES)
]


@pytest.mark.parametrize("name", EVERY_FOURTH)
def test_recipe_builds_and_converts(name, drawn):
    config = load(name, drawn)
    # cuDNN measures its kernels where images have one size
    assert bool(config.env_cfg.get("cudnn_benchmark")) == ("faster-rcnn" not in name)
    model = build(config, "meta")
    report = convert(config, model)
    assert str(fst.get_strategy(config.sparsity.strategy)) == report.strategy
    skipped = {layer for layer, reason in report.skipped.items() if "linear layers" not in reason}
    if "faster-rcnn_r50" in name:
        frozen = {n for n, p in model.named_parameters() if not p.requires_grad and p.ndim == 4}
        assert skipped == {layer.removesuffix(".weight") for layer in frozen}
    else:
        thin = {n for n, m in model.named_modules() if getattr(m, "in_channels", 9) == 3}
        assert skipped == (thin if "sdgp" in name else set())
    classes = {"voc0712": 20, "coco": 80}.get(name[:-3].rsplit("_", 1)[1], 3)
    if "format" in name or "bccd" in name:
        classes = 3
    heads = [m.num_classes for n, m in model.named_modules() if n.endswith("bbox_head")]
    assert heads == [classes]
    backends = [backend["type"] for backend in config.visualizer["vis_backends"]]
    assert "TensorboardVisBackend" in backends
    for loader in (config.train_dataloader, config.val_dataloader, config.test_dataloader):
        text = json.dumps(loader, default=str)
        policy = "skip" if name.endswith("coco.py") and "bccd" not in name else "error"
        assert f'"bad_annotations": "{policy}"' in text
        assert '"type": "Checked' in text


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("fst_ssd300_voc0712.py", (300, 300)),
        pytest.param("sdgp_ssd300_coco.py", (300, 300), marks=pytest.mark.system),
        pytest.param("fst_faster-rcnn_r50_fpn_1x_coco.py", (128, 160), marks=pytest.mark.system),
        pytest.param("sdgp_faster-rcnn_r50_fpn_voc0712.py", (128, 160), marks=pytest.mark.system),
    ],
)
def test_recipe_trains_a_step(name, size, drawn):
    config = load(name, drawn)
    config.model.backbone.init_cfg = None  # no pretrained weights: they would be downloaded
    model = build(config)
    model.init_weights()
    convert(config, model)
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = build_optim_wrapper(model, config.optim_wrapper)
    losses = model.train_step(random_batch(model.train(), 1, *size), optimizer)
    assert losses["loss"].isfinite()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert not changed & frozen
    assert all(any(part in n for n in changed) for part in ("backbone", "neck", "bbox_head"))


@pytest.mark.parametrize("name", [r for r in RECIPES if "bccd" in r or "format" in r])
def test_recipe_reads_its_data(name, drawn):
    config = load(name, drawn)
    dataset = DATASETS.build(config.train_dataloader.dataset)
    assert len(dataset) == toy.TRAIN and dataset.metainfo["classes"] == tuple(config.classes)
    batch = dataset[0]
    assert batch["inputs"].ndim == 3 and len(batch["data_samples"].gt_instances) > 0


def test_other_layouts_are_options(own_drawn):
    """Those of COCO, as docs/own_data.md has them."""
    given = {"data_root": str(own_drawn)}
    (own_drawn / "annotations").mkdir()
    for split in ("train", "val"):
        (own_drawn / f"{split}.json").rename(own_drawn / f"annotations/instances_{split}2017.json")
        shutil.copytree(own_drawn / "JPEGImages", own_drawn / f"{split}2017")
        dataset = f"{split}_dataloader.dataset"
        given[f"{dataset}.ann_file"] = f"annotations/instances_{split}2017.json"
        given[f"{dataset}.data_prefix.img"] = f"{split}2017"
    shutil.rmtree(own_drawn / "JPEGImages")
    config = load_config(str(ROOT / "ssd_r18_small_bccd_coco.py"), given)
    assert config.classes == list(toy.CLASSES)
    assert METRICS.build(config.val_evaluator)
    for split, count in (("train", toy.TRAIN), ("val", toy.VAL)):
        dataset = DATASETS.build(config[f"{split}_dataloader"].dataset)
        assert len(dataset) == count and dataset[0]["inputs"].ndim == 3


# -- classes


def options(drawn, format, **more):
    base = {"voc": "ssd_r18_small_bccd.py", "coco": "ssd_r18_small_bccd_coco.py"}[format]
    return load_config(str(ROOT / base), {"data_root": str(drawn), **more})


def test_classes_are_read_from_the_annotations(drawn):
    for format, expected in (("voc", sorted(toy.CLASSES)), ("coco", list(toy.CLASSES))):
        config = options(drawn, format)
        assert config.classes == expected
        for loader in (config.train_dataloader, config.val_dataloader, config.test_dataloader):
            assert loader.dataset.metainfo.classes == tuple(expected)


def test_classes_of_several_data_sets_are_joined(own_drawn):
    split = own_drawn / "ImageSets" / "Main"
    names = (split / "train.txt").read_text().split()
    for part, group in (("a", names[:4]), ("b", names[4:])):
        (split / f"{part}.txt").write_text("\n".join(group))
        for name in group:
            path = own_drawn / "Annotations" / f"{name}.xml"
            path.write_text(path.read_text().replace("RBC", f"RBC-{part}"))
    parts = [
        dict(
            type="VOCDataset",
            ann_file=f"ImageSets/Main/{part}.txt",
            data_prefix=dict(sub_data_root=""),
            pipeline=[],
        )
        for part in "ba"
    ]
    dataset = dict(
        type="RepeatDataset", times=2, dataset=dict(type="ConcatDataset", datasets=parts)
    )
    config = Config(
        dict(
            classes="auto",
            data_root=str(own_drawn),
            train_dataloader=dict(dataset=dataset),
            model=dict(bbox_head=dict(type="SSDHead", num_classes=80)),
        )
    )
    prepare(config, datasets_of(config))
    assert sorted(config.classes) == ["Platelets", "RBC-a", "RBC-b", "WBC"]
    assert config.model.bbox_head.num_classes == 4
    inner = config.train_dataloader.dataset.dataset.datasets
    assert [part.type for part in inner] == ["CheckedVOCDataset"] * 2
    assert len(DATASETS.build(config.train_dataloader.dataset)) == 2 * toy.TRAIN


def test_given_classes_set_every_head(drawn):
    config = options(drawn, "coco", classes=["WBC", "RBC"])
    assert config.model.bbox_head.num_classes == 2
    assert config.train_dataloader.dataset.metainfo.classes == ("WBC", "RBC")
    model = dict(
        backbone=dict(type="SSDVGG", num_classes=7),
        rpn_head=dict(type="RPNHead", num_classes=1),
        roi_head=dict(
            type="mmdet.CascadeRoIHead",
            bbox_head=[dict(type="Shared2FCBBoxHead", num_classes=80)] * 2,
            mask_head=dict(type="FCNMaskHead", num_classes=80),
            semantic_head=dict(type="FusedSemanticHead", num_classes=183),
        ),
    )
    set_num_classes(model, 5)
    text = json.dumps(model)
    assert text.count('"num_classes": 5') == 3
    for kept in (7, 1, 183):
        assert f'"num_classes": {kept}}}' in text


def test_classes_of_the_checkpoint_come_first(drawn, tmp_path):
    path = tmp_path / "a.pth"
    torch.save({"meta": {"dataset_meta": {"classes": ("WBC", "Platelets", "RBC")}}}, path)
    recipe = str(ROOT / "ssd_r18_small_bccd.py")
    assert load_config(recipe, {}, str(path)).classes == ["WBC", "Platelets", "RBC"]
    torch.save({"weight": torch.zeros(1)}, path)
    assert load_config(recipe, {"data_root": str(drawn)}, str(path)).classes[0] == "Platelets"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"classes": "all"}, "classes='all' must be 'auto' or a list"),
        ({"classes": []}, "must be 'auto' or a list"),
        ({"classes": ["a", 3]}, "must be 'auto' or a list"),
        ({"classes": ["a", "b", "a"]}, "a name twice"),
    ],
)
def test_wrong_values(drawn, change, expected):
    with pytest.raises(ValueError, match=expected):
        options(drawn, "voc", **change)


def test_missing_data(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"classes='auto'.*nowhere.*set data_root"):
        options(tmp_path / "nowhere", "coco")
    for text in ("{", "[]", "{}"):
        (tmp_path / "train.json").write_text(text)
        with pytest.raises(ValueError, match="train.json' is no annotation file of COCO: "):
            options(tmp_path, "coco")
    for folder in ("ImageSets/Main", "Annotations"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "ImageSets" / "Main" / "train.txt").write_text("a\nb\n")
    with pytest.raises(FileNotFoundError, match=r"Annotations/a\.xml"):
        options(tmp_path, "voc")
    for name in "ab":
        (tmp_path / "Annotations" / f"{name}.xml").write_text("<annotation/>")
    with pytest.raises(ValueError, match="no class in the annotations"):
        options(tmp_path, "voc")


def test_an_inherited_data_root_is_no_error(drawn, tmp_path):
    """As in a config over mmdet's VOC, whose `data_root` is a helper, with data elsewhere."""
    path = tmp_path / "own.py"
    path.write_text(
        "_base_ = 'mmdet::pascal_voc/ssd300_voc0712.py'\n"
        f"val_dataloader = dict(dataset=dict(data_root={str(drawn)!r}))\n"
        "test_dataloader = val_dataloader\n"
        f"_own = dict(type='VOCDataset', data_root={str(drawn)!r}, ann_file='a.txt')\n"
        "train_dataloader = dict(dataset=dict(_delete_=True, **_own))\n"
    )
    config = load_config(str(path))
    assert config.train_dataloader.dataset.data_root == str(drawn)


def test_data_root(drawn):
    config = options(drawn, "coco")
    assert config.val_evaluator.ann_file == str(drawn / "val.json")
    assert config.test_evaluator.ann_file == str(drawn / "test.json")
    assert config.val_dataloader.dataset.data_root == str(drawn)
    with pytest.raises(ValueError, match="data_root='elsewhere' changes nothing"):
        load_config(str(ROOT / "fst_ssd300_voc0712.py"), {"data_root": "elsewhere"})


def test_own_settings_of_a_data_set_are_kept(write_config):
    option = {"train_dataloader.dataset.bad_annotations": "skip"}
    config = load_config(write_config("ssd"), option)
    assert config.train_dataloader.dataset.bad_annotations == "skip"
    assert config.val_dataloader.dataset.bad_annotations == "error"
    assert config.train_dataloader.dataset.type == "CheckedVOCDataset"


def test_keys_of_detectors_in_other_configs(tmp_path):
    (tmp_path / "a.py").write_text("model = dict(type='Classifier')\nclasses = 'auto'\n")
    with pytest.raises(ValueError, match="nothing reads 'classes'"):
        load_config(str(tmp_path / "a.py"))
    (tmp_path / "a.py").write_text(
        "data_root = 'x'\nmodel = dict(type='Classifier', a=data_root)\n"
    )
    assert load_config(str(tmp_path / "a.py")).model.a == "x"
    with pytest.raises(ValueError, match="data_root='y' changes nothing"):
        load_config(str(tmp_path / "a.py"), {"data_root": "y"})
    (tmp_path / "b.py").write_text(
        "default_scope = 'mmdet'\nmodel = dict(type='X')\nbad_annotations = 'skip'\n"
    )
    with pytest.raises(ValueError, match="no data set of the config is in VOC or COCO format"):
        load_config(str(tmp_path / "b.py"))


def test_without_mmdet(tmp_path, monkeypatch, error_of):
    find = importlib.util.find_spec
    absent = lambda name, *rest: None if name == "mmdet" else find(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", absent)
    (tmp_path / "scope.py").write_text("default_scope = 'mmdet'\nmodel = dict(type='X')\n")
    for path in (ROOT / "fst_ssd300_voc0712.py", tmp_path / "scope.py"):
        message = error_of("train", path)
        assert "needs MMDetection: pip install" in message and "det]" in message


def test_unknown_package_config(tmp_path, error_of):
    for base in ("mmdet::ssd/ssd301_coco.py", "no_package::ssd/ssd300_coco.py"):
        path = tmp_path / f"{base[:5]}.py"
        path.write_text(f"_base_ = '{base}'\n")
        assert base.partition("::")[2 if "mmdet" in base else 0] in error_of("train", path)


# -- classes of heads, data and checkpoint


def test_heads_that_do_not_fit_stop_the_run_before_training(train, tmp_path):
    extra = 'model["bbox_head"]["num_classes"] = 4\n'
    with pytest.raises(AssertionError, match=r"`num_classes` \(4\) in SSDHead"):
        train("ssd", "ssd", extra=extra)
    assert not list(tmp_path.glob("ssd/*.pth"))
    extra = 'model["roi_head"]["bbox_head"]["num_classes"] = 2\n'
    with pytest.raises(AssertionError, match=r"`num_classes` \(2\) in Shared2FCBBoxHead"):
        train("rcnn", "faster-rcnn", extra=extra)


def test_training_and_validation_data_must_agree(train):
    extra = 'val_dataloader["dataset"]["metainfo"] = dict(classes=("WBC", "RBC", "Platelets"))\n'
    with pytest.raises(ValueError, match="classes are not those of the training"):
        train("run", "ssd", extra=extra)


def test_the_checkpoint_says_what_labels_mean(train, write_config, tmp_path):
    work_dir = train("run", "ssd", "--cfg-options", "train_cfg.max_epochs=1")
    checkpoint = str(work_dir / "epoch_1.pth")
    other = write_config("ssd", extra="classes = ['WBC', 'RBC', 'Platelets']\n")
    with pytest.raises(ValueError, match="classes are not those of the training"):
        main(["test", other, checkpoint, "--work-dir", str(tmp_path / "test"), "--traceback"])
    with pytest.raises(ValueError, match="classes are not those of the training"):
        resumed = ["--resume", checkpoint, "--work-dir", str(tmp_path / "resumed")]
        main(["train", other, *resumed, "--traceback"])
    auto = write_config("ssd", extra="classes = 'auto'\n")
    main(["test", auto, checkpoint, "--work-dir", str(tmp_path / "auto")])
    (copy,) = (tmp_path / "auto").glob("*/vis_data/config.py")
    assert load_config(str(copy)).to_dict() == load_config(str(copy)).to_dict()
