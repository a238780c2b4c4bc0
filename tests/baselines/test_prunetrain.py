"""PruneTrain: the training that removes channels."""

import copy
import io

import pytest
import torch
from torch import nn

import fst
import fst.models
from fst.api.report import describe_layer
from fst.baselines.channel_removal import fit_channels
from tests.networks import batch, small_net
from tests.strategies.weight_systems import for_gradients_that_are_not_plain


def _parameters(model):
    return sum(p.numel() for p in model.parameters())


def _attached(model, ratio=0.2, interval=1, threshold=1e-4, steps_per_epoch=2, lr=0.05):
    strategy = fst.get_strategy("prunetrain", ratio=ratio, interval=interval, threshold=threshold)
    fst.convert(model, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return optimizer, fst.attach(model, optimizer, steps_per_epoch=steps_per_epoch)


def test_penalty_is_the_share_of_the_first_loss_and_enters_the_gradient():
    """Against autograd of the penalty, written out for the network's four sides."""
    net = small_net()
    plain = copy.deepcopy(net)
    optimizer, attachment = _attached(net, ratio=0.25, lr=0.0)
    loss = net(batch()).square().mean()
    attachment.report_loss(loss)
    loss.backward()
    optimizer.step()

    def penalty(model):
        first, second, head = model[0].weight, model[2].weight, model[4].weight
        norms = [w.square().sum((1, 2, 3)) for w in (first, second)]
        norms += [second.square().sum((0, 2, 3)), head.square().sum(0)]
        return sum((norm + 1e-8).sqrt().sum() for norm in norms)

    expected = plain(batch()).square().mean()
    lasso = 0.25 / 0.75 * expected.item() / penalty(plain).item()
    weighed = lasso * penalty(plain)
    assert weighed.item() / (weighed + expected).item() == pytest.approx(0.25)
    (expected + weighed).backward()
    for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-9, msg=name)
    attachment.report_loss(loss * 100)
    net.zero_grad()
    net(batch()).square().mean().backward()
    optimizer.step()
    assert net[0].state.schedule_state["lasso"].item() == pytest.approx(lasso), "set once"
    assert not fst.fold(net)._forward_pre_hooks


@for_gradients_that_are_not_plain
def test_the_penalty_needs_plain_gradients(change, message):
    net = small_net()
    optimizer, attachment = _attached(net)
    loss = net(batch()).square().mean()
    attachment.report_loss(loss)
    loss.backward()
    change(optimizer)
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()


def test_a_model_that_was_never_called_has_no_channels_to_follow():
    net = small_net()
    optimizer, _ = _attached(net)
    net[0](batch()).sum().backward()
    with pytest.raises(RuntimeError, match="this Sequential has not been called"):
        optimizer.step()


def _build_shrinking():
    """A network that loses channels every ten steps from about step 50 on."""
    net = small_net()
    return net, *_attached(net, ratio=0.7, threshold=0.02, steps_per_epoch=10, lr=0.02)


def _train(net, optimizer, attachment, steps):
    """Yields the loss of each step, after it."""
    for step in steps:
        input = batch(step % 4)
        loss = (net(input) - 4 * input.mean((2, 3))).square().mean()
        attachment.report_loss(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def test_training_removes_what_is_not_needed():
    """The defining property: the model and the optimizer get smaller while training goes on."""
    net, optimizer, attachment = _build_shrinking()
    shapes, losses = [], []
    for loss in _train(net, optimizer, attachment, range(80)):
        shapes.append(net[2].weight.shape)
        losses.append(loss)
    changes = [i for i in range(1, 80) if shapes[i] != shapes[i - 1]]
    assert changes and all(step % 10 == 9 for step in changes), "at the end of epochs only"
    assert shapes[-1][0] < 8 and shapes[-1][1] < 8
    assert net[0].out_channels == net[2].in_channels == net[0].weight.shape[0]
    assert net[4].in_features == 9 * net[2].out_channels
    assert describe_layer(net[0]).shape == tuple(net[0].weight.shape)
    assert sum(losses[-8:]) < sum(losses[:8])
    for p in net.parameters():
        assert optimizer.state[p]["momentum_buffer"].shape == p.shape
    folded = fst.fold(net).eval()
    assert type(folded[0]) is nn.Conv2d
    torch.testing.assert_close(folded(batch()), net.eval()(batch()))


def test_one_channel_of_a_group_always_stays():
    net = small_net()
    optimizer, attachment = _attached(net, threshold=1e9, steps_per_epoch=1)
    largest = net[0].weight.detach().abs().amax((1, 2, 3))
    attachment.report_loss(torch.tensor(1.0))
    net(batch()).square().mean().backward()
    optimizer.step()
    assert net[0].out_channels == net[2].out_channels == 1 and net[4].in_features == 9
    assert largest.max() > 0
    net(batch()).square().mean().backward()
    optimizer.step()


def test_resume_is_bit_exact_over_removals():
    """A model of full size takes up the smaller one's state, and goes on bit for bit."""
    net, optimizer, attachment = _build_shrinking()
    list(_train(net, optimizer, attachment, range(55)))
    file = io.BytesIO()
    torch.save([net.state_dict(), optimizer.state_dict(), fst.sparsity_state(net)], file)
    saved_size = _parameters(net)
    list(_train(net, optimizer, attachment, range(55, 80)))
    assert _parameters(net) < saved_size < _parameters(small_net())

    file.seek(0)
    model, momentum, sparsity = torch.load(file, weights_only=True)
    other, other_optimizer, other_attachment = _build_shrinking()
    fit_channels(other, model, other_optimizer)
    other.load_state_dict(model)
    other_optimizer.load_state_dict(momentum)
    fst.load_sparsity_state(other, sparsity)
    list(_train(other, other_optimizer, other_attachment, range(55, 80)))
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(
            optimizer.state[p]["momentum_buffer"], other_optimizer.state[q]["momentum_buffer"]
        )


# ---------------------------------------------------------------- bad input


def test_without_a_loss_it_says_what_to_do():
    net = small_net()
    optimizer, _ = _attached(net)
    net(batch()).sum().backward()
    optimizer.step()  # the engine reports the loss after the first step
    net(batch()).sum().backward()
    with pytest.raises(RuntimeError, match="report_loss"):
        optimizer.step()


def test_models_of_several_inputs_are_refused():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x, scale=1.0):
            return self.conv(x) * scale

    model = Two()
    _attached(model)
    for arguments, options in [
        ((torch.ones(1, 3, 2, 2), 2.0), {}),
        ((torch.ones(1, 3, 2, 2),), {"scale": 2}),
    ]:
        with pytest.raises(ValueError, match="one tensor"):
            model(*arguments, **options)


def test_a_removed_attachment_looks_at_no_input():
    net = small_net()
    _, attachment = _attached(net)
    attachment.remove()
    assert not net._forward_pre_hooks


def test_distributed_training_is_refused(monkeypatch):
    net = small_net()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        _attached(net)
