"""Permuted models compute what they did, and N:M keeps more of their weights."""

import copy

import pytest
import torch
from torch import nn

import fst
import fst.models
from fst.basics.errors import UsageError
from fst.channels.graph import traceable
from tests.api.permutation.networks import Auxiliary, Branches, Everything, seeds, unequal
from tests.oracle.conv import reference_nm_mask


def images(size=6, count=2, dtype=torch.float64):
    return torch.randn(count, 3, size, size, dtype=dtype)


def densely(model, x):
    """Outputs in eval mode before anything is pruned."""
    with traceable(model), torch.no_grad():
        outputs = model(x)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def assert_equal_outputs(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert (one - other).norm() <= 1e-12 * other.norm()


def permuted(model, x, attempts=0, **options):
    """The report on ``model``, which computes, holds and names what it did."""
    model = unequal(model)
    fst.convert(model, "asp", **options)
    before, outputs = copy.deepcopy(model.state_dict()), densely(model, x)
    owned = dict(model.named_parameters())
    report = fst.permute(model, x, attempts=attempts)
    assert_equal_outputs(densely(model, x), outputs)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(parameter is owned[name] for name, parameter in model.named_parameters())
    for name, tensor in after.items():
        assert tensor.shape == before[name].shape and tensor.stride() == before[name].stride()
        assert torch.equal(tensor.flatten().sort().values, before[name].flatten().sort().values)
    for layer in report.layers:
        n, m = (options.get(key, default) for key, default in (("n", 2), ("m", 4)))
        for state, kept in ((before, layer.before), (after, layer.after)):
            weight = state[f"{layer.name}.weight"]
            mask = reference_nm_mask(weight, n, m, 1)
            assert kept == pytest.approx(weight[mask].abs().sum().item(), rel=1e-12)
    assert report.after >= report.before
    return report


def resnet18():
    return fst.models.resnet18_cifar(width=16)


def resnet18_for_large_images():
    """Of which only the first, narrow half is converted, and searched quickly."""
    return pytest.importorskip("torchvision.models").resnet18(num_classes=5)


def mobilenet():
    models = pytest.importorskip("torchvision.models")
    return models.mobilenet_v2(width_mult=0.35, num_classes=5)


def densenet():
    models = pytest.importorskip("torchvision.models")
    return models.DenseNet(8, (3, 2), 16, num_classes=5)


def shufflenet():
    return pytest.importorskip("torchvision.models").shufflenet_v2_x0_5(num_classes=5)


def vit():
    timm = pytest.importorskip("timm")
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_classes=5
    )


def torchvision_vit():
    models = pytest.importorskip("torchvision.models")
    return models.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=5)


def convnext():
    timm = pytest.importorskip("timm")
    return timm.create_model("convnext_atto", depths=(1, 1, 1, 1), dims=(16, 32, 48, 64))


@pytest.mark.parametrize(
    ("build", "layers", "moved"),
    [
        (resnet18, "conv", 12),
        (vit, "linear", 3),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                (resnet18_for_large_images, ["layer1", "layer2.0"], 4),
                (shufflenet, "conv", 15),
                (mobilenet, "conv", 20),
                (densenet, "conv", 11),
                (torchvision_vit, "linear", 3),
                (convnext, "all", 8),
            )
        ),
    ],
)
def test_networks_of_libraries(build, layers, moved):
    chosen = {"layers": layers} if isinstance(layers, str) else {"include": layers}
    report = permuted(build(), images(32), **chosen)
    assert report.families >= moved and report.after > 1.001 * report.before


@pytest.mark.parametrize("seed", seeds(40))
def test_random_graphs(seed):
    """Whatever is done to the channels: they move rightly, or stay."""
    model = Everything(seed)
    try:
        report = permuted(model, images())
    except UsageError as error:
        assert "no channels of Everything can move" in str(error)
    else:
        assert report.families or report.after == report.before


