"""Rules of grad_weight as plain data."""

import json

import pytest

import fst
from fst.rules.alternating import Alternating
from fst.rules.bands import Bands
from fst.rules.by_name import grad_weight_rule, options_of
from fst.rules.sampled import Sampled


@pytest.mark.parametrize(
    "rule",
    [
        None,
        Sampled(keep=4, axis="both"),
        Bands(block=(1, 2), keep=("L",), sample=()),
        Alternating(),
    ],
)
def test_there_and_back_through_json(rule):
    assert grad_weight_rule(json.loads(json.dumps(options_of(rule)))) == rule


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "sample"}, "rule='sample' is unknown. Did you mean 'sampled'"),
        ({"keep": 2}, "rule=None is unknown"),
        ({"rule": "sampled", "kept": 2}, "has no option 'kept'. Did you mean 'keep'"),
        ({"rule": "sampled", "keep": 3}, "keep=3 is unknown"),
        ({"rule": "sampled", "axis": "row"}, "axis='row' is unknown. Did you mean 'rows'"),
        ({"rule": "sampled", "phase": 2}, "phase=2 is unknown"),
        ({"rule": "sampled", "center": "yes"}, "center='yes' is unknown"),
        ({"rule": "sampled", "split": 1}, "split=1 is unknown"),
        ({"rule": "sampled", "min_size": -1}, "min_size=-1 must be an integer >= 0"),
        ({"rule": "sampled", "prefix_tokens": True}, "prefix_tokens=True must be an integer >= 0"),
        ({"rule": "sampled", "prefix_tokens": 1, "axis": "samples"}, "prefix_tokens=1 needs axis="),
        ({"rule": "sampled", "split": True, "axis": "samples"}, "split=True needs axis="),
        ({"rule": "sampled", "keep": 2.0}, "keep=2.0 is unknown"),
        ({"rule": "bands", "keep": ["L"]}, "keep='L' is no band"),
        ({"rule": "bands", "block": [3, 3]}, r"block=\(3, 3\) is unknown"),
        ({"rule": "bands", "keep": [], "sample": []}, "must be at least one band"),
        ({"rule": "bands", "keep": ["LL"], "sample": ["LL"]}, "each once"),
        ({"rule": "bands", "keep": "LL"}, "keep='LL' must be a list"),
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
    strategy = fst.get_strategy(name, grad_weight={"rule": "sampled", "keep": 4})
    assert strategy.grad_weight == Sampled(keep=4)
    with pytest.raises(ValueError, match="unknown"):
        fst.get_strategy(name, grad_weight={"rule": "nothing"})


def test_sdgp_prunes_grad_weight_in_one_way():
    with pytest.raises(ValueError, match="exclude each other"):
        fst.get_strategy("sdgp", prune_grad_weight=True, grad_weight={"rule": "sampled"})
