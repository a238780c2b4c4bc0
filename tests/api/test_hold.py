"""Zeros of a folded model stay, under any optimizer and in quantization-aware training."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

import fst
from tests.networks import batch, small_net, train


def folded():
    net = small_net(double=False)
    fst.convert(net, "srste")
    return fst.fold(net)


def step(net, optimizer, count=3):
    for seed in range(count):
        optimizer.zero_grad()
        net(batch(seed, dtype=torch.float32)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    "build",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    ],
)
def test_zeros_stay_zero(build):
    loose, net = folded(), folded()
    step(loose, build(loose.parameters()))
    assert not fst.verify(loose).ok
    before = net[0].weight.detach().clone()
    handle = fst.hold(net)
    optimizer = build(net.parameters())
    step(net, optimizer)
    assert fst.verify(net).ok and set(handle.masks) == {"0.weight", "2.weight"}
    moved = net[0].weight != before
    assert torch.equal(moved, handle.masks["0.weight"])
    state = [t for t in optimizer.state[net[0].weight].values() if t.shape == before.shape]
    assert state and all((t[before == 0] == 0).all() for t in state)
    handle.remove()
    step(net, optimizer)
    assert not fst.verify(net).ok


def test_what_cannot_be_held_is_refused():
    net = small_net()
    with pytest.raises(ValueError, match="Sequential has no zero"):
        fst.hold(net)
    fst.convert(net, "srste")
    with pytest.raises(ValueError, match="layer '0' is converted"):
        fst.hold(net)
    with pytest.raises(ValueError, match=r"no weight. There are: 0\.weight"):
        fst.hold(fst.fold(net), include="1.weight")
    with pytest.raises(TypeError, match="model is a int"):
        fst.hold(3)


def test_some_weights_alone():
    net = folded()
    fst.hold(net, include="0.*")
    step(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert fst.verify(net, include="0.*").ok and not fst.verify(net, include="2.*").ok


def test_an_infinite_gradient_leaves_held_zeros_zero():
    net = folded()
    zeros = net[0].weight == 0
    fst.hold(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, torch.inf)
    optimizer.step()
    for tensor in (net[0].weight, optimizer.state[net[0].weight]["momentum_buffer"]):
        assert (tensor[zeros] == 0).all() and not tensor[~zeros].isfinite().any()


def test_a_model_that_nobody_needs_is_freed():
    net = folded()
    weight, handle = weakref.ref(net[0].weight), weakref.ref(fst.hold(net))
    assert handle() is not None  # the zeros are held as long as the model exists
    del net
    gc.collect()
    assert weight() is None
    fst.hold(folded())
    assert handle() is None


def test_a_copy_that_is_trained_is_said():
    net = folded()
    handles = [fst.hold(net)]
    step(net, torch.optim.SGD(net.parameters(), lr=0.1))
    copied = copy.deepcopy(net)
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="SGD trains a copy of the held weight '0.weight'"):
        step(copied, optimizer, 1)
    copied = copy.deepcopy(net)
    handles.append(fst.hold(copied))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(copied, torch.optim.SGD(copied.parameters(), lr=0.1))
        step(net, torch.optim.SGD(net.parameters(), lr=0.1))
        step(copied, optimizer, 1)
    assert fst.verify(copied).ok
    for handle in handles:
        handle.remove()


@pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="no fbgemm")
def test_quantization_aware_training_end_to_end():
    """Train sparse, fold, hold, prepare_qat, train, convert: the int8 weights are 2:4."""
    from torch.ao import quantization

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
            self.first, self.norm = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)
            self.relu, self.second = nn.ReLU(), nn.Conv2d(8, 8, 3)

        def forward(self, images):
            x = self.relu(self.norm(self.first(self.quant(images))))
            return self.dequant(self.second(x))

    torch.manual_seed(0)
    net = Net()
    fst.convert(net, "srste")
    train(net.double(), torch.optim.SGD(net.parameters(), lr=0.05), range(5))
    plain = fst.fold(net.float()).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao.quantization moves to torchao
        plain.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        quantization.fuse_modules_qat(plain, [["first", "norm", "relu"]], inplace=True)
        quantization.prepare_qat(plain, inplace=True)
        loose = copy.deepcopy(plain)
        handle = fst.hold(plain)
        for model in (plain, loose):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            step(model, optimizer, 6)
        quantized = quantization.convert(plain.eval())
        grown = quantization.convert(loose.eval())
    handle.remove()
    assert quantized(batch(dtype=torch.float32)).shape == (4, 8, 3, 3)
    for model, ok in ((quantized, True), (grown, False)):
        weights = {
            f"{name}.weight": getattr(model, name).weight().int_repr().float()
            for name in ("first", "second")
        }
        assert fst.verify(weights).ok == ok
