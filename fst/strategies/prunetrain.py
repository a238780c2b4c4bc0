"""PruneTrain: channels that group lasso drives to zero are removed while training goes on.

Paper: Lym et al., "PruneTrain: Fast Neural Network Training by Dynamic Sparse Model
Reconfiguration", SC 2019 (arXiv 1901.09290). Code: bitbucket.org/lph_tools/prunetrain, of which
github.com/VictorSuciu/prunetrain is a copy. As there:

- Penalty λ·Σ‖w‖₂ over the weights of each output and of each input channel, for all channels that
  can be removed (not the image's, not the classes', not in depthwise convolutions), with one λ,
  such that the penalty is the share ``ratio`` of loss plus penalty in the first step.
- Every ``interval`` epochs each channel of which no weight in the layers that produce or read it
  reaches ``threshold`` is removed. Layers joined by additions keep the union of what each needs.
- The optimizer's momentum of what stays is kept.

Differences: at least one channel of a group stays (there, a layer without channels is removed); the
momentum is always kept (there, `cifar.py` builds a new optimizer each epoch). Linear layers take
part with their inputs, whether converted or not; convolutions that are not converted keep theirs.
The loss must be known: the engine reports that of the first step, whose update then goes without
penalty; in your own loop call ``attachment.report_loss(loss)`` before the first step. One process
only: DistributedDataParallel cannot exchange Parameters.
"""

from fst.channel_lasso import ChannelLasso
from fst.strategies import register_strategy
from fst.strategy import Strategy


@register_strategy("prunetrain")
def prunetrain(ratio: float = 0.2, interval: int = 10, threshold: float = 1e-4) -> Strategy:
    """Dense GEMMs of a model that loses channels every ``interval`` epochs."""
    return Strategy("prunetrain", schedule=ChannelLasso(ratio, interval, threshold))
