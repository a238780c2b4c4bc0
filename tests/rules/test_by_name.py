"""Rules of grad_weight as plain data."""

import pytest

import fst
from fst.rules.by_name import grad_weight_rule
from fst.rules.sampled import Sampled


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "sample"}, "rule='sample' is unknown. Did you mean 'sampled'"),
        ({"keep": 2}, "rule=None is unknown"),
        ({"rule": "sampled", "kept": 2}, "has no option 'kept'. Did you mean 'keep'"),
        ({"rule": "sampled", "noise": 0.1}, "It has left.*docs/negative.md"),
        ({"rule": "sampled", "keep": 3}, "keep=3 must be a share"),
        ({"rule": "sampled", "center": "yes"}, "center='yes' is unknown"),
        ({"rule": "alternating", "block": [3, 3]}, r"block=\(3, 3\) is unknown"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        grad_weight_rule(options)


def test_no_mapping():
    with pytest.raises(TypeError, match="must be a mapping"):
        grad_weight_rule("sampled")


@pytest.mark.parametrize("name", ["fst_w", "sdgp"])
def test_strategies_that_combine_with_it(name):
    strategy = fst.get_strategy(name, grad_weight={"rule": "sampled", "keep": 0.25})
    assert strategy.grad_weight == Sampled(keep=0.25)
    with pytest.raises(ValueError, match="unknown"):
        fst.get_strategy(name, grad_weight={"rule": "nothing"})


def test_sdgp_prunes_grad_weight_in_one_way():
    with pytest.raises(ValueError, match="exclude each other"):
        fst.get_strategy("sdgp", prune_grad_weight=True, grad_weight={"rule": "sampled"})
