"""FST's fixed mask of output positions in grad_weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fst.basics.errors import UsageError
from fst.basics.values import one_of
from fst.rules.rule import Lattice, Rule


@dataclass(frozen=True)
class Alternating(Rule):
    """Keep every other output position of the input in grad_weight (FST, Eq. 7 and 10).

    Attributes:
        pairing: "row" pairs neighbours within a row of the output map, "flat" along the flattened
            map across row ends (the paper literally).
        phase: which of a pair is kept: 0 the first, 1 the second, "random" one of both per step.
        block: (height, width) of a block of positions; one of them is kept: (1, 2) as published,
            (2, 1) pairs neighbours within a column, which needs no transposed images and so is
            faster on a CPU, (2, 2) for a quarter of the work (needs phase=0). Only (1, 2) can
            be paired "flat".
        restore: information restoration: grad_output of the dropped positions is added to the
            kept one of the same pair or block.
    """

    operand: str = "input"
    pairing: str = "row"
    phase: int | str = 0
    block: tuple[int, int] = (1, 2)
    restore: bool = True
    operands = ("input",)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("pairing", self.pairing, ("row", "flat"))
        one_of("phase", self.phase, (0, 1, "random"))
        if isinstance(self.block, list):  # YAML and JSON know no tuples
            object.__setattr__(self, "block", tuple(self.block))
        one_of("block", self.block, ((1, 2), (2, 1), (2, 2)))
        one_of("restore", self.restore, (True, False))
        if self.block != (1, 2) and self.pairing != "row":
            raise ValueError(f"block={self.block} needs pairing='row', not {self.pairing!r}.")
        if self.block == (2, 2) and self.phase != 0:
            raise ValueError(f"block=(2, 2) needs phase=0, not {self.phase!r}.")

    def kept_positions(self, height: int, width: int, phase: int) -> tuple[Lattice, ...]:
        if self.block == (2, 2):
            return (Lattice(0, 2, 0, 2),)
        if self.block == (2, 1):
            return (Lattice(phase if height > 1 else 0, 2, 0, 1),)
        if self._in_rows(width):
            return (Lattice(0, 1, phase if width > 1 else 0, 2),)
        # Pairs along the flattened map of odd width: the phase flips from row to row.
        if height * width == 1:
            phase = 0
        found = (Lattice(0, 2, phase, 2), Lattice(1, 2, 1 - phase, 2))
        return tuple(p for p in found if p.row < height and p.column < width)

    def summed(self, grad_output: Tensor, kept: tuple[Lattice, ...], phase: int) -> list[Tensor]:
        """grad_output at the kept positions, with that of the dropped ones added (``restore``)."""
        if not self.restore:
            return super().summed(grad_output, kept, phase)
        height, width = grad_output.shape[2:]
        if self._in_rows(width):
            return [_sum_blocks(grad_output, self.block, max(kept[0].row, kept[0].column))]
        flat = grad_output.flatten(2)
        restored = flat.clone(memory_format=torch.preserve_format)
        if phase == 0:
            restored[:, :, :-1] += flat[:, :, 1:]
        else:
            restored[:, :, 1:] += flat[:, :, :-1]
            if (height * width) % 2 and height * width > 1:
                restored[:, :, -2] += flat[:, :, -1]
        return super().summed(restored.unflatten(2, (height, width)), kept, phase)

    def _in_rows(self, width: int) -> bool:
        """True if no pair crosses the end of a row."""
        return self.pairing == "row" or width % 2 == 0

    def draw_phase(self, generator: torch.Generator | None, seed: int | None = None) -> int:
        if self.phase != "random":
            return int(self.phase)
        if torch.compiler.is_compiling():
            raise UsageError(
                "phase='random' chooses between graphs at each step, which torch.compile "
                "cannot trace; use phase=0 or phase=1."
            )
        if seed is not None:
            return seed % 2
        on = "cpu" if generator is None else generator.device
        return int(torch.randint(2, (), generator=generator, device=on))

    @property
    def is_random(self) -> bool:
        return self.phase == "random"

    @property
    def sums_positions(self) -> bool:
        return self.restore

    @property
    def density(self) -> float:
        return 1 / (self.block[0] * self.block[1])

    @property
    def acceleration(self) -> str:
        share = f"1/{self.block[0] * self.block[1]}"
        return f"weight gradient with {share} of the multiply-adds"

    def __str__(self) -> str:
        others = {(2, 1): "column pairs", (2, 2): "2x2 blocks"}
        blocks = others.get(self.block, f"{self.pairing} pairs")
        restored = "restored" if self.restore else "not restored"
        return f"{self.operand} alternating, {blocks}, phase {self.phase}, {restored}"


def _sum_blocks(grad_output: Tensor, block: tuple[int, int], phase: int) -> Tensor:
    """Sum over blocks; the last row or column of an odd size stands alone (phase 0) or joins the
    last block (phase 1).
    """
    axis = 2 if block == (2, 1) else 3
    size = grad_output.shape[axis]
    if phase == 0 or size % 2 == 0:
        return _sum_pool(grad_output, block)
    sums = _sum_pool(grad_output.narrow(axis, 0, size - 1), block)
    sums.select(axis, -1).add_(grad_output.select(axis, -1))
    return sums


def _sum_pool(tensor: Tensor, block: tuple[int, int]) -> Tensor:
    return F.avg_pool2d(tensor, block, ceil_mode=True, divisor_override=1)
