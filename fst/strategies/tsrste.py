"""T-SR-STE: a transposable mask with masked decay, unbiased 2:4 of dY, and a dense tail.

Paper: Hu et al., "Accelerating Transformer Pre-training with 2:4 Sparsity", ICML 2024 (arXiv
2404.01847). Official code: github.com/huyz2023/2by4-pretrain (sparse/decay.py,
sparse/transposable_semi_structured.py, sparse/utils.py) and
github.com/thu-ml/2by4-pretrain-acc-examples (v1/nanoGPT). The mask is the best of the 90 patterns
of each 4x4 tile, searched every 40 optimizer steps; λ(1 − M)∘W joins the gradient before Adam; the
last sixth of the training is dense, so that the weights which it ends with are dense. λ is 6e-5 for
GPT-2 of 124 M and 774 M parameters there, 2e-4 for 350 M and 1.5 B. The code prunes the linear
layers of feed-forward blocks, and clips gradients before it adds the decay, as here. ``m > 4`` is
not in the paper: its masks are `tsm`'s, and dY is drawn exactly.
"""

from fst.rules.nm import Transposable
from fst.rules.phases import Phases
from fst.rules.strategy import Strategy
from fst.strategies.mvue import unbiased
from fst.strategies.registry import register_strategy


@register_strategy("tsrste")
def tsrste(
    n: int = 2,
    m: int = 4,
    interval: int = 40,
    decay: float = 6e-5,
    mvue: bool = True,
    dense_tail: float = 1 / 6,
    group_order: str = "channel",
) -> Strategy:
    """Y = (M∘W)·X, dX = (M∘W)ᵀ·dY, dW = MVUE(dY)·Xᵀ + λ(1 − M)∘W; dense in the end.

    Args:
        interval: optimizer steps between two searches of M.
        mvue: whether dY is pruned to n:m in grad_weight.
        dense_tail: share of the training that ends it with dense weights; 0: they end n:m, and
            `fst.attach` is not needed.
    """
    mask = Transposable(n=n, m=m, interval=interval, group_order=group_order)
    return Strategy(
        "tsrste",
        output=mask,
        grad_input=mask,
        grad_weight=unbiased(n, m, approximate=(n, m) == (2, 4)) if mvue else None,
        decay=decay,
        schedule=Phases(dense_tail=dense_tail) if dense_tail else None,
    )
