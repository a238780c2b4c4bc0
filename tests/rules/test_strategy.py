"""Rules, strategies and the registry: frozen, hashable, self-checking, extensible."""

import copy
import dataclasses
import pickle
import sys

import pytest
import torch

import fst
from fst import NM, Strategy
from fst.baselines.asfp import SoftFilters
from fst.baselines.clicktrain import KernelPatterns, PatternSelection
from fst.baselines.dpf import GrowingSparsity
from fst.baselines.meprop import TopK
from fst.baselines.prunetrain import ChannelLasso
from fst.baselines.resprop import Reuse
from fst.rules.alternating import Alternating
from fst.rules.masks import nm_mask
from fst.rules.nm import SameAsOutput, Transposable
from fst.rules.phases import Phases
from fst.rules.sampled import Sampled
from fst.rules.transposable_masks import transposable_mask
from fst.rules.values import Fading, MultiAxis, SoftThreshold
from fst.rules.weight import Unstructured
from fst.strategies.acdc import Alternation
from fst.strategies.asp import OneShot
from fst.strategies.maxq import FewerDenseGroups
from fst.strategies.rigl import DropAndGrow
from fst.strategies.sdgf import DecayingPattern, DecayingRest
from fst.strategies.sste import FirstFactor
from fst.strategies.step import HeldMoment
from tests.strategy_settings import DEFAULTS, GEMMS, SETTINGS, SHIPPED, of_each_kind


def _names() -> dict[str, object]:
    """What a strategy's repr is made of."""
    packages = ("fst.rules.", "fst.strategies.", "fst.baselines.")
    modules = [m for name, m in sys.modules.items() if name.startswith(packages)]
    return {name: value for module in modules for name, value in vars(module).items()}


