"""ReSprop: output gradients are reused from the previous step except where they differ much.

Paper: Goli and Aamodt, "ReSprop: Reuse Sparsified Backpropagation", CVPR 2020. Official code:
github.com/negargoli/ReSprop. As there:

- What is reused is one sample of the previous batch, the same for all samples of this one, so that
  its part of both products costs 1/N of a dense one (and the size of a batch may change).
- What is kept of the difference is above a threshold of each layer, which starts at 1e-7 and
  doubles or halves after each step, towards the share ``density``. The bias gradient is dense.
- Warm-up (W-ReSprop): the share falls to ``density`` over the first steps. The code falls by 10 %
  per epoch after two dense ones; here it falls linearly over ``warmup`` steps.

Differences: the code draws the sample at random, here it is the first of the batch (batches are
shuffled); it adds 5 % to the share; it is dense in the first and last step of each epoch, here only
where nothing is remembered. The n-th call of a layer in a step continues the n-th of the step
before. Layers whose weight needs no gradient are dense, and so is eval mode. With a `GradScaler`
gradients are remembered as scaled: a change of the scale looks like a difference. Each rank of a
distributed run remembers its own (the engine's checkpoints hold all). Memory: Cout·P·Q values per
layer and call.
"""

from fst.rules.gradient import Reuse
from fst.rules.strategy import Strategy
from fst.strategies.registry import register_strategy


@register_strategy("resprop")
def resprop(density: float = 0.5, threshold: float = 1e-7, warmup: int = 0) -> Strategy:
    """dX = Wᵀ·R(dY), dW = R(dY)·Xᵀ with R(dY) = prev + P(dY − prev)."""
    rule = Reuse(density=density, threshold=threshold, warmup=warmup)
    return Strategy("resprop", grad_input=rule, grad_weight=rule)
