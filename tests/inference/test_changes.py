"""A packed model computes what the plain one does, whatever is changed in both."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrize, prune, vector_to_parameters

import fst
from fst.basics.errors import UsageError
from fst.ops.cpp import missing
from tests.inference.ranks import BY_ZEROS, rank
from tests.networks import keep

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason="the C++ kernels are missing"),
    pytest.mark.usefixtures("without_gradients", "ways"),
]


@pytest.fixture(params=["library", "zeros"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who computes the products."""
    rank(monkeypatch, BY_ZEROS if request.param == "zeros" else {"dense": 1.0, "unfused": 1.0})
    return request.param


def network() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout()),
        *(nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.SiLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8), nn.ReLU()),
    )
    return keep(net).requires_grad_(False)


def images() -> Tensor:
    return torch.randn(4, 8, 9, 9, generator=torch.Generator().manual_seed(1))


def alike(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("activation", [nn.Identity, nn.ReLU, nn.ReLU6, nn.SiLU, nn.Hardswish])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("adds", [False, True])
def test_nan_stays(activation: type[nn.Module], dtype: torch.dtype | None, adds: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.act = nn.Conv2d(8, 8, 3, padding=1), activation()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.conv(x) + x) if adds else self.act(self.conv(x))

    model = Net().eval()  # no weight is zero: 0 · NaN adds nothing
    packed = fst.pack(model, images(), dtype=dtype)
    x = images()
    x[1, 2, 3, 3] = torch.nan
    assert torch.equal(packed(x.to(dtype or x.dtype)).isnan(), model(x).isnan())
    model.conv.weight[5, 0, 1, 1] = torch.nan
    packed.load_state_dict(model.state_dict())
    x = images()
    assert model(x).isnan().any()
    assert torch.equal(packed(x.to(dtype or x.dtype)).isnan(), model(x).isnan())


def times_two(layer: nn.Module) -> None:
    layer.weight.mul_(2)


def doubled(module: nn.Module, given: tuple[Tensor], output: Tensor) -> Tensor:
    return output * 2


def new_norm(net: nn.Module) -> None:
    net[1] = nn.BatchNorm2d(8).eval()
    net[1].running_mean.fill_(0.5)


def swapped(net: nn.Module) -> None:
    other = nn.Parameter(net[0].weight * 2, requires_grad=False)
    torch.utils.swap_tensors(net[0].weight, other)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "mul_": lambda net: net[0].weight.mul_(2),
    "inference mode": lambda net: torch.inference_mode()(times_two)(net[0]),
    "detach": lambda net: net[4].weight.detach().mul_(2),
    "data": lambda net: setattr(net[0].weight, "data", net[0].weight.data * 2),
    "data of another layout": lambda net: setattr(
        net[0].weight, "data", (net[0].weight * 2).contiguous(memory_format=torch.channels_last)
    ),
    "parameter": lambda net: setattr(
        net[0], "weight", nn.Parameter(net[0].weight * 2, requires_grad=False)
    ),
    "swap_tensors": swapped,
    "init": lambda net: nn.init.constant_(net[0].weight, 0.1),
    "vector_to_parameters": lambda net: vector_to_parameters(
        parameters_to_vector(net.parameters()) * 2, net.parameters()
    ),
    "lerp_": lambda net: net[9].weight.lerp_(torch.ones(8, 16), 0.5),
    "bias in place": lambda net: net[0].bias.zero_(),
    "no bias": lambda net: setattr(net[0], "bias", None),
    "running_mean": lambda net: net[1].running_mean.add_(1),
    "load_state_dict of the norm": lambda net: net[1].load_state_dict(
        {**net[1].state_dict(), "running_mean": torch.ones(8)}
    ),
    "load_state_dict": lambda net: net.load_state_dict(
        {name: value + 1 for name, value in net.state_dict().items()}
    ),
    "load_state_dict by assignment": lambda net: net.load_state_dict(
        {name: value + 1 for name, value in net.state_dict().items()}, assign=True
    ),
    "eps": lambda net: setattr(net[1], "eps", 0.5),
    "another norm": new_norm,
    "norm in training": lambda net: net[1].train(),
    "another activation": lambda net: net.__setitem__(2, nn.Sigmoid()),
    "another activation for nothing": lambda net: net.__setitem__(3, nn.Sigmoid()),
    "a convolution of another class": lambda net: net.__setitem__(
        0, nn.Sequential(net[0], nn.Tanh())
    ),
    "appended": lambda net: net.append(nn.Sigmoid()),
    "pruned": lambda net: prune.l1_unstructured(net[0], "weight", 0.5),
    "pruned behind a norm": lambda net: prune.random_unstructured(net[4], "weight", 100),
    "stride": lambda net: setattr(net[0], "stride", (2, 2)),
    "padding": lambda net: setattr(net[0], "padding", (0, 0)),
    "dilation": lambda net: setattr(net[0], "dilation", (2, 2)),
    "double": lambda net: net.double(),
    "hook of the convolution": lambda net: net[0].register_forward_hook(
        lambda *given: given[2] * 2
    ),
    "hook of the norm": lambda net: net[1].register_forward_hook(lambda *given: given[2] * 2),
    "hook of the activation": lambda net: net[2].register_forward_pre_hook(
        lambda _, given: (given[0] - 1,)
    ),
    "hook of nothing": lambda net: net[3].register_forward_hook(doubled),
    "hook of the model": lambda net: net.register_forward_hook(doubled),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_noticed(change: str) -> None:
    model, x = network(), images()
    packed = fst.pack(model, x)
    for net in (model, packed):
        torch.manual_seed(0)
        CHANGES[change](net)
    x = x.double() if change == "double" else x
    for _ in range(2):
        alike(packed(x), model(x))
    if "hook" not in change:
        alike(pickle.loads(pickle.dumps(copy.deepcopy(packed)))(x), model(x))


def test_what_products_do_not_know_is_refused_by_name() -> None:
    packed = fst.pack(network(), images())
    packed[0].padding_mode = "reflect"
    with pytest.raises(UsageError, match="layer '0' is packed, and has now padding_mode='reflect'"):
        packed(images())


def test_tensors_that_count_no_changes_are_read_anew() -> None:
    model, x = network(), images()
    packed = fst.pack(model, x)
    with torch.inference_mode():
        for net in (model, packed):
            net[0].weight = nn.Parameter(net[0].weight.clone(), requires_grad=False)
            net(x)
            net[0].weight.mul_(2)
        alike(packed(x), model(x))


def test_functional_call() -> None:
    model, x = network(), images()
    packed = fst.pack(model, x)
    other = {n: v * 3 for n, v in model.state_dict().items() if v.is_floating_point()}
    for given in (other, dict(model.named_parameters()), other):
        alike(
            torch.func.functional_call(packed, given, x),
            torch.func.functional_call(model, given, x),
        )
    alike(packed(x), model(x))


def test_a_packed_model_within_inference_mode() -> None:
    model = network()
    with torch.inference_mode():
        packed = fst.pack(model, images())
        packed[0].weight.mul_(2)
        model[0].weight.mul_(2)
        alike(packed(images()), model(images()))


def autocast(net: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net(x)


WATCHERS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "jit.trace": lambda net, x: torch.jit.trace(net, (torch.ones_like(x),), check_trace=False)(x),
    "make_fx": lambda net, x: torch.fx.experimental.proxy_tensor.make_fx(net)(torch.ones_like(x))(
        x
    ),
    "symbolic_trace": lambda net, x: torch.fx.symbolic_trace(net)(x),
    "vmap": lambda net, x: torch.func.vmap(net)(x[:, None]),
    "jvp": lambda net, x: torch.func.jvp(net, (x,), (x,))[1],
    "autocast": autocast,
}


@pytest.mark.parametrize("watcher", WATCHERS)
def test_tracers_and_transforms_see_the_plain_model(watcher: str) -> None:
    import torch.fx.experimental.proxy_tensor

    model, x = network(), images()
    packed = fst.pack(model, x)
    run = WATCHERS[watcher]
    torch.testing.assert_close(run(packed, x), run(model, x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dynamic", [None, True])
def test_many_packed_models_compile_as_one_graph(dynamic: bool | None) -> None:
    model, x = network(), images()
    for _ in range(10):
        packed = fst.pack(model, x)
        compiled = torch.compile(packed, fullgraph=True, backend="eager", dynamic=dynamic)
        alike(compiled(x), model(x))


def test_a_changed_weight_is_compiled_and_exported() -> None:
    model, x = network(), images()
    packed = fst.pack(model, x)
    for net in (model, packed):
        net[0].weight.mul_(2)
        net[4].weight = nn.Parameter(net[4].weight * 2, requires_grad=False)
        net[5].running_mean.add_(1)
    alike(torch.export.export(packed, (x,)).module()(x), model(x))
    alike(torch.compile(packed, fullgraph=True, backend="eager")(x), model(x))


class Stateful(nn.Module):
    """Reads and writes attributes in `forward`."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.what, self.calls, self.scale, self.double = what, 0, 1.0, False
        self.sizes, self.options, self.function = [], {"add": 0.0}, torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "counts":
            self.calls += 1
            x = x * self.calls
        elif self.what == "lists":
            self.sizes.append(1)
            x = x * len(self.sizes)
        x = self.function(self.act(self.norm(self.conv(x))) * self.scale + self.options["add"])
        return x * 2 if self.double else x


STATES: dict[str, Callable[[Stateful], object]] = {
    "counts": lambda net: setattr(net, "calls", 0),
    "lists": lambda net: setattr(net, "sizes", []),
    "scale": lambda net: setattr(net, "scale", 5.0),
    "flag": lambda net: setattr(net, "double", True),
    "options": lambda net: net.options.update(add=3.0),
    "function": lambda net: setattr(net, "function", torch.sigmoid),
}


@pytest.mark.parametrize("what", STATES)
def test_the_state_of_python_code_is_noticed(what: str) -> None:
    model, x = keep(Stateful(what)), images()
    packed = fst.pack(model, x)
    assert bool(packed.report.layers[0].follows) == (what not in ("counts", "lists"))
    for net in (model, packed):
        STATES[what](net)
    twin = pickle.loads(pickle.dumps(packed))
    for _ in range(3):
        expected = model(x)
        for one in (packed, twin):
            alike(one(x), expected)
            assert (one.calls, one.sizes) == (model.calls, model.sizes)


class Shifted(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.fc, self.shift = nn.Linear(16, 8), nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.shift


@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 4, 8), (8,), (4, 8), (1, 8)])
def test_a_residual_of_other_axes(shape: tuple[int, ...]) -> None:
    model = keep(Shifted(shape)).requires_grad_(False)
    packed = fst.pack(model, torch.randn(4, 16))
    for given in ((4, 16), (1, 16), (16,), (3, 4, 16), (0, 16), (2, 0, 16)):
        x = torch.randn(given)
        try:
            expected = model(x)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                packed(x)
        else:
            alike(packed(x), expected)


def test_rows_in_another_order_are_no_residual() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.fc(x) + y

    packed = fst.pack(keep(Sum()), (torch.randn(2, 3, 8), torch.randn(2, 3, 8)))
    with pytest.raises(RuntimeError, match="must match"):
        packed(torch.randn(2, 3, 8), torch.randn(3, 2, 8))


class Viewed(nn.Module):
    """A sum that is written onto a tensor of which there is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.a(x)
        v = z.flatten(1)
        z.add_(self.c(x))
        return v * 1, z


def test_a_fusion_that_others_see_is_not_made() -> None:
    model, x = keep(Viewed()), images()
    for found, expected in zip(fst.pack(model, x)(x), model(x), strict=True):
        alike(found, expected)


def test_parametrized_after_packing() -> None:
    class Twice(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    model, x = network(), images()
    packed = fst.pack(model, x)
    for net in (model, packed):
        parametrize.register_parametrization(net[0], "weight", Twice())
    alike(packed(x), model(x))
