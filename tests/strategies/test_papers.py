"""Strategies against their papers' semantics, written again with autograd and loops."""

import itertools

import pytest
import torch
from torch.nn import functional as F

import fst
from tests.networks import batch, small_net


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