@pytest.mark.parametrize("row", of_each_kind(SETTINGS))
def test_frozen_hashable_equal_and_printable(row):
    strategy, again = row.build(), row.build()
    assert strategy == again and hash(strategy) == hash(again)
    assert len({strategy, again}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.decay = 1.0
    for gemm in GEMMS:
        rule = getattr(strategy, gemm)
        if rule is not None:
            with pytest.raises(dataclasses.FrozenInstanceError):
                rule.operand = "weight"
    assert eval(repr(strategy), _names()) == strategy
    for copied in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert copied == strategy
    for gemm in GEMMS:
        assert gemm in str(strategy)
    assert strategy.name in str(strategy)


def test_different_options_are_different_strategies():
    built = [row.build() for row in SETTINGS]
    assert len(set(built)) == len(built)
    texts = {str(strategy) for strategy in built}
    assert len(texts) == len(built), "two strategies print alike: a state check cannot tell them"


def test_every_registered_strategy_has_rows():
    assert set(SHIPPED) == {row.name for row in SETTINGS} - {"custom"}
    assert fst.list_strategies() == sorted(fst.list_strategies())


@pytest.mark.parametrize("row", DEFAULTS)
def test_unpruned_gemms_are_none(row):
    strategy = row.build()
    for gemm in row.dense:
        rule = getattr(strategy, gemm)
        if (gemm == "grad_weight" and strategy.decay) or (rule is not None and rule.has_memory):
            continue
        if rule is not None and rule.operand == "input" and rule.kept_positions(1, 1, 0):
            continue
        assert getattr(strategy, gemm) is None


def test_defaults_of_the_papers():
    """METHODS: 2:4 everywhere, λ = 2e-4, channel order, row pairing, phase 0, refresh every 40."""
    weight = NM("weight", 2, 4, rule="magnitude", group_order="channel")
    alternating = Alternating("input", pairing="row", phase=0, block=(1, 2), restore=True)
    common = dict(decay=2e-4, decay_mode="gradient")
    grad_output = NM("grad_output", 2, 4)
    expected = [
        Strategy("dense", skips_zeros=False),
        Strategy("srste", output=weight, grad_input=SameAsOutput(), **common),
        Strategy("fst", weight, NM("weight", 2, 4), alternating, **common),
        Strategy("fst_w", weight, NM("weight", 2, 4), **common),
        Strategy(
            "sdgp",
            grad_input=NM("grad_output", 2, 4, rule="magnitude_rescaled", rescale="sample_channel"),
            min_in_channels=4,
        ),
        Strategy("wg", weight, NM("weight", 2, 4), grad_output, **common),
        Strategy("wx", weight, NM("weight", 2, 4), NM("input", 2, 4), **common),
        Strategy("gg", weight, grad_output, grad_output, **common),
        Strategy("gx", weight, grad_output, NM("input", 2, 4), **common),
        Strategy("sampled", grad_weight=Sampled()),
        Strategy("fst_sampled", weight, NM("weight", 2, 4), Sampled(), **common),
        Strategy("tsm", Transposable(interval=40), Transposable(interval=40)),
        Strategy("asp", NM("weight", 2, 4), SameAsOutput(), schedule=OneShot()),
        Strategy("asfp", schedule=SoftFilters(goal=0.3)),
        Strategy(
            "dpf",
            Unstructured(sparsity=0.5),
            SameAsOutput(),
            schedule=GrowingSparsity(interval=16, ramp=0.75, allocation="global"),
        ),
        Strategy(
            "rigl",
            Unstructured(sparsity=0.5),
            SameAsOutput(),
            schedule=DropAndGrow(interval=100, alpha=0.3, end=0.75, allocation="erk"),
        ),
        Strategy(
            "clicktrain",
            KernelPatterns(patterns=4, connectivity=0.375),
            SameAsOutput(),
            min_in_channels=4,
            schedule=PatternSelection(choose=35 / 95, enforce=78 / 95, lasso=2.5e-4),
        ),
        Strategy("mvue", grad_weight=NM("grad_output", rule="mvue")),
        Strategy(
            "sste",
            SoftThreshold(),
            SameAsOutput(),
            NM("grad_output", rule="mvue_approximate"),
            schedule=FirstFactor(),
        ),
        Strategy(
            "tsrste",
            Transposable(),
            Transposable(),
            NM("grad_output", rule="mvue_approximate"),
            decay=6e-5,
            schedule=Phases(dense_tail=1 / 6),
        ),
        Strategy(
            "acdc",
            NM("weight"),
            SameAsOutput(),
            schedule=Alternation(warmup=0.1, period=0.05, last_dense=0.1, last_sparse=0.15),
        ),
        Strategy("sdgf", NM("weight"), SameAsOutput(), schedule=DecayingPattern(settled=0.1)),
        Strategy("mdgf", Fading(), SameAsOutput(), schedule=DecayingRest(settled=0.1)),
        Strategy(
            "maxq", MultiAxis(), SameAsOutput(), decay=2e-4, schedule=FewerDenseGroups(ramp=0.25)
        ),
        Strategy(
            "step",
            NM("weight"),
            SameAsOutput(),
            schedule=HeldMoment(earliest=0.1, latest=0.5, mean="arithmetic"),
        ),
        Strategy("meprop", None, TopK(density=0.5), TopK(density=0.5)),
        Strategy("resprop", None, Reuse(density=0.5), Reuse(density=0.5)),
        Strategy("sparsetrain"),
        Strategy("prunetrain", schedule=ChannelLasso(ratio=0.2, interval=10, threshold=1e-4)),
    ]
    assert sorted(s.name for s in expected) == SHIPPED
    for strategy in expected:
        assert fst.get_strategy(strategy.name) == strategy


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("n", "m"),
    [
        *((5, 4), (0, 4), (-1, 4), (1, 0), (2, 33), (0, 0), (3, 2)),
        *((2.0, 4), (2, 4.0), ("2", 4), (2, "4"), (2, None), (None, 4), (True, 4)),
    ],
)
@pytest.mark.parametrize(
    "rule",
    [
        *(NM, Transposable),
        lambda _, n, m: nm_mask(torch.zeros(8, 8), n, m, 0),
        lambda _, n, m: transposable_mask(torch.zeros(8, 8), n, m),
    ],
    ids=["NM", "Transposable", "nm_mask", "transposable_mask"],
)
def test_bad_patterns(rule, n, m):
    with pytest.raises((ValueError, TypeError)) as caught:
        rule("weight", n, m)
    message = str(caught.value)
    bad = n if not (isinstance(n, int) and n >= 1) else m
    assert repr(bad) in message or f"{n}" in message
    assert "32" in message or "integer" in message


