"""Strategies by name: overrides, and registering one's own."""

import pytest
import torch

import fst
from fst import NM, Strategy
from fst.rules.alternating import Alternating


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("fts", {}, ["fts", "'fst'"]),
        ("", {}, ["strategy", "fst", "sdgp"]),
        (None, {}, ["None", "fst"]),
        (3, {}, ["3", "fst"]),
        ("fst", dict(decays=1e-3), ["decays", "'decay'"]),
        ("fst", dict(rescale="group"), ["rescale", "fst"]),
        ("dense", dict(n=2), ["n", "dense"]),
        ("sdgp", dict(rescal="group"), ["rescal", "'rescale'"]),
        ("fst", dict(n=5), ["5", "4"]),
        ("wx", dict(rule="magnitud"), ["magnitud", "magnitude"]),
        ("gx", dict(rule="magnitude_rescaled"), ["magnitude_rescaled"]),
        ("wx", dict(restore=False), ["restore=False", "rule='alternating'", "'magnitude'"]),
        ("gx", dict(rule="random", block=(2, 2)), ["block=(2, 2)", "rule='alternating'"]),
        ("sdgp", dict(decay=0.5), ["decay=0.5", "prune_weight=True"]),
        ("sdgp", dict(rule="random", rescale="group"), ["rescale='group'", "'random'"]),
        ("srste", dict(backward="sparse"), ["backward", "sparse", "dense"]),
        ("srste", dict(rule="alternating"), ["rule", "alternating"]),
        ("tsm", dict(interval=0), ["interval", "0"]),
        (["fst"], {}, ["['fst']", "fst"]),
        ("sdgp", dict(prune_grad_weight="no"), ["sdgp", "prune_grad_weight", "'no'", "bool"]),
        ("sdgp", dict(decay="x"), ["sdgp", "decay", "'x'", "float"]),
        ("wx", dict(phase=0.0), ["wx", "phase", "0.0", "int | str"]),
        ("fst", dict(block=[1, 2.0]), ["fst", "block", "[1, 2.0]", "tuple[int, int]"]),
        ("rigl", dict(alpha=True), ["rigl", "alpha", "True", "float"]),
        ("fst_w", dict(grad_weight="sample"), ["strategy='sample'", "'sampled'"]),
        ("fst_w", dict(grad_weight="sampled,kept=2"), ["'kept'", "'keep'"]),
        ("sdgp", dict(grad_weight="srste"), ["grad_weight='srste'", "dense"]),
        ("sdgp", dict(prune_grad_weight=True, grad_weight="mvue"), ["exclude each other"]),
        ("SRST", {}, ["Did you mean 'srste'"]),
        ("sampled,keeps=0.5", {}, ["'keeps'", "Did you mean 'keep'"]),
        ("sampled,keep=0.5", {"keep": 0.25}, ["sampled", "['keep']"]),
        ("fst,", {}, ["'fst,'", "Did you mean 'fst'"]),
        ("fst,=", {}, ["'fst,='"]),
        ("mvue", dict(n=1, approximate=True), ["approximate=True", "for 2:4, not for n=1, m=4"]),
        ("sste", dict(dense_tail=1.0), ["dense_tail"]),
        ("acdc", dict(warmup=0.5, last_dense=0.5), ["1.15 of the training"]),
        ("acdc", dict(period=0.0), ["period=0.0"]),
        ("sdgf", dict(dense_start=0.5, settled=0.5), ["no step on the way"]),
        ("sdgf", dict(m=8, structure="geometric"), ["groups of 64"]),
        ("sdgf", dict(structure="steps"), ["structure='steps'"]),
        ("mdgf", dict(decline="log"), ["decline='log'"]),
        ("maxq", dict(ramp=1.0), ["ramp"]),
        ("fst_w", dict(grad_input="twice"), ["grad_input='twice'"]),
        ("fst_w", dict(permutations=3), ["needs grad_input='double'"]),
        ("fst_w", dict(grad_input="double", interval=3), ["needs permutations"]),
        ("rigl", dict(n=2, m=4, sparsity=0.5), ["sparsity=0.5: the pattern n=2, m=4"]),
        ("rigl", dict(n=2), ["n=2, m=None: give both"]),
        ("step", dict(earliest=0.6), ["earliest=0.6 must not exceed latest=0.5"]),
    ],
    ids=str,
)
def test_bad_names_and_overrides(name, overrides, words):
    with pytest.raises((ValueError, TypeError)) as caught:
        fst.get_strategy(name, **overrides)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{str(caught.value)!r} does not name {missing}"


