"""A handful of the campaign's cases in every test run, the whole of it with `-m campaign`."""

import io
import json
import random

import pytest
from rich.console import Console

from fst.layers.modules import SparseLayer
from tests.campaign import __main__ as campaign

SMOKE = (
    "weights/swap_tensors-0",
    "weights/inference_mode-copy-1",
    "weights/parametrization-scale-0",
    "op/call-0",
    "op/call-1",
    "op/call-2",
    "files/system-zip-0",
    "files/getattr-called-legacy-0",
    "files/truncated-1",
)


@pytest.mark.parametrize("name", SMOKE)
def test_smoke(name):
    dict(campaign.cases_of(name.partition("/")[0], 1))[name](random.Random(f"0/{name}"))


@pytest.mark.campaign
@pytest.mark.parametrize("kind", campaign.KINDS)
def test_campaign(kind):
    cases = {kind: campaign.cases_of(kind, 1)}
    assert not campaign.execute(cases, 0, Console(file=io.StringIO()))[1]


def test_a_stale_weight_is_seen_and_told(monkeypatch, tmp_path, capsys):
    """A layer that remembers S(W) as long as autograd's version counter stays is found out."""
    prune, remembered = SparseLayer._prune, {}

    def remember(self, weight, dtype, *, trains):
        key = id(self), weight.data_ptr(), weight._version, dtype
        if key not in remembered:
            remembered[key] = prune(self, weight, dtype, trains=trains)
        return remembered[key]

    monkeypatch.setattr(SparseLayer, "_prune", remember)
    (tmp_path / "page.md").write_text(f"a\n{campaign.MARK}old{campaign.MARK}b\n")
    files = ["--json", str(tmp_path / "a.json"), "--markdown", str(tmp_path / "page.md")]
    assert campaign.main(["--only", "weights/data-copy-0", *files]) == 1
    (failure,) = json.loads((tmp_path / "a.json").read_text())["failures"]
    assert "off, the old weight's" in failure["error"]
    assert failure["repeat"].endswith("--seed 0 --scale 1 --only weights/data-copy-0")
    assert "| weights | 1 | 0 | 1 |" in (tmp_path / "page.md").read_text()
    assert campaign.main(["--only", "weights/new-parameter-0"]) == 0
