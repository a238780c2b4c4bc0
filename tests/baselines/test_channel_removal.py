"""Channels that hang together, and their removal."""

import copy

import pytest
import torch
from torch import nn

import fst
import fst.models
from fst.baselines.channel_removal import (
    channel_groups,
    channel_maxima,
    fit_channels,
    remove_channels,
    weights_of,
)
from fst.layers.coverage import multiply_adds
from tests.baselines.networks import Auxiliary, Everything, unequal
from tests.networks import batch, small_net


class Branches(nn.Module):
    """A shortcut, a concatenation, a depthwise convolution, and a flattened map."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.body = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.left, self.right = nn.Conv2d(6, 4, 1), nn.Conv2d(6, 5, 1)
        self.depthwise = nn.Conv2d(9, 9, 3, groups=9)
        self.head = nn.Linear(9 * 4 * 4, 3)

    def forward(self, x):
        x = self.stem(x).relu()
        x = (x + self.norm(self.body(x))).relu()
        x = torch.cat([self.left(x), self.right(x)], 1)
        return self.head(self.depthwise(x).relu().flatten(1))


def build_branches():
    return Branches(), (3, 6, 6)


def build_digits():
    return fst.models.digits_net(width=4), (1, 8, 8)


def build_resnet9():
    return fst.models.resnet9(width=4), (3, 32, 32)


def build_torchvision():
    models = pytest.importorskip("torchvision.models")
    return models.resnet18(num_classes=5), (3, 32, 32)


def build_bottlenecks():
    timm = pytest.importorskip("timm")
    return timm.create_model("resnet26", num_classes=5), (3, 32, 32)


def build_mobilenet():
    timm = pytest.importorskip("timm")
    return timm.create_model("mobilenetv2_050", num_classes=5), (3, 32, 32)


BUILDERS = [
    build_branches,
    build_digits,
    build_resnet9,
    build_torchvision,
    build_bottlenecks,
    build_mobilenet,
]


def _traced(build):
    torch.manual_seed(0)
    model, size = build()
    fst.convert(model, "dense")
    for module in model.modules():  # so that batch norms do something
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.normal_(module.bias)
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    example = torch.randn(2, *size)
    groups = channel_groups(model, example[:1], set(fst.sparse_layers(model).values()))
    return model, example, groups


def _zero(model, group, mask):
    """Zero all weights of the masked channels, element by element."""
    with torch.no_grad():
        for (name, axis), channels in group.places.items():
            module = model.get_submodule(name.rpartition(".")[0])
            if name.endswith("weight") and not isinstance(module, nn.modules.batchnorm._BatchNorm):
                for position, channel in enumerate(channels):
                    if channel >= 0 and mask[channel]:
                        module.weight.select(axis, position).zero_()


def _macs(model, example):
    return sum(multiply_adds(model, example).values())


def _parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "build",
    [*BUILDERS[:4], *(pytest.param(build, marks=pytest.mark.system) for build in BUILDERS[4:])],
)
def test_removing_zeroed_channels_changes_nothing_but_the_size(build):
    model, example, groups = _traced(build)
    removable = [group for group in groups if not group.obstacle]
    assert len(removable) >= 2
    removed = []
    for group in removable:
        mask = torch.arange(group.size) % 3 == 1
        _zero(model, group, mask)
        removed.append((group, mask))
        assert torch.equal(channel_maxima(model, group) == 0, mask)
    model.eval()
    with torch.no_grad():
        expected = model(example)
        before, macs = _parameters(model), _macs(model, example)
        remove_channels(model, removed)
        actual = model(example)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * expected.abs().max())
    assert _parameters(model) < 0.6 * before
    assert _macs(model, example) < 0.6 * macs
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            shape = (module.out_channels, module.in_channels // module.groups)
            assert tuple(module.weight.shape[:2]) == shape, name
        elif isinstance(module, nn.BatchNorm2d):
            assert module.num_features == len(module.weight) == len(module.running_mean), name
    full = build()[0]  # what a file of the smaller model needs
    changed = fit_channels(full, model.state_dict())
    assert changed
    full.load_state_dict(model.state_dict())
    with torch.no_grad():
        actual = full.eval()(example)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * expected.abs().max())


@pytest.mark.parametrize("seed", range(8))
def test_random_graphs(seed):
    """Whatever is done to the channels: without those that nothing reads, the rest stays."""
    torch.manual_seed(seed)
    model, example = unequal(Everything(seed)).eval(), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    fst.convert(model, "dense")
    producers = set(fst.sparse_layers(model).values())
    removed = []
    for group in channel_groups(model, example[:1], producers):
        if not group.obstacle:
            removed.append((group, torch.arange(group.size) % 3 == 1))
            _zero(model, *removed[-1])
    with torch.no_grad():
        expected = model(example)
        remove_channels(model, removed)
        torch.testing.assert_close(model(example), expected)


def test_what_only_the_training_reads_is_followed():
    """Its channels have the same reason to stay, though no call in eval mode shows it."""
    model = Auxiliary().eval()
    fst.convert(model, "dense")
    groups = channel_groups(model, torch.randn(1, 3, 6, 6), list(fst.sparse_layers(model).values()))
    (first,) = [group for group in groups if ("first.weight", 0) in group.places]
    assert ("scale", 0) in first.places and "flip" in first.obstacle


@pytest.mark.parametrize(
    "between",
    [nn.Softmax(1), nn.LayerNorm([6, 4, 4], elementwise_affine=False), nn.Unflatten(1, (2, 3))],
)
def test_channels_whose_number_matters_stay(between):
    model = nn.Sequential(nn.Conv2d(3, 6, 1), between, nn.Flatten(), nn.Linear(96, 2))
    fst.convert(model, "dense")
    group = channel_groups(model, torch.randn(1, 3, 4, 4), list(model))[-1]
    assert group.obstacle.endswith(("in '1'", "in '2'"))


def test_groups_of_branches():
    model, _, groups = _traced(build_branches)
    found = {}
    for group in groups:
        key = frozenset((name, axis) for (name, axis), *_ in weights_of(model, group))
        found[key] = (group.size, bool(group.obstacle))
    trunk = {("stem.weight", 0), ("body.weight", 0), ("body.weight", 1)}
    assert found == {
        frozenset(trunk | {("left.weight", 1), ("right.weight", 1)}): (6, False),
        frozenset({("left.weight", 0), ("head.weight", 1)}): (4, False),
        frozenset({("right.weight", 0), ("head.weight", 1)}): (5, False),
        frozenset({("head.weight", 0)}): (3, True),
    }
    right = next(g for g in groups if g.size == 5).places
    assert right["right.bias", 0].tolist() == list(range(5))
    assert right["depthwise.weight", 0].tolist() == [-1] * 4 + list(range(5))
    assert right["head.weight", 1].tolist() == [-1] * 64 + [c for c in range(5) for _ in range(16)]


class Awkward(nn.Module):
    """Each convolution's channels have a reason to stay."""

    def __init__(self):
        super().__init__()
        self.excluded = nn.Conv2d(3, 4, 1)
        self.normed = nn.Conv2d(4, 4, 1)
        self.layer_norm = nn.GroupNorm(2, 4)
        self.before_grouped = nn.Conv2d(4, 4, 1)
        self.grouped = nn.Conv2d(4, 4, 1, groups=2)
        self.output = nn.Conv2d(4, 4, 1)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        x = self.layer_norm(self.normed(self.excluded(x)))
        x = self.output(self.grouped(self.before_grouped(x)))
        return x, self.head(x)