BAD_RULES = [
    (NM, dict(operand="wieght"), ["operand", "wieght", "weight"]),
    (NM, dict(operand="output"), ["operand", "output", "grad_output"]),
    (NM, dict(operand="weight", rule="magnitud"), ["rule", "magnitud", "magnitude"]),
    (NM, dict(operand="weight", rule="alternating"), ["rule", "alternating"]),
    (NM, dict(operand="weight", rule=None), ["rule", "None"]),
    (NM, dict(operand="weight", rule="magnitude_rescaled"), ["rescaled", "weight"]),
    (NM, dict(operand="input", rule="magnitude_rescaled"), ["rescaled", "input"]),
    (NM, dict(operand="grad_output", rescale="sample"), ["rescale", "sample_channel"]),
    (NM, dict(operand="weight", group_order="channels"), ["group_order", "channels", "channel"]),
    (Alternating, dict(operand="weight"), ["operand", "weight", "input"]),
    (Alternating, dict(operand="grad_output"), ["operand", "grad_output", "input"]),
    (Alternating, dict(pairing="rows"), ["pairing", "rows", "row"]),
    (Alternating, dict(phase=2), ["phase", "2", "random"]),
    (Alternating, dict(phase="rand"), ["phase", "rand", "random"]),
    (Alternating, dict(block=(1, 1)), ["block", "(1, 1)"]),
    (Alternating, dict(block=(2, 1), pairing="flat"), ["block", "pairing", "flat"]),
    (Alternating, dict(block=(2, 2, 2)), ["block"]),
    (Alternating, dict(block=2), ["block", "2"]),
    (Alternating, dict(block=[1.0, 2.0]), ["block", "(1.0, 2.0)"]),
    (Alternating, dict(block=(True, 2)), ["block", "(True, 2)"]),
    (Alternating, dict(block=(2, 2), phase=1), ["block", "phase", "1"]),
    (Alternating, dict(block=(2, 2), phase="random"), ["block", "phase", "random"]),
    (Alternating, dict(block=(2, 2), pairing="flat"), ["block", "pairing", "flat"]),
    (Alternating, dict(restore="yes"), ["restore", "yes"]),
    (Transposable, dict(operand="input"), ["operand", "input", "weight"]),
    (Transposable, dict(interval=0), ["interval", "0"]),
    (Transposable, dict(interval=-3), ["interval", "-3"]),
    (Transposable, dict(interval=1.5), ["interval", "1.5"]),
    (Transposable, dict(group_order="nhwc"), ["group_order", "nhwc"]),
    (SameAsOutput, dict(operand="input"), ["operand", "input", "weight"]),
    (SameAsOutput, dict(operand="grad_output"), ["operand", "grad_output", "weight"]),
    (Strategy, dict(name=""), ["name"]),
    (Strategy, dict(name=None), ["name", "None"]),
    (Strategy, dict(output=NM("grad_output")), ["output", "grad_output", "weight"]),
    (Strategy, dict(output=NM("input")), ["output", "input", "weight"]),
    (Strategy, dict(grad_input=NM("input")), ["grad_input", "input", "weight"]),
    (Strategy, dict(grad_weight=NM("weight")), ["grad_weight", "weight", "input"]),
    (Strategy, dict(grad_input=Alternating()), ["grad_input", "input"]),
    (Strategy, dict(output="magnitude"), ["output", "magnitude"]),
    (Strategy, dict(grad_weight=Alternating), ["grad_weight"]),
    (Strategy, dict(output=SameAsOutput()), ["output"]),
    (Strategy, dict(grad_input=SameAsOutput()), ["grad_input"]),
    (Strategy, dict(output=Transposable()), ["output", "grad_input"]),
    (Strategy, dict(grad_input=Transposable()), ["output", "grad_input"]),
    (Strategy, dict(output=NM("weight"), decay=-1e-4), ["decay", "-0.0001"]),
    (Strategy, dict(output=NM("weight"), decay=float("nan")), ["decay", "nan"]),
    (Strategy, dict(output=NM("weight"), decay=float("inf")), ["decay", "inf"]),
    (Strategy, dict(output=NM("weight"), decay="2e-4"), ["decay", "2e-4"]),
    (Strategy, dict(output=NM("weight"), decay=True), ["decay", "True"]),
    (Strategy, dict(decay=2e-4), ["decay", "output"]),
    (Strategy, dict(output=NM("weight"), decay_mode="decouple"), ["decay_mode", "decoupled"]),
    (Strategy, dict(min_in_channels="4"), ["min_in_channels", "4"]),
    (Strategy, dict(min_in_channels=-1), ["min_in_channels", "-1"]),
    (Strategy, dict(grad_input=Reuse(), grad_weight=Reuse(density=0.1)), ["grad_input", "same"]),
    (Strategy, dict(schedule="rigl"), ["schedule", "rigl"]),
    (Unstructured, dict(operand="input"), ["operand", "input", "weight"]),
    (Unstructured, dict(sparsity=1.0), ["sparsity", "1.0"]),
    (Unstructured, dict(sparsity=-0.1), ["sparsity", "-0.1"]),
    (Unstructured, dict(sparsity=True), ["sparsity", "True"]),
    (KernelPatterns, dict(patterns=5), ["patterns", "5", "12"]),
    (KernelPatterns, dict(connectivity=1), ["connectivity", "1"]),
    (SoftFilters, dict(goal="half"), ["goal", "half"]),
    (GrowingSparsity, dict(interval=0), ["interval", "0"]),
    (GrowingSparsity, dict(ramp=1.1), ["ramp", "1.1"]),
    (GrowingSparsity, dict(allocation="erk"), ["allocation", "erk", "uniform"]),
    (DropAndGrow, dict(interval=2.5), ["interval", "2.5"]),
    (DropAndGrow, dict(alpha=float("nan")), ["alpha", "nan"]),
    (DropAndGrow, dict(end=-1), ["end", "-1"]),
    (DropAndGrow, dict(allocation="ERK"), ["allocation", "ERK", "erk"]),
    (PatternSelection, dict(choose=0.9, enforce=0.8), ["choose", "0.9", "0.8"]),
    (PatternSelection, dict(lasso=-1), ["lasso", "-1"]),
    (TopK, dict(operand="input"), ["operand", "input", "grad_output"]),
    (TopK, dict(density=0), ["density", "0"]),
    (TopK, dict(density=1.5), ["density", "1.5"]),
    (TopK, dict(density=True), ["density", "True"]),
    (TopK, dict(density=float("nan")), ["density", "nan"]),
    (Reuse, dict(density="half"), ["density", "half"]),
    (Reuse, dict(threshold=0), ["threshold", "0"]),
    (Reuse, dict(threshold=float("inf")), ["threshold", "inf"]),
    (Reuse, dict(warmup=-1), ["warmup", "-1"]),
    (Reuse, dict(warmup=2.5), ["warmup", "2.5"]),
    (ChannelLasso, dict(ratio=1), ["ratio", "1"]),
    (ChannelLasso, dict(ratio=-0.1), ["ratio", "-0.1"]),
    (ChannelLasso, dict(ratio=True), ["ratio", "True"]),
    (ChannelLasso, dict(interval=0), ["interval", "0"]),
    (ChannelLasso, dict(interval=1.5), ["interval", "1.5"]),
    (ChannelLasso, dict(threshold=-1e-4), ["threshold", "-0.0001"]),
    (ChannelLasso, dict(threshold=float("inf")), ["threshold", "inf"]),
    (NM, dict(operand="weight", rule="mvue"), ["rule='mvue'", "operand='grad_output'"]),
    (Alternating, dict(phase=True), ["True"]),
    (Transposable, dict(interval=True), ["True"]),
]


@pytest.mark.parametrize(
    ("kind", "options", "words"), BAD_RULES, ids=[f"{k.__name__}-{o}" for k, o, _ in BAD_RULES]
)
def test_bad_options(kind, options, words):
    if kind is Strategy:
        options = {"name": "mine", **options}
    with pytest.raises((ValueError, TypeError)) as caught:
        kind(**options)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{str(caught.value)!r} does not name {missing}"
