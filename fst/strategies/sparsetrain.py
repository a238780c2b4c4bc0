"""SparseTrain: the zeros that ReLU leaves in X and dY are skipped; no value changes.

Paper: Gong et al., "SparseTrain: Leveraging Dynamic Sparsity in Software for Training DNNs on
General-Purpose SIMD Processors", PACT 2020 (arXiv 1911.10175), a CPU kernel; no official code is
public. Skipping a multiplication by zero leaves every result as it is, so all three GEMMs are
dense here, bit for bit, and what such a kernel could skip is counted: zeros of X (output and
grad_weight) and of dY (grad_input), per layer, in training (`SparseLayer.zero_shares`).
"""

from fst.rules.strategy import Strategy
from fst.strategies.registry import register_strategy


@register_strategy("sparsetrain")
def sparsetrain() -> Strategy:
    """Dense, and the zeros of input and grad_output are counted."""
    return Strategy("sparsetrain", count_zeros=True)
