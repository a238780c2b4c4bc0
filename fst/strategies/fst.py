"""FST: 2:4 weights in output and in grad_input; `fst` prunes grad_weight too, `fst_w` does not.

Paper: Xu et al., "Towards Fully Sparse Training: Information Restoration with Spatial Similarity",
AAAI 2022: Eq. 5 (output), S(Wᵀ) pruned separately (grad_input), Eq. 7 and 10 (grad_weight), Eq. 6
(SR-STE decay). All convolutions are pruned, the first one too; fully connected layers stay dense.

The paper groups the weight of output along im2col (input channel, kh, kw) and pairs positions of
the flattened output map: ``literal=True``. The default groups along input channels, as sparse
inference kernels read weights in NHWC memory, and pairs positions within rows, which differs for
odd widths alone and remains one strided convolution there. The masks of weights then differ at a
quarter of all positions, and a first layer of three channels keeps 2 of 3 weights, not a half.
"""

from dataclasses import replace

from fst.basics.values import check_integer, one_of
from fst.rules.alternating import Alternating
from fst.rules.nm import NM, TwicePruned
from fst.rules.strategy import Strategy
from fst.strategies.double import Reordered
from fst.strategies.registry import grad_weight_of, register_strategy


def _papers(literal: bool, name: str, given: str | None, paper: str, default: str) -> str:
    """The option ``name``: the paper's value if ``literal``, else what is given, or the default."""
    if literal and given not in (None, paper):
        raise ValueError(f"{name}={given!r} contradicts literal=True, which is {name}={paper!r}.")
    if literal:
        return paper
    return default if given is None else given


@register_strategy("fst_w")
def fst_w(
    n: int = 2,
    m: int = 4,
    group_order: str | None = None,
    decay: float = 2e-4,
    decay_mode: str = "gradient",
    grad_weight: str | None = None,
    literal: bool = False,
    grad_input: str = "separate",
    permutations: int = 0,
    interval: int | None = None,
) -> Strategy:
    """Y = S(W)·X, dX = S(Wᵀ)·dY, dW dense + λ(W − S(W)) (the "50%×2" rows of Table 3).

    ``group_order`` is "channel", or with ``literal`` the paper's "im2col".

    ``grad_weight`` names a strategy that prunes dW as well: "sampled,keep=0.25", "mvue", "fst".

    ``grad_input`` is "separate", S(Wᵀ) of the dense W, or "double": S(W) pruned once more, so that
    dX sees no weight that Y does not (`fst.strategies.double`). With "double", ``permutations`` is
    the number of random orders of the output channels of which the best is used, for ``interval``
    steps (100), as in Bi-Mask; 0: as they are.

    Layers add the decay where the optimizer steps; `torch.autograd.grad` returns dW without it.
    """
    group_order = _papers(literal, "group_order", group_order, "im2col", "channel")
    one_of("grad_input", grad_input, ("separate", "double"))
    check_integer("permutations", permutations, 0)
    if permutations and grad_input != "double":
        raise ValueError(f"permutations={permutations} needs grad_input='double'.")
    if interval is not None and not permutations:
        raise ValueError(f"interval={interval!r} needs permutations > 0.")
    interval = 100 if interval is None else interval
    return Strategy(
        "fst_w",
        output=NM("weight", n, m, group_order=group_order),
        grad_input=TwicePruned("weight", n, m) if grad_input == "double" else NM("weight", n, m),
        schedule=Reordered(permutations, interval) if permutations else None,
        grad_weight=grad_weight_of(grad_weight),
        decay=decay,
        decay_mode=decay_mode,
    )


@register_strategy("fst")
def fst(
    n: int = 2,
    m: int = 4,
    group_order: str | None = None,
    pairing: str | None = None,
    phase: int | str = 0,
    block: tuple[int, int] = (1, 2),
    restore: bool = True,
    decay: float = 2e-4,
    decay_mode: str = "gradient",
    literal: bool = False,
) -> Strategy:
    """`fst_w` with dW = (dY + dY·T)·S(Xᵀ) + λ(W − S(W)) (the "50%×3" rows of Table 3).

    ``group_order`` and ``pairing`` are "channel" and "row", or with ``literal`` the paper's
    "im2col" and "flat".

    Layers add the decay where the optimizer steps; `torch.autograd.grad` returns dW without it.
    """
    pairing = _papers(literal, "pairing", pairing, "flat", "row")
    grad_weight = Alternating(pairing=pairing, phase=phase, block=block, restore=restore)
    base = fst_w(n, m, group_order, decay, decay_mode, literal=literal)
    return replace(base, name="fst", grad_weight=grad_weight)