@pytest.mark.parametrize("name", ["fst_w", "sdgp"])
@pytest.mark.parametrize("other", ["sampled,keep=0.25", "mvue,n=1", "fst"])
def test_a_strategy_may_take_the_grad_weight_of_another(name, other):
    strategy = fst.get_strategy(name, grad_weight=other)
    assert strategy.grad_weight == fst.get_strategy(other).grad_weight is not None
    assert strategy.grad_input == fst.get_strategy(name).grad_input


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sampled,keep=0.25", dict(keep=0.25)),
        ("sampled,keep=0.25,center=False", dict(keep=0.25, center=False)),
        ("fst,block=(2, 1),phase=random", dict(block=(2, 1), phase="random")),
        ("SRSTE", {}),
        ("Fst-Sampled, keep=0.25", dict(keep=0.25)),
    ],
)
def test_a_name_may_carry_its_options(name, options):
    """As README's tables and `fst bench` write it, or papers."""
    bare = name.partition(",")[0].lower().replace("-", "_")
    strategy = fst.get_strategy(bare, **options)
    assert fst.get_strategy(name) == strategy
    model = torch.nn.Sequential(torch.nn.Conv2d(16, 16, 3))
    fst.convert(model, name, layers="conv")
    with pytest.raises(ValueError, match=f"'kept' is neither .* of strategy '{bare}'"):
        fst.convert(torch.nn.Conv2d(16, 16, 3), name, kept=1)
    assert model[0].strategy == strategy
    weight, image = torch.randn(16, 16, 3, 3), torch.randn(1, 16, 5, 5)
    assert fst.sparse_conv2d(image, weight, strategy=name).shape == (1, 16, 3, 3)


def test_block_may_be_a_list():
    """What JSON and YAML make of a tuple."""
    assert fst.get_strategy("fst", block=[2, 2]) == fst.get_strategy("fst", block=(2, 2))


def test_a_finished_strategy_passes_through():
    strategy = fst.get_strategy("fst", n=1)
    assert fst.get_strategy(strategy) is strategy
    with pytest.raises(ValueError, match="n"):
        fst.get_strategy(strategy, n=2)


@pytest.fixture
def registry(monkeypatch):
    """A copy of the registry that the test may write to."""
    from fst.strategies import registry

    monkeypatch.setattr(registry, "_RECIPES", dict(registry._RECIPES))


def test_user_defined_strategy(registry):
    @fst.register_strategy("mine")
    def mine(m: int = 8) -> Strategy:
        return Strategy("mine", output=NM("weight", 1, m), grad_weight=Alternating())

    assert "mine" in fst.list_strategies()
    assert fst.get_strategy("mine", m=4).output.m == 4
    model = torch.nn.Sequential(torch.nn.Conv2d(16, 8, 3), torch.nn.ReLU())
    report = fst.convert(model, "mine")
    assert list(report.converted) == ["0"]
    model(torch.randn(2, 16, 6, 6)).sum().backward()
    assert int((fst.fold(model)[0].weight != 0).sum()) == 2 * 8 * 9
    with pytest.raises(ValueError, match="'m'"):
        fst.get_strategy("mine", mm=4)


def test_registering_a_taken_name_is_noticed(registry):
    def impostor() -> Strategy:
        return Strategy("fst")

    with pytest.raises(ValueError, match="'fst'"):
        fst.register_strategy("fst")(impostor)
    assert fst.get_strategy("fst").decay == 2e-4


def test_registering_the_same_name_twice_is_noticed(registry):
    """Two functions that happen to have one name in two modules are two functions."""

    def make(decay):
        def mine() -> Strategy:
            return Strategy("mine", output=NM("weight"), decay=decay)

        mine.__qualname__, mine.__module__ = "mine", f"package{int(decay)}"
        return mine

    fst.register_strategy("mine")(make(1.0))
    with pytest.raises(ValueError, match="'mine'"):
        fst.register_strategy("mine")(make(2.0))


def test_overrides_need_defaults(registry):
    with pytest.raises(ValueError, match="n"):

        @fst.register_strategy("mine")
        def mine(n) -> Strategy:
            return Strategy("mine", output=NM("weight", n, 4))
