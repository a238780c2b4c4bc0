"""A handful of the campaign's cases in every test run, the whole of it with `-m campaign`."""

import io
import json
import random
import re
from contextlib import contextmanager

import pytest
import torch
from rich.console import Console

import fst.api.export
from fst.layers.remembered import FrozenBlock
from fst.ops.plan import CallPlan
from fst.ops.prune import prune_weight
from fst.rules.sampled import Positions, Sampled
from tests.campaign import __main__ as campaign
from tests.campaign import masks

SMOKE = (
    "weights/swap_tensors-0",
    "weights/inference_mode-copy-1",
    "weights/parametrization-scale-0",
    "op/call-0",
    "op/call-1",
    "op/call-2",
    "operators/call-0",
    "masks/mask-3-bfloat16-2:4-0",
    "masks/loop-2-float32-1:3-0",
    "choice/draw-0",
    "choice/mean-0",
    "choice/variance-0",
    "choice/resumed-0",
    "choice/recomputed-0",
    "zeros/resumed-0",
    "frozen/interrupt-0",
    "frozen/converted-again-0",
    "exports/file-safetensors-0",
    "exports/together-0",
    "packed/sizes-0",
    "packed/nan-0",
    "packed/changed-parameter-0",
    "packed/watched-make_fx-0",
    "packed/state-0",
    "files/system-zip-0",
    "files/getattr-called-legacy-0",
    "files/truncated-1",
)


@pytest.mark.parametrize("name", SMOKE)
def test_smoke(name):
    dict(campaign.cases_of(name.partition("/")[0], 1))[name](random.Random(f"0/{name}"))


@pytest.mark.campaign
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", campaign.KINDS)
def test_campaign(kind):
    cases = {kind: campaign.cases_of(kind, 1)}
    assert not campaign.execute(cases, 0, Console(file=io.StringIO()))[1]


def test_a_stale_weight_is_seen_and_told(monkeypatch, tmp_path, capsys):
    """A layer that remembers S(W) as long as autograd's version counter stays is found out."""
    prune, remembered = CallPlan.prune, {}

    def remember(self, weight, *options):
        key = weight.data_ptr(), weight._version, self.dtype
        if key not in remembered:
            remembered[key] = prune(self, weight, *options)
        return remembered[key]

    monkeypatch.setattr(CallPlan, "prune", remember)
    (tmp_path / "page.md").write_text(f"a\n{campaign.MARK}old{campaign.MARK}b\n")
    files = ["--json", str(tmp_path / "a.json"), "--markdown", str(tmp_path / "page.md")]
    assert campaign.main(["--only", "weights/data-copy-0", *files]) == 1
    (failure,) = json.loads((tmp_path / "a.json").read_text())["failures"]
    assert "off, the old weight's" in failure["error"]
    assert failure["repeat"].endswith("--seed 0 --scale 1 --only weights/data-copy-0")
    assert "| weights | 1 | 0 | 1 |" in (tmp_path / "page.md").read_text()
    assert campaign.main(["--only", "weights/new-parameter-0"]) == 0


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
    "masks/mask-3-float32-2:4-?": (
        masks,
        "prune_weight",
        lambda weight, strategy, groups, dtype: prune_weight(weight, strategy, 1, dtype),
        "S",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_planted_fault_is_found(case, monkeypatch, tmp_path):
    """Each is one that the library once had, or that its design rules out."""
    owner, name, faulty, message = FAULTS[case]
    monkeypatch.setattr(owner, name, faulty)
    assert campaign.main(["--only", case, "--json", str(tmp_path / "a.json")]) == 1
    failures = json.loads((tmp_path / "a.json").read_text())["failures"]
    assert failures and all(re.search(message, failure["error"]) for failure in failures)
