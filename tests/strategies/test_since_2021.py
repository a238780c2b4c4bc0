"""The methods since 2021: what their papers promise, step by step, and exact resumption."""

import copy
import math

import pytest
import torch
from torch import nn

import fst
from fst.rules.mvue import mvue
from fst.strategies.acdc import Alternation
from fst.strategies.maxq import FewerDenseGroups
from fst.strategies.sdgf import frames
from tests.networks import batch, small_net, train
from tests.oracle.methods import approximate_inclusion, inclusion
from tests.strategies.weight_systems import OPTIMIZERS, PHASED, Training

# ------------------------------------------------------------------------------- unbiased pruning


@pytest.mark.parametrize(("n", "m"), [(1, 2), (2, 4), (1, 4), (3, 8), (4, 16)])
def test_mvue_keeps_n_and_is_exact_in_the_mean(n, m):
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(m, generator=generator, dtype=torch.float64)
    draws = mvue(row.expand(40_000, m), n, m, 1, generator)
    assert ((draws != 0).sum(1) == n).all()
    chances = torch.tensor(inclusion(row.abs().tolist(), n), dtype=torch.float64)
    deviation = (row**2 * (1 / chances - 1) / len(draws)).sqrt()
    assert ((draws.mean(0) - row).abs() <= 5 * deviation + 1e-12).all()
    torch.testing.assert_close((draws != 0).double().mean(0), chances, atol=0.015, rtol=0)


def test_mvue_of_pairs_is_the_closed_form():
    draws = mvue(torch.tensor([[3.0, -1.0]]).expand(1000, 2), 1, 2, 1)
    assert set(map(tuple, draws.tolist())) == {(4.0, 0.0), (0.0, -4.0)}


def test_the_exact_draw_has_less_variance_than_the_approximation():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(2000, 4, generator=generator, dtype=torch.float64)

    def variance(chances):
        return sum(
            value**2 * (1 / chance - 1)
            for row in rows.tolist()
            for value, chance in zip(row, chances([abs(v) for v in row]), strict=True)
        ) / float(rows.square().sum())

    exact, approximate = variance(lambda row: inclusion(row, 2)), variance(approximate_inclusion)
    assert exact < 0.97 * approximate
    for kind, expected in ((False, exact), (True, approximate)):
        drawn = [mvue(rows, 2, 4, 1, generator, approximate=kind) - rows for _ in range(50)]
        measured = sum(float(d.square().sum()) for d in drawn) / 50 / float(rows.square().sum())
        assert measured == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("approximate", [False, True])
def test_mvue_of_zeros_and_of_what_is_not_finite(approximate):
    rows = torch.tensor([[0.0, 0, 0, 0], [0, 5, 0, 0], [math.inf, 1, 2, 3], [math.nan, 1, 2, 3]])
    drawn = mvue(rows, 2, 4, 1, approximate=approximate)
    torch.testing.assert_close(drawn[:2], rows[:2], atol=0, rtol=1e-5)
    assert torch.equal(drawn[2:], rows[2:]) or drawn[2:].nan_to_num(7).equal(rows[2:].nan_to_num(7))


# ------------------------------------------------------------------------------------------ phases


def trained(name, steps, total=20, **options):
    training = Training(name, "adamw", total=total, **{**PHASED.get(name, {}), **options})
    training.steps(steps)
    return training


@pytest.mark.parametrize("name", PHASED)
def test_the_state_dict_is_the_dense_models(name):
    assert trained(name, 3).net.state_dict().keys() == small_net().state_dict().keys()


@pytest.mark.parametrize("name", PHASED)
def test_folding_a_copy_and_freezing_agree_with_evaluation(name):
    net = trained(name, 9).net.eval()
    expected = net(batch())
    torch.testing.assert_close(fst.fold(net)(batch()), expected)
    torch.testing.assert_close(copy.deepcopy(net)(batch()), expected)
    with fst.frozen(net):
        torch.testing.assert_close(net(batch()), expected)


@pytest.mark.parametrize("name", ["sste", "acdc", "sdgf", "mdgf", "maxq", "rigl"])
def test_it_ends_with_n_of_m(name):
    n = PHASED[name].get("n", 2)
    options = dict(dense_tail=0.0) if name == "sste" else {}
    folded = fst.fold(trained(name, 20, **options).net)
    assert fst.verify(folded, n, 4).ok


@pytest.mark.parametrize("name", ["sste", "tsrste"])
def test_a_dense_tail_is_dense(name):
    training = trained(name, 14)
    assert fst.verify(fst.fold(training.net)).ok
    training.steps(14, 16)
    net = training.net
    assert torch.equal(fst.fold(net)[0].weight, net[0].weight)
    twin = small_net()
    twin.load_state_dict(net.state_dict())
    optimizer = OPTIMIZERS["adamw"](twin.parameters())
    optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    train(twin, optimizer, [16])
    training.step(16)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tsrste", dict(dense_tail=0.9)),
        ("acdc", dict(period=0.01)),
        ("acdc", dict(last_sparse=0.1, period=0.4)),
        ("sdgf", dict(n=1, m=8)),
        ("sdgf", dict(structure="geometric")),
        ("mdgf", dict(dense_start=0.89)),
    ],
)
def test_phases_that_do_not_fit_are_refused_before_the_first_step(name, options):
    with pytest.raises(ValueError, match="total_steps=3"):
        Training(name, total=3, **options)


