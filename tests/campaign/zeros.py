"""Products that leave out zeros: random geometries and values, changes, resumption."""

from __future__ import annotations

import copy
import os
import random
import tempfile
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from torch import nn

import fst
from fst import backends
from fst.backends import choice, timing
from fst.ops import cpp
from tests.campaign.shared import Checks, assert_equal_weights, example_of, train
from tests.ops import test_zeros
from tests.strategy_settings import DEFAULTS


def checks() -> Checks:
    """Each backend by itself; weights that change; trainings that resume."""
    found: Checks = []
    if not cpp.missing():
        for gemm, name in test_zeros.PAIRS:
            for kind, count, test in (
                ("exact", 80, test_zeros.test_random_products),
                ("wild", 40, test_zeros.test_what_is_not_finite_reaches_what_a_nonzero_multiplies),
            ):
                check = partial(example_of(test), gemm, name)
                found.append((f"{kind}-{gemm}-{name}", count, check))
        test = test_zeros.test_a_weight_that_changes_behind_autograds_back
        found.append(("changed", 40, example_of(test)))
    return [*found, ("resumed", 30, _check_resumed)]


def _times(draw: random.Random) -> Callable[..., tuple[dict[str, float], dict[str, Exception]]]:
    """Random times in the place of measured ones."""

    def race(functions: dict[str, object], *_: object) -> tuple[dict[str, float], dict]:
        return {name: draw.uniform(1, 9) for name in functions}, {}

    return race


def _check_resumed(draw: random.Random) -> None:
    """Saved in the middle it ends with the same weights, whatever is measured and drawn then."""
    row = draw.choice([r for r in DEFAULTS if r.build().schedule is None])
    seed, width, size = draw.getrandbits(32), draw.choice((4, 8, 12)), draw.randint(5, 9)
    half, end = draw.randint(1, 20), draw.randint(21, 40)
    nets: list[nn.Module] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("whole", "resumed"):
            torch.manual_seed(seed)
            net = nn.Sequential(
                nn.Conv2d(4, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 8, 3, padding=1)
            )
            fst.convert(net, row.build())
            fst.seed_random_rules(net, 0)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
            place = {"FST_AUTOTUNE": "1", "FST_CACHE_DIR": f"{folder}/{name}"}
            given = ((3, 4, size, size), torch.float32)
            backends.forget_decisions()
            with (
                mock.patch.dict(os.environ, place),
                mock.patch.multiple(choice, LEAST_GAIN=1.0, LEAST_SAVED=0.0),
                mock.patch.object(timing, "race", _times(draw)),
            ):
                if name == "whole":
                    train(net, optimizer, range(half), *given)
                    states = net.state_dict(), optimizer.state_dict(), fst.sparsity_state(net)
                    states = copy.deepcopy(states)
                else:
                    net.load_state_dict(states[0])
                    optimizer.load_state_dict(states[1])
                    fst.load_sparsity_state(net, states[2])
                train(net, optimizer, range(half, end), *given)
            nets.append(net)
    backends.forget_decisions()
    assert_equal_weights(*nets, f"of {row.id} after {half} of {end} steps")
