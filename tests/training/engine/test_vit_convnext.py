"""ViT-S and ConvNeXt-T: their recipes are the published ones, and every config trains a step."""

from pathlib import Path

import pytest
import torch
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS
from timm.optim import param_groups_weight_decay

import fst
from fst.cli import main
from fst.files.checkpoint import load_checkpoint_safely
from fst.training.engine import SparsityHook
from fst.training.engine.config import load_config
from tests.images import write_images
from tests.test_configs import learning_rates

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
STRATEGIES = ("dense", "fst_w", "fst", "srste", "sdgp")
NETWORKS = ("vit_small", "convnext_tiny")
RECIPES = [(s, network) for s in STRATEGIES for network in NETWORKS] + [("step", "vit_small")]
TRAINED = [("fst", "vit_small"), ("sdgp", "convnext_tiny"), ("step", "vit_small")]
PIXELS = {
    "train_dataloader.dataset.transforms.0.input_size": 32,
    "val_dataloader.dataset.transforms.0.size": 36,
    "val_dataloader.dataset.transforms.1.size": 32,
}
SMALL = {
    "vit_small": {"img_size": 32, "depth": 1, "embed_dim": 96},
    "convnext_tiny": {"depths": (1, 1, 1, 1), "dims": (16, 24, 32, 48)},
}


def load(strategy, network, small=False, **changes):
    options = {f"model.architecture.{k}": v for k, v in SMALL[network].items()} if small else {}
    path = str(CONFIGS / f"{strategy}_{network}_imagenet.py")
    return load_config(path, {**(PIXELS if small else {}), **options, **changes})


def convert(config):
    model = MODELS.build(config.model)
    hook = SparsityHook(**config.sparsity)
    return model, fst.convert(model.sparse_root, hook.strategy, **hook.choice)


def linear_layers(model):
    named = model.sparse_root.named_modules()
    return {name for name, m in named if isinstance(m, torch.nn.Linear)}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folders = (f"{split}/{name}" for split in ("train", "val") for name in ("n01", "n02"))
    return write_images(tmp_path_factory.mktemp("imagenet"), dict.fromkeys(folders, 2))


@pytest.mark.parametrize(
    ("strategy", "network"),
    [
        pytest.param(*recipe, marks=() if recipe in TRAINED else pytest.mark.exhaustive)
        for recipe in RECIPES
    ],
)
def test_a_step_on_images(strategy, network, images, tmp_path):
    """Through the whole engine: files, augmentation, mixing, loss, EMA, validation, checkpoint."""
    options = [f"model.architecture.{k}={v!r}".replace(" ", "") for k, v in SMALL[network].items()]
    options += [f"{key}={value}" for key, value in PIXELS.items()]
    for loader in ("train_dataloader", "val_dataloader"):
        options += [f"{loader}.{o}" for o in ("batch_size=4", "num_workers=0")]
        options += [f"{loader}.persistent_workers=False", f"{loader}.dataset.data_root={images}"]
    config = str(CONFIGS / f"{strategy}_{network}_imagenet.py")
    options += ["train_cfg.max_epochs=1", "param_scheduler=None"]
    main(["train", config, "--work-dir", str(tmp_path), "--traceback", "--cfg-options", *options])
    saved = load_checkpoint_safely(tmp_path / "epoch_1.pth")
    assert saved["meta"]["iter"] == 1 and "ema_state_dict" in saved
    assert any("mlp.fc1" in name for name in saved["sparsity"])
    before = load_config(config).model.architecture  # the config that a user sees is untouched
    assert "depth" not in before and "depths" not in before


@pytest.mark.parametrize("network", NETWORKS)
def test_sparse_are_the_linear_layers_of_the_blocks(network):
    model, report = convert(load("fst", network, small=True))
    head = {"head"} if network == "vit_small" else {"head.fc"}
    assert {row.layer for row in report.layers} == linear_layers(model) - head


@pytest.mark.parametrize("network", NETWORKS)
def test_weight_decay_leaves_out_what_timm_leaves_out(network):
    config = load("dense", network, small=True)
    model = MODELS.build(config.model)
    wrapper = build_optim_wrapper(model, config.optim_wrapper)
    found = {
        id(p): group["weight_decay"]
        for group in wrapper.optimizer.param_groups
        for p in group["params"]
    }
    root = model.architecture
    skip = root.no_weight_decay() if hasattr(root, "no_weight_decay") else ()
    for group in param_groups_weight_decay(root, 0.05, no_weight_decay_list=skip):
        assert {found.pop(id(p)) for p in group["params"]} == {group["weight_decay"]}
    assert not found


@pytest.mark.parametrize(
    ("network", "batch", "peak", "warm_up", "start", "end", "ema"),
    [
        ("vit_small", 1024, 1e-3, 5, 1e-6, 1e-5, 0.99996),
        ("convnext_tiny", 4096, 4e-3, 20, 4e-7, 1e-6, 0.9999),
    ],
)
def test_published_hyper_parameters(network, batch, peak, warm_up, start, end, ema):
    config = load("fst", network)
    assert config.train_dataloader.batch_size == batch
    (averaging,) = config.custom_hooks
    assert averaging == dict(type="EMAHook", momentum=pytest.approx(1 - ema))
    assert config.model.architecture.drop_path_rate == 0.1
    optimizer = config.optim_wrapper.optimizer
    assert (optimizer.type, optimizer.weight_decay) == ("AdamW", 0.05)
    mixup = config.model.data_preprocessor.mixup
    assert (mixup.mixup_alpha, mixup.cutmix_alpha, mixup.label_smoothing) == (0.8, 1.0, 0.1)
    rates = learning_rates(config, 10)
    assert len(rates) == 3000 and rates[0] == pytest.approx(start)
    assert max(rates) == pytest.approx(peak) and rates.index(max(rates)) == warm_up * 10 - 1
    assert rates[(warm_up + 300) * 5] == pytest.approx((peak + end) / 2, rel=0.01)
    assert rates[-1] == pytest.approx(end, rel=0.05)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("strategy", "network"), RECIPES)
def test_full_size(strategy, network):
    model, report = convert(load(strategy, network))
    parameters = sum(p.numel() for p in model.parameters())
    assert (parameters, len(report.layers)) == {
        "vit_small": (22_050_664, 48),
        "convnext_tiny": (28_589_128, 36),
    }[network]
    data = {"inputs": torch.rand(2, 3, 224, 224), "labels": torch.full((2, 1000), 1e-3)}
    model(**data, mode="loss")["loss"].backward()
