"""Two processes that run cases of `sharded` and `refusals`."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests import two_ranks
from tests.integrations import refusals, sharded


def _rank(rank: int, folder: Path, cases: Sequence[str]) -> None:
    outcomes = {}
    for name in cases:
        try:
            {**sharded.MORE, **refusals.CASES}[name](rank, folder)
            outcomes[name] = ""
        except BaseException:
            outcomes[name] = traceback.format_exc()
    (folder / f"{rank}.json").write_text(json.dumps(outcomes))


def run(folder: Path, cases: Sequence[str]) -> dict[str, str]:
    """What was wrong in each case, on both ranks; "" where nothing was."""
    two_ranks.run(_rank, folder, folder, cases)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    return {name: "\n".join(filter(None, (found[name] for found in ranks))) for name in cases}
