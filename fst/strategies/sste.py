"""S-STE: N:M weights by a soft threshold, continuous in the dense weight.

Paper: Hu et al., "S-STE: Continuous Pruning Function for Efficient 2:4 Sparse Pre-training",
NeurIPS 2024 (arXiv 2409.09099). Official code: github.com/huyz2023/2by4-pretrain
(sparse/utils.py), github.com/thu-ml/2by4-pretrain-acc-examples (v2/nanoGPT/sparse_ops.py), which
rounds operands to FP8 too; here they keep their precision. The code has 2:4 alone; the threshold of
n:m is the (n + 1)-th magnitude of a group.

β = ⟨W, S(W)⟩ / ⟨S(W), S(W)⟩ of each layer is chosen once, when training starts, and kept in the
layer's state. The code prunes the linear layers of feed-forward blocks.
"""

from dataclasses import dataclass
from typing import Any

from fst.rules.nm import SameAsOutput
from fst.rules.phases import Phases
from fst.rules.schedule import Layers, PrunedLayer, Run
from fst.rules.strategy import Strategy
from fst.rules.values import SoftThreshold
from fst.strategies.mvue import unbiased
from fst.strategies.registry import register_strategy


@dataclass(frozen=True)
class FirstFactor(Phases):
    """The factor β of the weights that training starts from, for good."""

    def remembered(self, phase: Any) -> tuple[str, ...]:
        return ("factor", *super().remembered(phase))

    def start(self, layers: Layers, run: Run) -> None:
        for layer in layers:
            rule, weight = layer.strategy.output, layer.weight_as_conv().detach()
            factor = rule.factor_of(weight, layer.rule_mask())
            layer.state.schedule_state["factor"] = factor
        super().start(layers, run)

    def pruning(self, layer: PrunedLayer, run: Run, done: int) -> dict[str, Any]:
        return {"factor": layer.state.schedule_state["factor"]}

    def __str__(self) -> str:
        return f"factor of the first weights, {super().__str__()}"


@register_strategy("sste")
def sste(
    n: int = 2,
    m: int = 4,
    mvue: bool = True,
    group_order: str = "channel",
    dense_tail: float = 0.0,
) -> Strategy:
    """Y = β·S(W)·X, dX = (β·S(W))ᵀ·dY, dW = MVUE(dY)·Xᵀ, passed to W unchanged; no decay.

    Args:
        mvue: whether dY is pruned to n:m in grad_weight, by the approximation of the official code
            for 2:4, else exactly.
        dense_tail: share of the training that ends it with dense weights.
    """
    return Strategy(
        "sste",
        output=SoftThreshold("weight", n, m, group_order=group_order),
        grad_input=SameAsOutput(),
        grad_weight=unbiased(n, m, approximate=(n, m) == (2, 4)) if mvue else None,
        schedule=FirstFactor(dense_tail=dense_tail),
    )