def test_obstacles_are_named():
    model = Awkward()
    fst.convert(model, "prunetrain", exclude="excluded")
    producers = set(fst.sparse_layers(model).values())
    groups = channel_groups(model, torch.randn(1, 3, 4, 4), producers)
    obstacles = {next(iter(group.places))[0].split(".")[0]: group.obstacle for group in groups}
    assert "not converted" in obstacles["excluded"]
    assert "group_norm" in obstacles["normed"]
    assert "grouped" in obstacles["before_grouped"] and "grouped" in obstacles["grouped"]
    assert "output" in obstacles["output"]
    assert obstacles["head"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fst.attach(model, optimizer, steps_per_epoch=1).report_loss(torch.tensor(1.0))
    sum(out.sum() for out in model(torch.randn(1, 3, 4, 4))).backward()
    with pytest.raises(ValueError, match="no channel.*not converted"):
        optimizer.step()


def test_tracing_leaves_the_model_as_it_is():
    model = fst.models.digits_net(width=4)
    fst.convert(model, "prunetrain", exclude="features.0.0")
    model.features[1].eval()
    model.features[0][0].weight.requires_grad_(False)
    state = copy.deepcopy(model.state_dict())
    kinds = [(type(m), m.training) for m in model.modules()]
    generator = torch.get_rng_state()
    producers = set(fst.sparse_layers(model).values())
    groups = channel_groups(model, torch.randn(1, 1, 8, 8), producers)
    assert [(type(m), m.training) for m in model.modules()] == kinds
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    torch.set_rng_state(generator)
    assert sum(not group.obstacle for group in groups) == 3


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_optimizer_follows(kind, layout):
    """The state of what stays stays; training goes on as if the rest had never been."""
    model, example, groups = _traced(build_branches)
    model = model.to(memory_format=layout)
    options = dict(momentum=0.9) if kind is torch.optim.SGD else {}
    optimizer = kind(
        [
            {"params": [*model.stem.parameters()], "lr": 0.01},
            {"params": [*list(model.parameters())[2:]]},
        ],
        lr=0.001,
        weight_decay=0.1,
        **options,
    )
    model(example).square().sum().backward()
    optimizer.step()
    trunk = next(g for g in groups if g.size == 6)
    mask = torch.tensor([False, True, False, False, True, False])
    old = {name: (p, dict(optimizer.state[p])) for name, p in model.named_parameters()}
    remove_channels(model, [(trunk, mask)], optimizer)
    assert [len(g["params"]) for g in optimizer.param_groups] == [2, 11]
    held = {id(p) for g in optimizer.param_groups for p in g["params"]}
    assert held == {id(p) for p in model.parameters()}
    assert len(optimizer.state) == 13
    stays = ~mask
    for name, parameter in model.named_parameters():
        before, state = old[name]
        for key, value in optimizer.state[parameter].items():
            expected = state[key]
            if expected.shape == before.shape:
                if name in ("stem.weight", "stem.bias", "norm.weight", "norm.bias"):
                    expected = expected[stays]
                elif name == "body.weight":
                    expected = expected[stays][:, stays]
                elif name in ("left.weight", "right.weight"):
                    expected = expected[:, stays]
            assert torch.equal(value, expected), (name, key)
    assert model.stem.weight.is_contiguous(memory_format=layout)
    model(example).square().sum().backward()
    optimizer.step()


def test_what_is_frozen_stays_frozen():
    model, _, groups = _traced(build_branches)
    model.body.requires_grad_(False)
    trunk = next(g for g in groups if g.size == 6)
    remove_channels(model, [(trunk, torch.arange(6) == 1)])
    assert model.body.weight.shape[:2] == (5, 5)
    assert not model.body.weight.requires_grad and model.stem.weight.requires_grad


def test_fit_channels_leaves_the_optimizer_no_state():
    """That of larger weights would not fit; what keeps its size keeps its state."""
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(batch()).sum().backward()
    optimizer.step()
    state = {**net.state_dict(), "0.weight": torch.zeros(7, 4, 3, 3), "0.bias": torch.zeros(7)}
    state["2.weight"] = torch.zeros(8, 7, 3, 3)
    assert fit_channels(net, state, optimizer) == ["0", "2"]
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(p is q for p, q in zip(held, net.parameters(), strict=True))
    kept = {id(p) for p in (net[2].bias, net[4].weight, net[4].bias)}
    assert {id(p) for p in optimizer.state} == kept


def test_fit_channels_refuses_what_is_no_loss_of_channels():
    state = small_net().state_dict()
    for key, shape in {
        "0.weight": (9, 4, 3, 3),
        "2.weight": (8, 8, 1, 1),
        "4.weight": (0, 72),
        "2.bias": (8, 1),
    }.items():
        with pytest.raises(ValueError, match=f"{key}.*no loss of channels"):
            fit_channels(small_net(), {**state, key: torch.zeros(shape)})
    net = small_net()
    before = list(net.parameters())
    assert fit_channels(net, state) == []
    assert all(p is q for p, q in zip(before, net.parameters(), strict=True))


def test_hidden_linear_layers_lose_channels_too_if_included():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 2)
    )
    fst.convert(net, "prunetrain", include=["0", "3"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    fst.attach(net, optimizer, steps_per_epoch=1).report_loss(torch.tensor(1.0))
    groups = channel_groups(net, torch.randn(1, 3, 4, 4), set(fst.sparse_layers(net).values()))
    hidden = next(g for g in groups if g.size == 6)
    assert not hidden.obstacle
    mask = torch.tensor([False, True, True, False, False, False])
    _zero(net, hidden, mask)
    input = torch.randn(5, 3, 4, 4)
    net.eval()
    with torch.no_grad():
        expected = net(input)
        remove_channels(net, [(hidden, mask)], optimizer)
        torch.testing.assert_close(net(input), expected)
    assert net[3].out_features == net[5].in_features == 4
    net.train()(input).sum().backward()
    optimizer.step()