@pytest.mark.parametrize(("n", "m"), [(1, 4), (2, 3), (4, 8)])
def test_other_patterns(n, m):
    report = permuted(Branches(), images(), n=n, m=m, attempts=20)
    assert report.after > report.before and report.families


def test_what_stays_says_why():
    model = Branches()
    report = permuted(model, images())
    stays = {layer.name: layer.stays for layer in report.layers}
    assert stays == {
        "stem": "the model's input",
        **dict.fromkeys(("body", "left", "right", "last"), ""),
        "depthwise": "1 channels: fewer than two groups",
    }
    assert "sum of kept magnitudes" in str(report) and "the model's input" in str(report)
    assert report.difference < 1e-12


def test_channels_that_begin_within_a_group_stay():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = (nn.Conv2d(3, size, 1) for size in (10, 12, 8))
            self.read, self.shifted = nn.Conv2d(30, 8, 1), nn.Conv2d(12, 8, 1)

        def forward(self, x):
            two = self.two(x)
            maps = torch.cat([self.one(x), two, self.three(x)], 1)
            return self.read(maps) + self.shifted(two)

    report = permuted(Net(), images())
    stays = {layer.name: layer.stays for layer in report.layers}
    assert stays["read"] == stays["shifted"] == "they begin within a group of 'read'"
    assert report.families == 1  # the first ten, of which two stay


def test_readers_with_other_groups():
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 8, 1))
    fst.convert(model, "asp", include="1")
    fst.convert(model, "asp", include="2", n=1, m=8)
    assert fst.permute(model, images(dtype=torch.float32)).families == 2

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(3, 16, 1)
            self.a, self.b = nn.Conv2d(16, 8, 1), nn.Conv2d(16, 8, 1)

        def forward(self, x):
            return self.a(self.first(x)) + self.b(self.first(x))

    model = Two()
    fst.convert(model, "asp", include="a")
    fst.convert(model, "asp", include="b", n=1, m=8)
    with pytest.raises(UsageError, match="'a': groups of 4 in 'a', 8 in 'b'"):
        fst.permute(model, images(dtype=torch.float32))


def test_what_only_the_training_uses():
    model = Auxiliary().double().train()
    fst.convert(model, "asp", include="second")
    x = images()
    with pytest.raises(UsageError, match="'second': flip in the model itself"):
        fst.permute(model, x)
    assert model.training
    model.eval()
    del model.scale
    model.scale = 1
    assert fst.permute(model, x).families == 1


