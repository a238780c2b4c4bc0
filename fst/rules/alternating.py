"""FST's fixed mask of output positions in grad_weight."""

from __future__ import annotations

from dataclasses import dataclass

from fst.rules.rule import Rule, one_of


@dataclass(frozen=True)
class Alternating(Rule):
    """Keep every other output position of the input in grad_weight (FST, Eq. 7 and 10).

    Attributes:
        pairing: "row" pairs neighbours within a row of the output map, "flat" along the flattened
            map across row ends (the paper literally).
        phase: which of a pair is kept: 0 the first, 1 the second, "random" one of both per step.
        block: (height, width) of a block of positions of which one is kept: (1, 2), or (2, 2)
            for a quarter of the work (needs pairing="row", phase=0).
        restore: information restoration: grad_output of the dropped positions is added to the
            kept one of the same pair or block.
    """

    operand: str = "input"
    pairing: str = "row"
    phase: int | str = 0
    block: tuple[int, int] = (1, 2)
    restore: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.operand != "input":
            raise ValueError(f"operand={self.operand!r}: 'alternating' prunes operand='input'.")
        one_of("pairing", self.pairing, ("row", "flat"))
        one_of("phase", self.phase, (0, 1, "random"))
        if isinstance(self.block, list):  # what YAML and JSON make of a tuple
            object.__setattr__(self, "block", tuple(self.block))
        one_of("block", self.block, ((1, 2), (2, 2)))
        one_of("restore", self.restore, (True, False))
        if self.block == (2, 2) and (self.pairing, self.phase) != ("row", 0):
            raise ValueError(
                f"block=(2, 2) needs pairing='row' and phase=0, "
                f"not pairing={self.pairing!r}, phase={self.phase!r}."
            )

    @property
    def is_random(self) -> bool:
        return self.phase == "random"

    @property
    def density(self) -> float:
        return 1 / (self.block[0] * self.block[1])

    def __str__(self) -> str:
        blocks = f"{self.pairing} pairs" if self.block == (1, 2) else "2x2 blocks"
        restored = "restored" if self.restore else "not restored"
        return f"{self.operand} alternating, {blocks}, phase {self.phase}, {restored}"
