"""`fully_shard` (FSDP2) on two ranks trains as one process does, or says what cannot work."""

from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from tests.integrations import ranks, refusals, sharded
from tests.strategy_settings import DEFAULTS, SHIPPED

DOCS = Path(__file__).parents[2] / "docs" / "integrations.md"


@pytest.mark.slow
@pytest.mark.system
def test_two_ranks(tmp_path):
    """See `sharded` and `refusals`; a checkpoint of theirs is resumed by one process here."""
    wrong = {name: what for name, what in ranks.run(tmp_path, [*refusals.CASES]).items() if what}
    assert not wrong, "\n".join(f"{name}:\n{what}" for name, what in wrong.items())
    strategy = sharded.RESUMED["rigl-interval2"]()
    uninterrupted, resumed = (
        sharded.Training(sharded.network(strategy), sharded.ALL) for _ in range(2)
    )
    sharded.load(resumed, tmp_path / "rigl-interval2")
    sharded.assert_equal(resumed.train().model, uninterrupted.train().model)
    resprop = sharded.network(sharded.RESUMED["resprop-threshold"]())
    training = sharded.Training(resprop, sharded.ALL, momentum=0.0)
    with pytest.raises(CheckpointException, match="Missing key .* sparsity.rank0_of_1"):
        sharded.load(training, tmp_path / "resprop-threshold")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.system
def test_two_ranks_of_everything(tmp_path):
    wrong = {name: what for name, what in ranks.run(tmp_path, [*sharded.MORE]).items() if what}
    assert not wrong, "\n".join(f"{name}:\n{what}" for name, what in wrong.items())


def test_the_documentation_has_this_table():
    assert sharded.TABLE.keys() == {row.name for row in DEFAULTS} == {*SHIPPED}
    text = DOCS.read_text()
    for what in dict.fromkeys(sharded.TABLE.values()):
        names = ", ".join(f"`{name}`" for name in sharded.TABLE if sharded.TABLE[name] == what)
        assert f"| {names} | {what}" in text
