"""SparseTrain: the zeros that ReLU leaves in X and dY are skipped; no value changes.

Paper: Gong et al., "SparseTrain: Leveraging Dynamic Sparsity in Software for Training DNNs on
General-Purpose SIMD Processors", PACT 2020 (arXiv 1911.10175), a CPU kernel; no official code is
public. To skip a multiplication by zero leaves every result as it is, so the strategy prunes
nothing: all three GEMMs are dense, bit for bit.
"""

from fst.rules.strategy import Strategy
from fst.strategies.registry import register_strategy


@register_strategy("sparsetrain")
def sparsetrain() -> Strategy:
    """Y = W·X, dX = Wᵀ·dY, dW = dY·Xᵀ, all dense."""
    return Strategy("sparsetrain")
