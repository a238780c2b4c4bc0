"""The systems of FST's Table 3 and of SDGP: the papers' speeds, why measured ones are others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

BATCHES = {"resnet18": 32, "resnet50": 16}
CONTROL = "dense, by the op"
SHORTCUTS = "*downsample*"


class System(NamedTuple):
    """A row of the table.

    Attributes:
        strategy: as for `fst.get_strategy`, with its masks in force from the first step on.
        paper: network -> the paper's speed.
        why: why the measured speed is another one.
        exclude: layers that stay dense.
        removed: share of each group's channels that is removed first.
    """

    strategy: str
    paper: Mapping[str, str]
    why: str
    exclude: str | None = None
    removed: float = 0.0


def _both(speed: str) -> dict[str, str]:
    return dict.fromkeys(BATCHES, speed)


_NO_KERNEL = "The paper names no speed: no GPU uses zeros in any place."
_SPARSE_CORES = (
    "The paper's cores compute 2:4 at up to twice the dense speed; here a kernel lists the weights "
    "that are not zero, layer by layer, where that is faster."
)
_ESTIMATED = (
    "The paper's is an estimate: the time of dX, divided by M/N, with nothing spent on pruning dY; "
    "here dY is pruned, its zeros are listed, and X's zeros are left out besides."
)
_OF_RATIO = {2: "1.20 (estimated)", 4: "1.33 (estimated)", 8: "–"}  # of ResNet-18 in SDGP's IV-C
SYSTEMS = {
    CONTROL: System("dense", _both("1"), "The control: torch's products, called by the op."),
    "meProp": System(
        "meprop",
        {"resnet18": "–"},
        f"{_NO_KERNEL} Here dY's zeros are left out, and the choice of the top half costs time.",
    ),
    "ReSprop": System(
        "resprop",
        {"resnet18": "–"},
        f"{_NO_KERNEL} Here values of the last step stand where dY changed little, so that no zero "
        "can be left out; no kernel multiplies with the change alone.",
    ),
    "ASFP": System(
        "asfp",
        _both("1.1"),
        "Zeroed filters learn again in the next step, so a step has no zeros of W; the paper's "
        "speed is that of a network without them.",
        SHORTCUTS,
    ),
    "ASP": System(
        "asp",
        _both("–"),
        "The paper names none; ASP starts from a trained network. Its masks are fixed, so its "
        "step leaves out what SR-STE's does, without pruning anew.",
    ),
    "SR-STE": System("srste", _both("1.2"), _SPARSE_CORES),
    "TSM": System(
        "tsm", _both("1.5"), f"{_SPARSE_CORES} The search, every 40 steps, is not in the time."
    ),
    "FST, W and Wᵀ": System("fst_w,literal=True", _both("1.5"), _SPARSE_CORES),
    "FST, W, Wᵀ and Xᵀ": System(
        "fst,literal=True",
        _both("2"),
        f"{_SPARSE_CORES} dW takes the kept half of the positions.",
    ),
    "DPF": System(
        "dpf,ramp=0",
        {"resnet50": "–"},
        f"{_NO_KERNEL} Here zeros of W are left out wherever they are; timed at its final "
        "sparsity, without the choice of masks every 16 steps.",
    ),
    "RigL": System(
        "rigl",
        {"resnet50": "–"},
        f"{_NO_KERNEL} Here zeros of W are left out wherever they are; layers differ in density, "
        "and the exchange every 100 steps is not in the time.",
    ),
    "PruneTrain, as it starts": System(
        "prunetrain",
        {"resnet50": "1.5"},
        "No channel is gone so early, and the penalty costs time; the paper's speed is that of a "
        "whole training.",
    ),
    "PruneTrain, 30 % of the channels gone": System(
        "prunetrain",
        {"resnet50": "1.5"},
        "A smaller dense network; the share is ours, as the paper's grows in training.",
        removed=0.3,
    ),
    "ClickTrain": System(
        "clicktrain,choose=0,enforce=0",
        {"resnet50": "1.6"},
        "Timed with its masks enforced, which is the last part of its training; the paper's "
        "compiler makes code for the patterns, here a list holds the weights that are not zero.",
        SHORTCUTS,
    ),
    "SparseTrain": System(
        "sparsetrain",
        {"resnet50": "1.3"},
        "The same idea, with kernels for AVX-512 on six cores there; batch norm leaves dY without "
        "zeros here.",
    ),
    **{
        f"SDGP {n}:{m}": System(
            f"sdgp,n={n},m={m}", {"resnet18": _OF_RATIO[m // n], "resnet50": "–"}, _ESTIMATED
        )
        for n, m in ((2, 4), (4, 8), (2, 8), (2, 16), (4, 32))
    },
    "sampled": System(
        "sampled", {}, "In no paper: dW from a drawn half of the positions, by a list of them."
    ),
}
