"""Strategies against their papers' semantics, written again with autograd and loops."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fst
from tests.networks import batch, small_net
from tests.strategies.weight_systems import Training


def kept_of_groups(rows):
    """Mask of the 2 largest magnitudes in every 4 consecutive elements of each row, by loops."""
    mask = torch.zeros_like(rows, dtype=torch.bool)
    for row, kept in zip(rows.abs(), mask, strict=True):
        for start in range(0, len(row), 4):
            group = row[start : start + 4].tolist()
            for index in sorted(range(len(group)), key=lambda i: (-group[i], i))[:2]:
                kept[start + index] = True
    return mask


def along_channels(weight):
    """`kept_of_groups` for each output channel and kernel position."""
    rows = weight.permute(0, 2, 3, 1)
    return kept_of_groups(rows.flatten(0, 2)).view(rows.shape).permute(0, 3, 1, 2)


# ---------------------------------------------------------------- sr-ste


def test_srste_derives_the_pruned_convolution():
    """Zhou et al. 2021, Eq. 9: autograd of conv(X, S(W)), and λ(W − S(W)) added to dW."""
    net, by_hand = small_net(), small_net()
    fst.convert(net, fst.get_strategy("srste", decay=0.1))
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.1, momentum=0.9) for n in (net, by_hand)]
    for step in range(3):
        input = batch(step).requires_grad_()
        optimizers[0].zero_grad()
        net(input).square().mean().backward()
        optimizers[0].step()

        other = batch(step).requires_grad_()
        convolutions = by_hand[0], by_hand[2]
        pruned = [(c.weight * along_channels(c.weight)).detach() for c in convolutions]
        leaves = [weight.requires_grad_() for weight in pruned]
        hidden = F.conv2d(other, leaves[0], by_hand[0].bias, padding=1).relu()
        hidden = F.conv2d(hidden, leaves[1], by_hand[2].bias)
        optimizers[1].zero_grad()
        by_hand[4](by_hand[3](hidden)).square().mean().backward()
        for convolution, leaf in zip(convolutions, leaves, strict=True):
            decay = 0.1 * (convolution.weight.detach() - leaf.detach())
            convolution.weight.grad = leaf.grad + decay
        optimizers[1].step()
        torch.testing.assert_close(input.grad, other.grad, rtol=1e-12, atol=1e-14)
    for p, q in zip(net.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


# ---------------------------------------------------------------- fst


@pytest.mark.parametrize("restore", [True, False])
def test_literal_fst_is_that_of_the_paper(restore):
    """Eq. 5 on (Cout, Cin·kh·kw / 4, 4) with zero padding, Eq. 2 with S(Wᵀ), Eq. 10 with T."""
    torch.manual_seed(0)
    input = torch.randn(2, 3, 9, 9, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    grad_output = torch.randn(2, 8, 7, 7, dtype=torch.float64)
    strategy = fst.get_strategy("fst", literal=True, restore=restore, decay=0.0)
    output = fst.sparse_conv2d(input, weight, strategy=strategy)
    output.backward(grad_output)

    columns = F.unfold(input.detach(), 3)  # (2, 27, 49)
    mask = kept_of_groups(weight.detach().flatten(1))
    assert mask.sum() == 8 * 14  # six groups of four, and 2 of the last three
    pruned = weight.detach().flatten(1) * mask
    torch.testing.assert_close(output.detach().flatten(2), pruned @ columns)
    transposed = weight.detach().flatten(1).T
    pruned = transposed * kept_of_groups(transposed)
    expected = F.fold(pruned @ grad_output.flatten(2), (9, 9), 3)
    torch.testing.assert_close(input.grad, expected)
    shift = torch.zeros(49, 49, dtype=torch.float64)
    for position in range(48):
        shift[position + 1, position] = float(restore)
    kept = torch.zeros(49, dtype=torch.float64)
    kept[::2] = 1
    flat = grad_output.flatten(2)
    expected = (flat + flat @ shift) @ (columns * kept).mT
    torch.testing.assert_close(weight.grad.flatten(1), expected.sum(0))


def test_literal_is_group_order_and_pairing():
    literal = fst.get_strategy("fst", literal=True)
    assert literal == fst.get_strategy("fst", group_order="im2col", pairing="flat")
    assert fst.get_strategy("fst_w", literal=True) == fst.get_strategy(
        "fst_w", group_order="im2col"
    )
    assert fst.get_strategy("fst", literal=True, pairing="flat", group_order="im2col") == literal
    for option in ({"group_order": "channel"}, {"pairing": "row"}):
        with pytest.raises(ValueError, match="contradicts literal=True"):
            fst.get_strategy("fst", literal=True, **option)


def test_the_defaults_of_fst_are_not_the_papers():
    """The share of the mask that differs, as the docstring says it, and that of a first layer."""
    torch.manual_seed(0)
    weight = torch.randn(64, 64, 3, 3)
    default, literal = (fst.get_strategy("fst", literal=value).output for value in (False, True))
    masks = [rule.weight_mask(weight, "output", 1) for rule in (default, literal)]
    assert 0.24 < (masks[0] != masks[1]).double().mean() < 0.27
    first = torch.randn(64, 3, 7, 7)
    shares = [rule.weight_mask(first, "output", 1).double().mean() for rule in (default, literal)]
    assert shares[0] == pytest.approx(2 / 3) and shares[1] == pytest.approx(0.5, abs=0.01)


# ---------------------------------------------------------------- the other systems


@pytest.mark.parametrize(("name", "options"), [("asp", {}), ("rigl", {"allocation": "uniform"})])
def test_fully_connected_layers_are_pruned_if_asked_for(name, options):
    """As the official codes of both do."""
    training = Training(name, include=[nn.Conv2d, nn.Linear], **options)
    training.steps(2)
    net = training.net
    assert 0.2 < (net[4].weight == 0).double().mean() < 0.8
    if name == "asp":
        assert (net[4].weight.view(-1, 4) != 0).sum(1).eq(2).all()


def test_dpf_grows_over_three_quarters_of_the_training():
    schedule = fst.get_strategy("dpf").schedule
    assert schedule.sparsity(0.5, 74, 100) < 0.5 == schedule.sparsity(0.5, 75, 100)
