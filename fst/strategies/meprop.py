"""meProp: only the largest output gradients are propagated.

Paper: Sun et al., "meProp: Sparsified Back Propagation for Accelerated Deep Learning with Reduced
Overfitting", ICML 2017, Eq. 6 to 8, written for fully connected layers: top-k of each example's
output gradient, used for the gradients of the weight and of the input. Official code:
github.com/lancopku/meProp, where the bias gradient sees the full dY; so it does here. For a
convolution a sample's gradient is its whole (Cout, P, Q) map, of which k is a share: 50 % in FST's
Table 3 (the paper's own k, 4 to 16 % of a layer, was for perceptrons).
"""

from fst.rules.gradient import TopK
from fst.rules.strategy import Strategy
from fst.strategies.registry import register_strategy


@register_strategy("meprop")
def meprop(density: float = 0.5) -> Strategy:
    """dX = Wᵀ·T(dY), dW = T(dY)·Xᵀ, T being the top ``density`` of each sample, selected once."""
    rule = TopK(density=density)
    return Strategy("meprop", grad_input=rule, grad_weight=rule)
