"""Weight gradients from Haar bands of the output positions, of which some are left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fst.basics.text import suggest
from fst.basics.values import check_integer, one_of
from fst.rules.rule import Lattice, Rule, Signs, draw_of

SIGNS = {"L": (1, 1), "H": (1, -1)}


@dataclass(frozen=True)
class Bands(Rule):
    """Keep some of the products of sums and differences over blocks of positions in grad_weight.

    For a pair of neighbouring positions with columns a, b of X and grad_outputs u, v the gradient
    u aᵀ + v bᵀ is L + H, with L = (u + v)(a + b)ᵀ/2 and H = (u − v)(a − b)ᵀ/2; over 2x2 blocks it
    is LL + LH + HL + HH, rows first. Each costs one position of the block. What is left out is
    missing from the mean too; FST's Eq. 10 is (u + v)aᵀ, L with an alias of the differences.

    Attributes:
        block: (height, width) of a block: (2, 2), or (1, 2) and (2, 1) for pairs.
        keep: the bands of all samples.
        sample: bands of which each sample has one, in turn over the batch.
        unbiased: multiply the sampled bands by their number, so that they are whole in the mean.
        min_size: output maps of fewer than min_size² positions are left dense, and so are those
            narrower than a block: tokens in a row need block=(1, 2).
        phase: which of ``sample`` the first samples have: "random" draws at each step.
    """

    operand: str = "input"
    block: tuple[int, int] = (2, 2)
    keep: tuple[str, ...] = ("LL",)
    sample: tuple[str, ...] = ("LH", "HL")
    unbiased: bool = False
    min_size: int = 0
    phase: int | str = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.operand != "input":
            raise ValueError(f"operand={self.operand!r}: 'bands' prunes operand='input'.")
        for name in ("block", "keep", "sample"):  # what YAML and JSON make of tuples
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        one_of("block", self.block, ((2, 2), (1, 2), (2, 1)))
        known = ("LL", "LH", "HL", "HH") if self.block == (2, 2) else ("L", "H")
        for name in ("keep", "sample"):
            bands = getattr(self, name)
            if not isinstance(bands, tuple):
                raise ValueError(f"{name}={bands!r} must be a list of bands.")
            for band in bands:
                if band not in known:
                    raise ValueError(f"{name}={band!r} is no band.{suggest(band, known)}")
        if not self.keep + self.sample or len({*self.keep, *self.sample}) < self._listed:
            raise ValueError(
                f"keep={self.keep}, sample={self.sample} must be at least one band, each once."
            )
        one_of("unbiased", self.unbiased, (True, False))
        check_integer("min_size", self.min_size, 0)
        one_of("phase", self.phase, (*range(self.draws), "random"))

    @property
    def _listed(self) -> int:
        return len(self.keep) + len(self.sample)

    @property
    def draws(self) -> int:
        return max(1, len(self.sample))

    def leaves_dense(self, height: int, width: int) -> bool:
        too_narrow = height < self.block[0] or width < self.block[1]
        return too_narrow or height * width < self.min_size**2

    def kept_positions(self, height: int, width: int, phase: int) -> tuple[Lattice, ...]:
        blocks = Lattice(0, self.block[0], 0, self.block[1])
        parts = len(self.sample)
        sampled = (blocks._replace(part=part, parts=parts) for part in range(parts))
        return (*(blocks for _ in self.keep), *sampled)

    def _bands(self, phase: int) -> list[str]:
        """The band of each lattice."""
        sampled = (self.sample[(i + phase) % len(self.sample)] for i in range(len(self.sample)))
        return [*self.keep, *sampled]

    def input_signs(self, phase: int) -> tuple[Signs, ...]:
        return tuple(self._signs(band) for band in self._bands(phase))

    def _signs(self, band: str) -> Signs:
        if self.block == (2, 2):
            return tuple(tuple(r * c for c in SIGNS[band[1]]) for r in SIGNS[band[0]])
        signs = SIGNS[band]
        return (signs,) if self.block == (1, 2) else tuple((sign,) for sign in signs)

    def fold(self, grad_output: Tensor, kept: tuple[Lattice, ...], phase: int) -> list[Tensor]:
        """grad_output filtered as each band: zeros stand beyond an odd edge."""
        folded = []
        for lattice, signs in zip(kept, self.input_signs(phase), strict=True):
            part = lattice.samples(grad_output)
            boost = lattice.parts if self.unbiased else 1
            folded.append(_band(part, self.block, signs, boost / math.prod(self.block)))
        return folded

    def draw_phase(self, generator: torch.Generator | None, seed: int | None = None) -> int:
        return draw_of(self.phase, self.draws, generator, seed)

    @property
    def is_random(self) -> bool:
        return self.phase == "random" and self.draws > 1

    @property
    def density(self) -> float:
        return (len(self.keep) + bool(self.sample)) / math.prod(self.block)

    def kept(
        self, gemm: str, weight: Sequence[int], groups: int, height: int, width: int
    ) -> tuple[float, float]:
        if self.leaves_dense(height, width):
            return 1, 1
        lattices = self.kept_positions(height, width, 0)
        counts = (math.prod(lattice.size(height, width)) / lattice.parts for lattice in lattices)
        return sum(counts), height * width

    @property
    def acceleration(self) -> str:
        share = f"{len(self.keep) + bool(self.sample)}/{math.prod(self.block)}"
        return f"strided weight gradients of filtered images, {share} of the multiply-adds"

    def __str__(self) -> str:
        size = "x".join(map(str, self.block))
        least = f", dense below {self.min_size}x{self.min_size}" if self.min_size else ""
        parts = [" ".join(self.keep)] if self.keep else []
        if self.sample:
            parts.append(f"one of {' '.join(self.sample)}{' boosted' if self.unbiased else ''}")
        phase = f", phase {self.phase}" if self.sample else ""
        return f"{self.operand} bands of {size} blocks, {' + '.join(parts)}{phase}{least}"


def _band(maps: Tensor, block: tuple[int, int], signs: Signs, factor: float) -> Tensor:
    """Σ ±maps over blocks, times ``factor``."""
    if all(sign == 1 for row in signs for sign in row):
        total = F.avg_pool2d(maps, block, ceil_mode=True, divisor_override=1)
        return total.mul_(factor)
    rows, columns = (-(-size // b) for size, b in zip(maps.shape[2:], block, strict=True))
    total = torch.zeros_like(maps[:, :, :rows, :columns])
    for i, line in enumerate(signs):
        for j, sign in enumerate(line):
            part = maps[:, :, i :: block[0], j :: block[1]]
            total[:, :, : part.shape[2], : part.shape[3]].add_(part, alpha=sign * factor)
    return total