class TrainingScale(nn.Module):
    """Channels are scaled by a buffer in training alone."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1)
        self.register_buffer("scale", torch.rand(16) + 0.5)

    def forward(self, x):
        x = self.first(x)
        return self.second(x * self.scale.view(1, -1, 1, 1) if self.training else x)


def test_buffers_that_only_the_training_reads_move():
    model, x = unequal(TrainingScale()).double(), images()
    fst.convert(model, "asp")
    with traceable(model):
        before = model.train()(x)
    assert fst.permute(model, x).families == 1
    with traceable(model):
        assert_equal_outputs([model.train()(x)], [before])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_outputs_that_are_not_finite_are_refused(value):
    model = two_layers()
    fst.convert(model, "asp")
    with torch.no_grad():
        model[1].bias[0] = value
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UsageError, match="outputs of Sequential on the example are infinite or"):
        fst.permute(model, images(dtype=torch.float32))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.nan_to_num(), before[name].nan_to_num()), name


def test_training_goes_on_as_it_would():
    """Dense steps in both orders of the channels make the same function."""
    x, model, outputs = images(count=4), unequal(Branches()), []
    for permute in (False, True):
        if permute:
            model.to(memory_format=torch.channels_last)
            fst.convert(model, "asp")
            assert fst.permute(model, x).families
            assert model.body.weight.is_contiguous(memory_format=torch.channels_last)
        plain = Branches().double()
        plain.load_state_dict(model.state_dict())
        optimizer = torch.optim.SGD(plain.parameters(), lr=1e-7, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            plain(x).square().mean().backward()
            optimizer.step()
        outputs.append(plain(x))
    assert_equal_outputs(outputs[:1], outputs[1:])


def test_asp_keeps_more_of_a_permuted_model():
    x, kept = images(count=4), []
    for permute in (False, True):
        model = unequal(Branches())
        fst.convert(model, "asp")
        if permute:
            report = fst.permute(model, x)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        fst.attach(model, optimizer)
        model(x).square().mean().backward()
        optimizer.step()
        if permute:
            with pytest.raises(UsageError, match="layer 'stem' has begun to train"):
                fst.permute(model, x)
        plain = fst.fold(model)
        assert fst.verify(plain).ok
        kept.append(sum(m.weight.abs().sum().item() for m in plain.modules() if _is_conv(m)))
    assert kept[1] > kept[0]
    assert kept[1] == pytest.approx(report.after, rel=1e-3)


def _is_conv(module):
    return isinstance(module, nn.Conv2d)


def test_tied_weights_move_together():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1)
            self.one, self.two = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.last(self.two(self.one(self.first(x)).relu()))

    assert permuted(Tied(), images()).families == 1


def test_tensors_that_are_no_parameters_hold_channels_in_place():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1)
            self.scale = torch.rand(16, 1, 1)

        def forward(self, x):
            return self.second(self.first(x) * self.scale)

    model = Scaled()
    fst.convert(model, "asp")
    with pytest.raises(UsageError, match="no channels of Scaled can move"):
        fst.permute(model, images(dtype=torch.float32))
    scale = model.__dict__.pop("scale")
    model.register_buffer("scale", scale)
    assert fst.permute(model, images(dtype=torch.float32)).families == 1


class Fork(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x):
        x = self.first(x)
        return self.second(x if x.sum() > 0 else -x)


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand(len(x), 1, 1, 1)


def two_layers(*between):
    return nn.Sequential(nn.Conv2d(3, 16, 1), *between, nn.Conv2d(16, 4, 1))


def test_what_cannot_be_traced_is_named():
    model = nn.Sequential(nn.Identity(), Fork())
    fst.convert(model, "asp")
    with pytest.raises(UsageError, match="module '1' of Sequential, of which torch.export makes"):
        fst.permute(model, images(dtype=torch.float32))


def test_changed_outputs_put_everything_back():
    model = two_layers(Noise())
    fst.convert(model, "asp")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UsageError, match=r"outputs of Sequential on the example change by .*back"):
        fst.permute(model, images(dtype=torch.float32))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_refusals():
    x = images(dtype=torch.float32)
    with pytest.raises(ValueError, match="call fst.convert first"):
        fst.permute(two_layers(), x)
    model = two_layers(nn.GroupNorm(4, 16))
    fst.convert(model, "asp")
    with pytest.raises(UsageError, match="'0': the model's input; '2': group_norm in '1'"):
        fst.permute(model, x)
    with pytest.raises(TypeError, match="model is a int"):
        fst.permute(3, x)
    with pytest.raises(TypeError, match="example_input is a list"):
        fst.permute(model, [x])
    with pytest.raises(ValueError, match="attempts=-1 must be an integer >= 0"):
        fst.permute(model, x, attempts=-1)
    with fst.frozen(model):
        with pytest.raises(UsageError, match="within fst.frozen"):
            fst.permute(model, x)
    for strategy, options in (("tsm", {}), ("fst", {"literal": True})):
        model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 3))
        fst.convert(model, strategy, **options)
        with pytest.raises(UsageError, match="no weight is pruned N:M by magnitude along input"):
            fst.permute(model, x)


def test_progress_says_which_channels():
    lines = []
    model = two_layers()
    fst.convert(model, "asp")
    fst.permute(model, images(dtype=torch.float32), progress=lines.append)
    assert len(lines) == 1 and lines[0].startswith("1 of 1: 16 channels of 1: ")
