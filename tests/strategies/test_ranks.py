"""Two ranks of DistributedDataParallel train one network, whatever each rank's own seed is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fst
from tests import two_ranks
from tests.digests import EVENTFUL, PLANNED, digest
from tests.strategy_settings import DEFAULTS, SETTINGS

STEPS = 4
DRAWN = [row for row in SETTINGS if row.build().draws_masks]
# Random masks with a decay that shows, and the schedules that act within so few steps.
ROWS = {
    **{row.id: row.build for row in [*DEFAULTS, *DRAWN]},
    **EVENTFUL,
    "rigl-2:4": lambda: fst.get_strategy("rigl", n=2, m=4, interval=2),
    "srste-random-decay": lambda: fst.get_strategy("srste", rule="random", decay=0.5),
    "fst_w-orders": lambda: fst.get_strategy(
        "fst_w", grad_input="double", permutations=9, interval=2, decay=0.5
    ),
}


def _network(rank: int, strategy: fst.Strategy) -> nn.Sequential:
    torch.manual_seed(7 + rank)
    net = nn.Sequential(
        *(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32, 4)),
    )
    fst.convert(net, strategy, layers="all")
    return net


def _trained(rank: int, strategy: fst.Strategy) -> list[str]:
    """Digests of weights, masks and momentum after each step."""
    net = _network(rank, strategy)
    model = nn.parallel.DistributedDataParallel(net)
    adam = strategy.name == "step"
    options = {} if adam else {"momentum": 0.9}
    optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(net.parameters(), 0.05, **options)
    fst.attach(model, optimizer, total_steps=PLANNED, steps_per_epoch=2)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 4, 6, 6)).square().mean().backward()
        optimizer.step()
        masks = {name: layer.output_mask() for name, layer in fst.sparse_layers(net).items()}
        kept = {name: layer.state.schedule_state for name, layer in fst.sparse_layers(net).items()}
        found.append(digest({"weights": net.state_dict(), "masks": masks, "kept": kept}))
    return found


def _all_rows(rank: int) -> None:
    differing = []
    for row, build in ROWS.items():
        strategy = build()
        if strategy.replaces_parameters:
            with pytest.raises(ValueError, match="'prunetrain' replaces Parameters"):
                _trained(rank, strategy)
            continue
        ranks = [None, None]
        torch.distributed.all_gather_object(ranks, _trained(rank, strategy))
        if ranks[0] != ranks[1]:
            differing.append(row)
    assert not differing, differing


@pytest.mark.slow
@pytest.mark.system
def test_ranks_of_other_seeds_train_one_network(tmp_path):
    assert {"rigl", "srste-random"} <= ROWS.keys()
    two_ranks.run(_all_rows, tmp_path)


def test_one_process_draws_from_the_global_generator():
    masks = []
    for seed in (0, 0, 1):
        torch.manual_seed(3)
        net = nn.Conv2d(8, 8, 3)
        fst.convert(net, "rigl")
        fst.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), total_steps=4)
        torch.manual_seed(seed)
        net(torch.randn(1, 8, 4, 4))
        masks.append(net.state.kept_mask)
    assert torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[2])
