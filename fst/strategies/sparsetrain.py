"""SparseTrain: the zeros that ReLU leaves in X and dY are left out; no value changes.

Paper: Gong et al., "SparseTrain: Leveraging Dynamic Sparsity in Software for Training DNNs on
General-Purpose SIMD Processors", PACT 2020 (arXiv 1911.10175), a kernel for AVX-512; no official
code is public. Here the backends leave zeros out wherever that is measured to be faster, on CPUs,
and every other strategy gains by them too: this one prunes nothing besides.
"""

from fst.rules.strategy import Strategy
from fst.strategies.registry import register_strategy


@register_strategy("sparsetrain")
def sparsetrain() -> Strategy:
    """Y = W·X, dX = Wᵀ·dY, dW = dY·Xᵀ without the zeros of X and dY: the dense gradients."""
    return Strategy("sparsetrain")
