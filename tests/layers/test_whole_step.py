"""A whole training step never waits for the device."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fst
from fst.ops import arguments
from tests.networks import optimizer_for, small_net
from tests.strategy_settings import DEFAULTS, SETTINGS, of_each_kind


class NoWaiting(TorchDispatchMode):
    """Raises where the host would have to wait for the device."""

    def __torch_dispatch__(self, function, types, operands=(), options=None):
        options = options or {}
        result = function(*operands, **options)
        tensors = [t for t in (*operands, *options.values(), result) if isinstance(t, Tensor)]
        depends = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        if function is torch.ops.aten.index.Tensor:
            waits = any(t is not None and t.dtype == torch.bool for t in operands[1])
        else:
            waits = depends & set(function.tags) and any(t.device.type != "cpu" for t in tensors)
        moves = len({t.device.type for t in tensors if t.dim()}) > 1
        if waits or moves and not options.get("non_blocking"):
            raise AssertionError(f"{function} waits for the device")
        return result


def _train(net: nn.Module, images: Tensor, steps: int, waiting: int = 0) -> None:
    """``waiting``: how many steps may wait."""
    optimizer = optimizer_for(net, lr=0.05, momentum=0.9)
    attachment = fst.attach(net, optimizer, total_steps=20, steps_per_epoch=2)
    target = torch.zeros(len(images), dtype=torch.long, device=images.device)

    def train(steps: int) -> None:
        for _ in range(steps):
            loss = F.cross_entropy(net(images), target)
            attachment.report_loss(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    train(waiting)
    with NoWaiting():
        train(steps)


# rigl counts the kept connections when it replaces some, every `interval` steps; prunetrain looks
# for the channels to remove, every `interval` epochs, and traces the model before its first step.
COUNTING = ("rigl", "prunetrain", "step")


@pytest.mark.parametrize("row", of_each_kind([row for row in SETTINGS if row.name not in COUNTING]))
def test_no_step_waits_for_the_device(row, monkeypatch):
    """On the device that has no data, so that none can be read; nor is any sent there."""
    original = torch.tensor

    def checked(data, **options):
        assert torch.device(options.get("device") or "cpu").type == "cpu", "waits for the device"
        return original(data, **options)

    monkeypatch.setattr(torch, "tensor", checked)
    with torch.device("meta"):
        net = small_net(double=False)
        fst.convert(net, row.build())
        _train(net, torch.randn(4, 4, 5, 5), steps=2)


@pytest.mark.parametrize(
    "row",
    [row for row in DEFAULTS if row.name != "step"],  # its Adam counts on the default device
    ids=lambda row: row.id,
)
def test_nothing_is_made_on_the_default_device(row):
    net = small_net(double=False)
    fst.convert(net, row.build())
    with torch.device("meta"):
        _train(net, torch.randn(4, 4, 5, 5, device="cpu"), steps=3)


def test_waiting_is_noticed():
    """The test above would fail."""
    mask = torch.ones(3, dtype=torch.bool)
    for wait in (
        lambda x: x.sum().item(),
        lambda x: x[mask.to(x.device)],
        lambda x: torch.zeros(3).to(x.device),
        lambda x: x.cpu(),
    ):
        with pytest.raises((AssertionError, NotImplementedError, RuntimeError)), NoWaiting():
            wait(torch.zeros(3, device="meta"))


def _step_of_layer(layer: fst.layers.modules.SparseLayer, images: Tensor) -> None:
    """Forward and backward without the autograd engine, which needs the device's driver."""
    output = layer(images)
    with torch.no_grad():
        gradient = torch.randn_like(output)
        node = output.grad_fn
        _, layer.weight.grad, *_ = getattr(node, "apply", node)(gradient)


ON_A_GPU = ("fst", "sdgp", "srste", "wg", "gx", "tsm", "meprop")


@pytest.mark.parametrize(
    ("name", "autocast"),
    [*((name, name == "fst") for name in ON_A_GPU), ("fst", False), ("sdgp", True)],
)
@pytest.mark.parametrize("kernels", ["torch", "triton", "by itself"])
def test_layers_on_a_gpu_never_wait(name, kernels, autocast, triton_usable, monkeypatch):
    """On CUDA tensors without data: the branches that only a GPU takes."""
    monkeypatch.setenv("FST_AUTOTUNE", "0")
    if autocast:  # torch refuses it where there is no GPU
        monkeypatch.setattr(arguments, "is_autocast", lambda: True)
        monkeypatch.setattr(arguments, "autocast_dtype", lambda device: torch.bfloat16)
    overrides = {"prune_weight": True} if name == "sdgp" else {}
    strategy = fst.get_strategy(name, **overrides)
    operations = {
        "fst": ("prune_weight",),
        "sdgp": ("prune_weight", "prune_grad_output"),
        "srste": ("prune_weight",),
        "wg": ("prune_weight",),
        "gx": ("prune_weight", "prune_grad_output"),
    }
    chooses = kernels == "by itself"
    if not chooses and name not in operations:
        pytest.skip("no kernel computes any of its operations")
    forced = {} if chooses else dict.fromkeys(operations[name], kernels)
    with FakeTensorMode(), warnings.catch_warnings(), fst.backends.force(**forced):
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        layers = nn.Sequential(
            nn.Conv2d(8, 8, 3, device="cuda"), nn.Conv2d(8, 8, 1, groups=2, device="cuda")
        )
        fst.convert(layers, strategy)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
        images = torch.randn(2, 8, 6, 6, device="cuda", requires_grad=True)
        with NoWaiting():
            for _ in range(3):
                for layer in layers:
                    _step_of_layer(layer, images)
                optimizer.step()
    backends = {
        decision.backend for layer in layers for decision in layer.state.record.decisions.values()
    }
    assert ("triton" in backends) == (kernels != "torch" and name in operations)
