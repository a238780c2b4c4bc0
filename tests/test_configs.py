"""Every recipe of a classifier loads, builds, trains a step, has the published hyper-parameters."""

from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, PARAM_SCHEDULERS

import fst
from fst.training.engine import SparsityHook
from fst.training.engine.config import load_config, read_sparsity
from fst.training.engine.data.transforms import build_transforms
from tests.strategy_settings import SHIPPED

ROOT = Path(__file__).resolve().parents[1] / "configs"
OTHERS = {"_base_", "detection", "ablation"}  # have tests of their own
OTHER_NETWORKS = (
    "vit_small",
    "convnext_tiny",
)  # in test_vit_convnext.py
RECIPES = sorted(
    str(path.relative_to(ROOT))
    for path in ROOT.rglob("*.py")
    if not OTHERS & set(path.relative_to(ROOT).parts)
)
TASKS = ("cifar10", "imagenet")
SDGP_CIFAR = ["dense", "random_2_4", "magnitude_2_4"] + [
    f"rescaled_{n}_{m}"
    for n, m in [(1, 4), (2, 4), (1, 8), (2, 8), (4, 8), (2, 16), (4, 16), (8, 16)]
    + [(4, 32), (8, 32), (16, 32)]
]


# of the recipes that are trained for a step, those of `make test`
QUICK = ("resnet18_cifar10.py", "resnet9_cifar10_rescaled_2_4.py", "srste_resnet50_imagenet.py")


def load(name: str) -> Config:
    return load_config(str(ROOT / name))  # refuses names that nothing reads


def test_no_recipe_is_missing() -> None:
    resnet18 = {f"{s}_resnet18_{data}.py" for s in ("dense", "fst") for data in TASKS}
    resnet50 = {f"{s}_resnet50_imagenet.py" for s in ("dense", "srste", "fst", "fst_w")}
    sdgp = {
        f"sdgp/sdgp_{model}_imagenet_{rule}.py"
        for model in ("resnet18", "resnet50", "regnetx400mf")
        for rule in ("dense", "random", "magnitude", "rescaled")
    }
    sdgp_cifar = {f"sdgp/sdgp_resnet9_cifar10_{setting}.py" for setting in SDGP_CIFAR}
    assert len(sdgp_cifar) == 14
    others = {
        f"{strategy}_{model}_imagenet.py"
        for strategy in ("dense", "srste", "fst", "fst_w", "sdgp")
        for model in OTHER_NETWORKS
    }
    assert set(RECIPES) >= resnet18 | resnet50 | sdgp | sdgp_cifar | others | {
        "demo_digits.py",
        "step_vit_small_imagenet.py",
    }


EVERY_FOURTH = [
    pytest.param(name, marks=pytest.mark.exhaustive if index % 4 else ())
    for index, name in enumerate(RECIPES)
]
MARKS = {True: pytest.mark.system, False: pytest.mark.exhaustive}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name.endswith(QUICK) else MARKS[index % 4 == 0])
        for index, name in enumerate(RECIPES)
        if not any(other in name for other in OTHER_NETWORKS)
    ],
)
def test_recipe_builds_and_trains_a_step(name: str) -> None:
    config = load(name)
    for loader in (config.train_dataloader, config.val_dataloader, config.test_dataloader):
        build_transforms(loader.dataset.get("transforms", ()))
    model = MODELS.build(config.model)
    hook = SparsityHook(**config.sparsity)
    fst.convert(model.sparse_root, hook.strategy, **hook.choice)
    optimizer = build_optim_wrapper(model, config.optim_wrapper)
    fst.attach(model.sparse_root, optimizer.optimizer, total_steps=100, steps_per_epoch=10)
    side = 64 if "imagenet" in name else 32
    channels = len(config.model.data_preprocessor.mean)
    batch = {
        "inputs": torch.randint(256, (2, channels, side, side), dtype=torch.uint8),
        "labels": torch.tensor([0, 1]),
    }
    losses = model.train_step(batch, optimizer)
    assert losses["loss"].isfinite()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", SHIPPED)
def test_any_strategy_is_an_option_of_a_recipe(task: str, name: str) -> None:
    path = str(ROOT / f"dense_resnet18_{task}.py")
    strategy, _ = read_sparsity(load_config(path, {"sparsity.strategy": name}))
    assert strategy.name == name


@pytest.mark.parametrize("name", EVERY_FOURTH)
def test_schedules_end_with_the_training(name: str) -> None:
    assert load(name).env_cfg.cudnn_benchmark  # sizes are fixed
    for config in (load(name), load_config(str(ROOT / name), {"epochs": 40})):
        schedules = config.get("param_scheduler") or []
        ends = [one.get("end") or one.get("begin", 0) + one.T_max for one in schedules]
        assert max(ends, default=config.train_cfg.max_epochs) == config.train_cfg.max_epochs


def learning_rates(config: Config, epoch_length: int) -> list[float]:
    """The learning rate at each iteration, from the recipe's schedulers."""
    optimizer = torch.optim.SGD(
        [torch.zeros(1, requires_grad=True)], config.optim_wrapper.optimizer.lr
    )
    schedulers = []
    for entry in config.param_scheduler:
        entry = dict(entry, optimizer=optimizer, epoch_length=epoch_length)
        kind = PARAM_SCHEDULERS.get(entry.pop("type"))
        entry.pop("convert_to_iter_based")
        schedulers.append(kind.build_iter_from_epoch(**entry))
    rates = []
    for _ in range(config.train_cfg.max_epochs * epoch_length):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return rates


