"""SDGP: structured data gradient pruning.

Paper: McDanel et al., "Accelerating DNN Training with Structured Data Gradient Pruning", ICPR 2022,
Algorithm 1 and section III-B. Official code: github.com/BradMcDanel/sdgp, which leaves convolutions
with three input channels or fewer alone, as here.
"""

from fst.strategies import register_strategy
from fst.strategy import NM, Strategy


@register_strategy("sdgp")
def sdgp(
    n: int = 2,
    m: int = 4,
    rule: str = "magnitude_rescaled",
    rescale: str = "sample_channel",
) -> Strategy:
    """dX = Wᵀ·P(dY), pruned along output channels; dW and the bias gradient see the full dY."""
    grad_output = NM("grad_output", n, m, rule=rule, rescale=rescale)
    return Strategy("sdgp", grad_input=grad_output, min_in_channels=4)
