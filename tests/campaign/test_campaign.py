"""A handful of the campaign's cases in every test run, the whole of it with `-m campaign`."""

import random
import re
from contextlib import contextmanager

import pytest
import torch

import fst.api.export
from fst.layers.remembered import FrozenBlock
from fst.ops.operands import PruneWeight
from fst.ops.plan import CallPlan
from fst.rules.sampled import Positions, Sampled
from tests.campaign import __main__ as campaign
from tests.campaign import masks

SMOKE = (
    *(name for name, _ in campaign.cases_of("weights", 0)),  # one of each
    "operators/call-0",
    "masks/3-bfloat16-2:4-0",
    "choice/variance-0",
    "choice/recomputed-0",
    "zeros/resumed-0",
    *(name for name, _ in campaign.cases_of("frozen", 0)),  # one of each
    "exports/file-safetensors-0",
    "packed/sizes-0",
    "packed/nan-0",
    "packed/changed-parameter-0",
    "packed/changed-scale-0",
    "packed/watched-make_fx-0",
    "compiled/trained-0",
    "foreign/torch-0",
    *(f"files/system-{container}-0" for container in ("zip", "plain", "legacy")),
    "files/getattr-called-legacy-0",
    "files/getattr-of-array-zip-0",
    *(f"files/{name}-zip-0" for name in ("object-array-of-addresses", "object-scalar")),
    *(f"files/{name}-zip-0" for name in ("array-called", "array-called-huge")),
    *(f"files/flipped-bit-{number}" for number in range(4)),
    "files/truncated-1",
)


@pytest.mark.parametrize("name", SMOKE)
def test_smoke(name):
    dict(campaign.cases_of(name.partition("/")[0], 1))[name](random.Random(f"0/{name}"))


@pytest.mark.campaign
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", campaign.KINDS)
def test_campaign(kind):
    assert not campaign.failures_of(campaign.cases_of(kind, 1), 0)


def test_a_stale_weight_is_seen_and_told(monkeypatch, capsys):
    """A layer that remembers S(W) as long as autograd's version counter stays is found out."""
    prune, remembered = CallPlan.prune, {}

    def remember(self, weight, *options):
        key = weight.data_ptr(), weight._version, self.dtype
        if key not in remembered:
            remembered[key] = prune(self, weight, *options)
        return remembered[key]

    monkeypatch.setattr(CallPlan, "prune", remember)
    assert campaign.main(["--only", "weights/data-copy-0", "--kinds", "weights"]) == 1
    said = capsys.readouterr().out
    assert "--seed 0 --scale 1 --only weights/data-copy-0\n" in said
    assert "off, the old weight's" in said and "| weights | 1     | 0    | 1 " in said
    assert campaign.main(["--only", "weights/new-parameter-0", "--kinds", "weights"]) == 0


def test_calls_that_sample_are_compared_without_a_setting_of_the_environment(monkeypatch):
    """A call is not replaced by an exact one where that is faster on this machine."""
    monkeypatch.setenv("FST_AUTOTUNE", "1")
    assert campaign.main(["--kinds", "op", "--scale", "0.2"]) == 0


@contextmanager
def _beside(path):
    """A file of a fixed name, which may be a user's."""
    partial = path.with_suffix(f".partial{path.suffix}")
    yield partial
    partial.replace(path)


def _unweighted(choose):
    def chosen(self, scores, count, start):
        places, weight = choose(self, scores, count, start)
        return Positions(places, torch.ones_like(weight))

    return chosen


FAULTS = {
    "frozen/end-0": (FrozenBlock, "end", lambda block: None, "is left frozen"),
    "exports/file-safetensors-1": (fst.api.export, "replacing", _beside, ""),
    "choice/mean-0": (Sampled, "choose", _unweighted(Sampled.choose), "mean is .* off"),
    "masks/3-float32-2:4-?": (
        masks,
        "PruneWeight",
        lambda weight, strategy, groups, dtype: PruneWeight(weight, strategy, 1, dtype),
        "S",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_planted_fault_is_found(case, monkeypatch, capsys):
    """Each is one that the library once had, or that its design rules out."""
    owner, name, faulty, message = FAULTS[case]
    monkeypatch.setattr(owner, name, faulty)
    assert campaign.main(["--only", case, "--kinds", case.partition("/")[0]]) == 1
    assert re.search(f"--only {case[:-1]}.*\n    .*{message}", capsys.readouterr().out)
