"""Initial weights and blurred strides as published trainings have them."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fst.models import resnet9
from fst.training.engine import Classifier
from fst.training.engine.classifier import blur_strided_convolutions, initialise_convolutions


def test_initialisation_is_that_of_he():
    """U(−b, b) with b = √(6 / fan-in): √6 times PyTorch's; the first layer and the head stay."""
    torch.manual_seed(0)
    model = resnet9()
    before = {name: m for name, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    old = {name: m.weight.detach().clone() for name, m in before.items()}
    head = model.head.weight.detach().clone()
    initialise_convolutions(model)
    for index, (name, module) in enumerate(before.items()):
        if index == 0:
            assert torch.equal(module.weight, old[name])
            continue
        bound = math.sqrt(6 / module.weight[0].numel())
        assert 0.99 * bound < module.weight.abs().max() <= bound
        ratio = float(module.weight.detach().std() / old[name].std())
        assert ratio == pytest.approx(math.sqrt(6), rel=0.02)
    assert torch.equal(model.head.weight, head)


def test_a_training_starts_from_it_and_loaded_weights_stay():
    architecture = dict(source="fst", name="resnet9", width=8)
    model = Classifier(architecture, initialisation="kaiming_uniform")
    convolution = model.architecture.features[1][0]
    bound = 1 / math.sqrt(convolution.weight[0].numel())
    assert convolution.weight.abs().max() <= bound
    model.init_weights()
    started = convolution.weight.detach().clone()
    assert started.abs().max() > 2 * bound
    model.init_weights()
    assert torch.equal(convolution.weight, started)
    with pytest.raises(ValueError, match="initialisation='he' is unknown"):
        Classifier(architecture, initialisation="he")
    with pytest.raises(ValueError, match="blur_pool=1 is unknown"):
        Classifier(architecture, blur_pool=1)


def test_blur_in_front_of_strided_convolutions():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.Conv2d(16, 16, 3, padding=1),
    ).double()
    images = torch.randn(2, 3, 13, 16, dtype=torch.float64)
    features = model[0](images)
    kernel = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64)
    kernel = (kernel[:, None] * kernel / 16).expand(16, 1, 3, 3)
    expected = model[2](model[1](F.conv2d(features, kernel, padding=1, groups=16)))
    parameters = list(model.parameters())
    blur_strided_convolutions(model)
    model.double()
    torch.testing.assert_close(model(images), expected)
    assert [name for name, _ in model.named_parameters()] == [
        *("0.weight", "0.bias", "1.conv.weight", "1.conv.bias", "2.weight", "2.bias")
    ]
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize(("name", "blurred"), [("resnet18", 6), ("resnet50", 6)])
def test_blurred_resnets(name, blurred):
    model = Classifier(dict(source="torchvision", name=name), blur_pool=True)
    names = [n for n, m in model.architecture.named_modules() if n.endswith(".blur")]
    assert len(names) == blurred and "conv1.blur" not in names