def test_fst_schedule() -> None:
    config = load("fst_resnet50_imagenet.py")
    optimizer = config.optim_wrapper.optimizer
    assert config.train_cfg.max_epochs == 120
    assert config.train_dataloader.batch_size == 256
    assert (optimizer.momentum, optimizer.weight_decay) == (0.9, 7e-5)
    assert config.model.loss.label_smoothing == 0.1
    assert fst.get_strategy("fst").decay == 2e-4
    rates = learning_rates(config, 10)
    assert rates[0] == pytest.approx(0, abs=2e-5)
    assert rates[25] == pytest.approx(0.05, rel=0.03)
    assert rates[50] == pytest.approx(0.1)
    assert rates[625] == pytest.approx(0.05)
    assert rates[-1] < 1e-4
    assert rates[50:] == sorted(rates[50:], reverse=True)


@pytest.mark.parametrize(
    ("name", "peak", "peak_epoch", "epochs", "batch", "decay"),
    [
        ("sdgp/sdgp_resnet9_cifar10_rescaled_2_4.py", 0.5, 2, 150, 512, 5e-4),
        ("sdgp/sdgp_resnet18_imagenet_rescaled.py", 1.0, 2, 88, 1024, 5e-5),
        ("sdgp/sdgp_resnet50_imagenet_random.py", 1.7, 2, 88, 512, 1e-4),
        ("sdgp/sdgp_regnetx400mf_imagenet_magnitude.py", 1.0, 2, 88, 1024, 5e-5),
    ],
)
def test_sdgp_schedules(
    name: str, peak: float, peak_epoch: int, epochs: int, batch: int, decay: float
) -> None:
    config = load(name)
    assert config.train_cfg.max_epochs == epochs
    assert config.train_dataloader.batch_size == batch
    assert config.optim_wrapper.optimizer.weight_decay == decay
    assert config.model.test_time_augmentation == "flip"
    length = 10
    rates = learning_rates(config, length)
    top = max(range(len(rates)), key=rates.__getitem__)
    assert top == pytest.approx(peak_epoch * length, abs=1)
    assert rates[0] == pytest.approx(1e-4 * peak)
    assert rates[top] == pytest.approx(peak, rel=0.01)
    middle = (peak_epoch + epochs) * length // 2
    assert rates[middle] == pytest.approx(peak / 2, rel=0.01)
    assert rates[-1] < 0.002 * peak


def test_sdgp_sizes_grow_in_the_published_epochs() -> None:
    config = load("sdgp/sdgp_resnet18_imagenet_dense.py")
    crop, _ = build_transforms(config.train_dataloader.dataset.transforms)
    sizes = {0: 160, 65: 160, 70: 160, 71: 192, 76: 192, 87: 192}
    for epoch, side in sizes.items():
        crop.set_epoch(epoch)
        assert crop.size == (side, side)


@pytest.mark.parametrize(
    ("network", "norms", "exempt"),
    [("resnet18", 20, 17), ("resnet50", 53, 49), ("regnetx400mf", 71, 0)],
)
def test_sdgp_exempts_parameters_called_bn_from_decay(
    network: str, norms: int, exempt: int
) -> None:
    config = load(f"sdgp/sdgp_{network}_imagenet_dense.py")
    model = MODELS.build(config.model)
    wrapper = build_optim_wrapper(model, config.optim_wrapper)
    decays = {
        id(p): group["weight_decay"]
        for group in wrapper.optimizer.param_groups
        for p in group["params"]
    }
    layers = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.BatchNorm2d)}
    free = [n for n, m in layers.items() if all(not decays[id(p)] for p in m.parameters())]
    assert (len(layers), len(free)) == (norms, exempt)
    assert all("bn" in name for name in free)
    rest = config.optim_wrapper.optimizer.weight_decay
    assert all(decays[id(p)] == rest for n, p in model.named_parameters() if "bn" not in n)


@pytest.mark.parametrize("network", ["resnet18", "resnet50", "regnetx400mf"])
@pytest.mark.parametrize("rule", ["dense", "random", "magnitude", "rescaled"])
def test_sdgp_networks_on_imagenet(network: str, rule: str) -> None:
    """Blur in front of strides but for the dense ResNet-18; pruned networks drawn anew."""
    config = load(f"sdgp/sdgp_{network}_imagenet_{rule}.py").model
    assert config.get("blur_pool", False) == ((network, rule) != ("resnet18", "dense"))
    initialisation = None if rule == "dense" else "kaiming_uniform"
    assert config.get("initialisation") == initialisation


@pytest.mark.parametrize("setting", SDGP_CIFAR)
def test_sdgp_networks_on_cifar(setting: str) -> None:
    config = load(f"sdgp/sdgp_resnet9_cifar10_{setting}.py").model
    assert config.initialisation == "kaiming_uniform"
    batch = {"inputs": torch.zeros(16, 3, 32, 32), "labels": torch.zeros(16)}
    images = MODELS.build(config.data_preprocessor)(batch, training=True)["inputs"]
    holes = (images == 0).all(1)  # 4 x 4 pixels, wholly inside
    assert (holes.any(1).sum(1) == 4).all() and (holes.any(2).sum(1) == 4).all()
