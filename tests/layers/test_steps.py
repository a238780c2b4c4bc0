"""What a step is: the optimizer's, whatever the number of backward passes, and never a skipped one.

A mask that is kept for several steps changes between steps alone.
"""

import contextlib
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import fst
from tests import two_ranks
from tests.networks import batch, small_net

INTERVAL, MICRO_BATCHES, STEPS = 3, 2, 7


def _trained_masks(model, net, without_sync=contextlib.nullcontext):
    """The mask of every forward pass, one list for each step; the weights move a lot."""
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    masks = []
    for step in range(STEPS):
        optimizer.zero_grad()
        masks.append([])
        for part in range(MICRO_BATCHES):
            last = part == MICRO_BATCHES - 1
            with contextlib.nullcontext() if last else without_sync():
                model(batch(MICRO_BATCHES * step + part)).square().mean().backward()
            masks[-1].append(net[0].output_mask())
        optimizer.step()
    return masks


def _assert_one_mask_for_each_interval(masks):
    assert all(torch.equal(mask, step[0]) for step in masks for mask in step)
    changes = [not torch.equal(a[0], b[0]) for a, b in pairwise(masks)]
    assert changes == [step % INTERVAL == 0 for step in range(1, STEPS)]


def test_accumulated_gradients_are_of_one_mask():
    net = small_net()
    fst.convert(net, fst.get_strategy("tsm", interval=INTERVAL))
    _assert_one_mask_for_each_interval(_trained_masks(net, net))
    assert net[0].state.step == STEPS


def _masks_of_two_ranks(rank):
    net = small_net()
    fst.convert(net, fst.get_strategy("tsm", interval=INTERVAL))
    model = nn.parallel.DistributedDataParallel(net)
    masks = _trained_masks(model, net, model.no_sync)
    _assert_one_mask_for_each_interval(masks)
    ranks = [None, None]
    torch.distributed.all_gather_object(ranks, [step[0] for step in masks])
    assert all(torch.equal(a, b) for a, b in zip(*ranks, strict=True))


@pytest.mark.slow
@pytest.mark.system
def test_ranks_that_accumulate_without_sync_share_one_mask(tmp_path):
    two_ranks.run(_masks_of_two_ranks, tmp_path)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "strategy",
    [
        fst.get_strategy("tsm", interval=2),
        fst.get_strategy("srste", decay=0.1, decay_mode="decoupled"),
    ],
    ids=["mask", "decoupled"],
)
def test_a_step_that_a_scaler_skips_is_none(strategy, fused):
    """Fused optimizers are called for it, and find out themselves."""

    def train(skipped):
        net = small_net(double=False)
        fst.convert(net, strategy)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in (0, skipped, 1, 2):
            if step is None:
                continue
            optimizer.zero_grad()
            loss = net(batch(int(step), dtype=torch.float32)).square().mean()
            loss = loss * float("inf") if step is skipped else loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert net[0].state.step == 3
        return [net[0].output_mask(), *(p.detach() for p in net.parameters())]

    for found, expected in zip(train(skipped=0.5), train(skipped=None), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_a_step_that_only_makes_an_optimizer_have_a_state_is_none():
    """PyTorch takes one, without learning rate and gradients, to save and to load."""
    net = small_net()
    fst.convert(net, fst.get_strategy("srste", decay=0.1, decay_mode="decoupled"))
    before = net[0].weight.detach().clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    state = get_optimizer_state_dict(net, optimizer)["state"]
    assert "momentum_buffer" in state["0.weight"]
    assert net[0].state.step == 0 and torch.equal(net[0].weight, before)
    optimizer.param_groups[0]["lr"] = 0.0  # a warm-up's first step is one
    net(batch()).sum().backward()
    optimizer.step()
    assert net[0].state.step == 1 and not torch.equal(net[0].weight, before)
