"""Random calls of the op against the literal float64 reference."""

from tests.campaign.shared import Checks, example_of
from tests.ops.test_conv import test_random_calls


def checks() -> Checks:
    """Random calls."""
    return [("call", 600, example_of(test_random_calls))]
