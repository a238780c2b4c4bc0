"""Converted networks are traced without graph breaks, forward and backward, kernels included."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fst
from fst.basics.errors import UsageError
from fst.layers.checks import refuse_capture
from fst.rules.nm import Transposable
from tests.networks import batch, gradients, small_net
from tests.strategy_settings import DEFAULTS, Setting, quick_first, setting

QUICK = ("fst", "sdgp", "gx-alternating")  # of compiled networks, those of `make test`


def _traceable(row: Setting) -> bool:
    strategy = row.build()
    kept = isinstance(strategy.output, Transposable) and strategy.output.interval > 1
    return row.deterministic and not (kept or strategy.schedule or strategy.has_memory)


def _compiled_step(net: nn.Module, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    torch._dynamo.reset()
    output = torch.compile(net, fullgraph=True, backend="aot_eager")(images)
    output.square().sum().backward()
    return output.detach(), gradients(net)


def _assert_compiled_equals_eager(net: nn.Module, images: Tensor) -> None:
    other = copy.deepcopy(net)
    expected = other(images)
    expected.square().sum().backward()
    actual, found = _compiled_step(net, images)
    torch.testing.assert_close(actual, expected.detach(), rtol=1e-3, atol=1e-4)
    for name, value in gradients(other).items():
        scale = value.abs().max().item()
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize(
    "row",
    quick_first([r for r in (*DEFAULTS, setting("gx-alternating")) if _traceable(r)], QUICK),
)
def test_a_network_is_one_graph(row):
    net = small_net(double=False)
    fst.convert(net, row.build(), include=[nn.Conv2d, nn.Linear])
    _assert_compiled_equals_eager(net, batch(dtype=torch.float32))


@pytest.mark.parametrize("name", ["fst", pytest.param("sdgp", marks=pytest.mark.exhaustive)])
@pytest.mark.system
def test_resnet18_with_kernels_is_one_graph(name, stand_in, triton_usable):
    models = pytest.importorskip("torchvision.models")
    overrides = {"prune_weight": True} if name == "sdgp" else {}
    net = models.resnet18(num_classes=4).train()
    fst.convert(net, fst.get_strategy(name, **overrides))
    with fst.backends.force(**triton_usable):
        _assert_compiled_equals_eager(net, torch.randn(2, 3, 32, 32))
    layers = len(fst.sparse_layers(net))
    assert len(stand_in.calls) == 2 * layers  # eager and traced


@pytest.mark.parametrize("strategy", ["srste", "fst_w", "fst", "sdgp", "sampled"])
def test_the_graph_for_a_gpu_has_pytorchs_operators_alone(strategy):
    """Inductor fuses them; it calls operators of this library from Python. No GPU is asked."""
    called = []

    def backend(graph: fx.GraphModule, _: object) -> Callable[..., object]:
        modules = [m for m in graph.modules() if isinstance(m, fx.GraphModule)]  # backward too
        called.extend(str(node.target) for module in modules for node in module.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        net = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1, device="cuda")])
        fst.convert(net, strategy)
        images = torch.randn(2, 8, 6, 6, device="cuda", requires_grad=True)
        torch.compile(net[0], fullgraph=True, backend=backend)(images)
    assert any("convolution_backward" in name for name in called)
    assert not [name for name in called if "fst" in name]


@pytest.mark.parametrize(
    ("strategy", "named", "advised"),
    [
        (fst.get_strategy("tsm"), "interval=40", fst.get_strategy("tsm", interval=1)),
        pytest.param(
            *(fst.get_strategy("fst", phase="random"), "phase='random'", fst.get_strategy("fst")),
            marks=pytest.mark.exhaustive,
        ),
        (fst.get_strategy("resprop"), "previous step's gradients", None),
        (fst.get_strategy("rigl"), "masks that 'rigl' changes", None),
    ],
    ids=["interval", "phase", "memory", "schedule"],
)
def test_what_cannot_be_traced_is_refused_as_by_uncompiled_code(strategy, named, advised):
    """The error is FST's own, each time, and what it advises works in the same process."""
    torch._dynamo.reset()
    net = small_net(double=False)
    fst.convert(net, strategy)
    for _ in range(2):
        compiled = torch.compile(net, backend="aot_eager")
        with pytest.raises(UsageError, match=f"layer '0': .*{named}.*torch.compile cannot trace"):
            compiled(batch(dtype=torch.float32))
    if advised is not None:
        other = small_net(double=False)
        fst.convert(other, advised)
        torch.compile(other, backend="aot_eager")(batch(dtype=torch.float32)).sum().backward()


@pytest.mark.parametrize("strategy", ["tsm", "resprop", "rigl", "sdgp,rule=random"])
def test_what_a_cuda_graph_would_repeat_is_refused(strategy):
    with pytest.raises(UsageError, match="layer '0': .* state that a CUDA graph cannot repeat"):
        refuse_capture("0", fst.get_strategy(strategy), is_seeded=True)


@pytest.mark.parametrize("strategy", ["srste", "fst", "sdgp,rule=random"])
def test_a_cuda_graph_may_repeat_the_rest(strategy):
    refuse_capture("0", fst.get_strategy(strategy), is_seeded=False)


@pytest.mark.parametrize(
    ("strategy", "is_refused"),
    [("srste", False), ("fst", False), ("sdgp", False), ("tsm", True), ("resprop", True)],
)
def test_a_layer_in_training_looks_whether_a_graph_is_captured(strategy, is_refused, monkeypatch):
    """On a GPU that is not there, while a stub says that a graph is captured."""
    monkeypatch.setattr("fst.layers.modules.is_capturing", lambda: True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer = nn.Conv2d(8, 8, 3, padding=1, device="cuda")
        fst.convert(layer, strategy)
        images = torch.randn(2, 8, 6, 6, device="cuda")
        refused = pytest.raises(UsageError, match="state that a CUDA graph cannot repeat")
        with refused if is_refused else contextlib.nullcontext():
            assert layer(images).shape == images.shape
        with torch.no_grad():
            layer.eval()(images)


@pytest.mark.system
def test_what_cannot_be_trained_compiled_is_evaluated_compiled():
    torch._dynamo.reset()
    net = small_net(double=False)
    fst.convert(net, "tsm")
    images = batch(dtype=torch.float32)
    with torch.no_grad():
        compiled = torch.compile(net.eval(), backend="aot_eager")
        torch.testing.assert_close(compiled(images), net(images))