# --------------------------------------------------------------------------------- single methods


def test_the_factor_of_sste_is_that_of_the_first_weights():
    weight = small_net()[0].weight.detach()
    training = Training("sste", total=9)
    first = training.net[0].effective_weight().detach()
    groups = weight.movedim(1, -1).abs()
    threshold = groups.sort(-1).values[..., 1:2]
    soft = ((groups - threshold).clamp(min=0) * weight.movedim(1, -1).sign()).movedim(-1, 1)
    factor = (weight * soft).sum() / soft.square().sum()
    torch.testing.assert_close(first, factor * soft)
    training.steps(3)
    torch.testing.assert_close(training.net[0].current_strategy.output.factor, factor)


def test_soft_thresholds_are_continuous():
    """Where the order of two weights changes, the pruned weight does not jump."""
    rule = fst.get_strategy("sste").output
    weight = torch.tensor([1.0, 0.5, -0.5, 0.1]).view(1, 4, 1, 1)
    step = torch.tensor([0.0, 1e-5, 0.0, 0.0]).view(1, 4, 1, 1)
    values = [
        rule.weight_values(w, rule.weight_mask(w, "output", 1), 1)
        for w in (weight + step, weight - step)
    ]
    assert (values[0] - values[1]).abs().max() < 1e-4


def test_double_pruning_uses_no_weight_that_output_does_not():
    weight = torch.randn(8, 12, 3, 3)
    for options in ({}, dict(permutations=5)):
        net = nn.Sequential(nn.Conv2d(12, 8, 3))
        net[0].weight.data.copy_(weight)
        fst.convert(net, fst.get_strategy("fst_w", grad_input="double", **options))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        fst.attach(net, optimizer)
        net(torch.randn(1, 12, 4, 4)).sum().backward()
        pruned = net[0].pruned(torch.float32)
        used = pruned.grad_input != 0
        assert torch.equal(pruned.grad_input[used], pruned.output[used]) and used.any()
        if not options:
            plain = used.sum()
            assert (used.unflatten(0, (2, 4)).sum(1) <= 2).all()
        else:
            assert used.sum() >= plain * 0.95


def test_frames_of_decaying_patterns():
    assert frames(2, 4, "stepwise") == [(3, 4), (2, 4)]
    assert frames(1, 16, "stepwise") == [(15, 16), (8, 16), (4, 16), (2, 16), (1, 16)]
    assert frames(3, 8, "stepwise") == [(7, 8), (4, 8), (3, 8)]
    assert frames(2, 4, "geometric") == [(16, 32), (8, 16), (4, 8), (2, 4)]


def test_phases_of_acdc_are_those_of_the_official_recipe():
    """epochs: [10, 10, 71] and [85, 20, 100] of its pruners, [15, 10, 66] and 75 of recyclers."""
    schedule = Alternation()
    sparse = [schedule.is_sparse(epoch, 100) for epoch in range(100)]
    expected = [
        10 <= e < 75 and (e - 10) // 5 % 2 == 0 or e >= 85
        for e in range(100)
    ]  # fmt: skip
    assert sparse == expected


def test_acdc_brings_pruned_weights_back_as_zeros():
    training = Training("acdc", total=20, warmup=0.1, period=0.1)
    training.steps(4)  # 2 dense, 2 sparse
    weight = training.net[0].weight.detach().clone()
    assert fst.verify(fst.fold(training.net)).ok and (weight == 0).float().mean() == 0.5
    training.step(4)
    moved = training.net[0].weight.detach()
    assert (moved[weight == 0] != 0).all()
    assert torch.equal(training.net[0].effective_weight(), moved)


@pytest.mark.parametrize("decline", ["linear", "cubic", "cos", "exp"])
def test_dense_groups_of_maxq_fall_to_none(decline):
    schedule = FewerDenseGroups(decline=decline)
    shares = [schedule.share(step / 10) for step in range(11)]
    assert shares[0] == 1 and shares[-1] == 0 and shares == sorted(shares, reverse=True)
    assert shares[5] == pytest.approx(
        {"linear": 0.5, "cubic": 0.125, "cos": math.sqrt(0.5), "exp": 0.3208}[decline], abs=1e-4
    )


# ------------------------------------------------------------------------------------- N:M of RigL


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (3, 5)])
def test_rigl_replaces_within_groups(n, m):
    training = Training("rigl", total=100, n=n, m=m, interval=1)
    masks = []
    for step in range(6):
        training.step(step)
        masks.append(training.masks())
        for layer, mask in zip(training.layers, masks[-1], strict=True):
            padded = nn.functional.pad(mask.movedim(1, -1), (0, -mask.shape[1] % m))
            kept = padded.unflatten(-1, (-1, m)).sum(-1)
            full = mask.shape[1] // m
            assert (kept[..., :full] == n).all()
            assert (layer.weight[~mask] == 0).all()
    assert any(not torch.equal(a, b) for a, b in zip(masks[0], masks[-1], strict=True))
    assert fst.verify(fst.fold(training.net), n, m).ok
