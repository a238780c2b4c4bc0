"""timm's layers that compute their padding or their weight, made sparse with their own arithmetic.

`fst.convert` imports this module when it meets a layer of timm's, so nobody has to. A layer that
standardises its weight (Qiao et al. 2019, arXiv 1903.10520; Brock et al. 2021, arXiv 2101.08692)
prunes what its GEMM multiplies: the standardised weight. Gradients and SR-STE's decay reach the
Parameter through the standardisation.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fst.basics.extras import extra_named
from fst.basics.sharding import whole

with extra_named():
    from timm.layers import (
        Conv2dSame,
        ScaledStdConv2d,
        ScaledStdConv2dSame,
        StdConv2d,
        StdConv2dSame,
        pad_same,
    )
    from timm.layers import Linear as TimmLinear

from fst.api.convert import register_layer
from fst.layers.modules import SparseConv2d, SparseLinear
from fst.rules.strategy import Strategy

STANDARDISED = "its weight is standardised in each call"


@register_layer
class SparseTimmLinear(SparseLinear, TimmLinear):  # type: ignore[misc]  # bias may be None
    """timm's `Linear`, which computes what `nn.Linear` computes."""

    dense_class = TimmLinear


@register_layer
class SparseConv2dSame(SparseConv2d, Conv2dSame):
    """`Conv2dSame`: the padding follows from the input's size."""

    dense_class = Conv2dSame

    def _maps(self, input: Tensor) -> Tensor:
        return _padded(self, input)


def _padded(layer: nn.Conv2d, input: Tensor) -> Tensor:
    return pad_same(input, list(layer.kernel_size), list(layer.stride), list(layer.dilation))


class SparseStandardised(SparseConv2d):
    """A convolution of timm's that gives each filter of its weight mean 0 and variance 1.

    The scaled ones multiply it by a gain, a Parameter, and by a constant.
    """

    eps: float
    gain: nn.Parameter
    scale: float
    multiplies_parameter = False

    @classmethod
    def obstacle(cls, strategy: Strategy) -> str | None:
        """Refuse strategies that act on the stored weight: this layer computes its own from it."""
        if strategy.schedule is not None:
            return f"{STANDARDISED}, and {strategy.name} works on stored ones at each step"
        if strategy.decay and not strategy.gradient_decay:
            return f"{STANDARDISED}, and decoupled decay works on stored ones"
        return None

    def _multiplied(self, weight: Tensor) -> Tensor:
        """The standardised weight, by timm's own operations."""
        factor = whole(self.gain) * self.scale if "gain" in self._parameters else None
        return F.batch_norm(
            weight.reshape(1, self.out_channels, -1),
            None,
            None,
            weight=None if factor is None else factor.view(-1),
            training=True,
            momentum=0.0,
            eps=self.eps,
        ).reshape_as(weight)

    @property
    def folded_class(self) -> type[nn.Module]:
        return Conv2dSame if getattr(self, "same_pad", False) else nn.Conv2d

    def densify(self, weight: Tensor) -> None:
        super().densify(weight)
        for name in ("eps", "scale", "gain", "gain_init", "same_pad"):
            if hasattr(self, name):
                delattr(self, name)

    def _maps(self, input: Tensor) -> Tensor:
        return _padded(self, input) if getattr(self, "same_pad", False) else input


for _kind in (StdConv2d, StdConv2dSame, ScaledStdConv2d, ScaledStdConv2dSame):
    _name, _bases = f"Sparse{_kind.__name__}", (SparseStandardised, _kind)
    globals()[_name] = register_layer(type(_name, _bases, {"dense_class": _kind}))
