"""The layers and products that zeros.py measures, with their goals, and what it has found."""

from __future__ import annotations

from typing import NamedTuple

from products import AGAIN, BOTH, UNSTRUCTURED, Layer, Row

from fst.backends.timing import geometric_mean

MATRIX = 1024  # rows and columns, whose product shows what the machine can do
NETWORK, STRATEGY = "resnet18", "srste"  # of the step that lists are compared with
Times = dict[str, float]  # program -> milliseconds


class Group(NamedTuple):
    """Layers whose ratios have one geometric mean.

    Attributes:
        rows: of its table.
        rivalry: rows that are measured beside SparseProp.
    """

    title: str
    layers: tuple[Layer, ...]
    rows: tuple[Row, ...]
    rivalry: tuple[Row, ...] = ()

    @property
    def products(self) -> list[str]:
        """In the order of the rows."""
        return list(dict.fromkeys(row.product for row in self.rows))

    @property
    def programs(self) -> set[str]:
        """Names of all that is measured, SparseProp included."""
        rows = (*self.rows, *self.rivalry)
        dense = {row.product for row in rows}
        controls = {f"{product}, {AGAIN}" for product in dense}
        of_goals = [row for row in self.rows if row.goals]
        parts = {part for row in of_goals for part in (row.lists, row.around) if part}
        theirs = {row.theirs for row in self.rivalry}
        return dense | controls | parts | theirs | {str(row) for row in rows}


THREE = Group(
    "3×3 of ResNet-18",
    (
        Layer(64, 64, 56, 3, 1),
        Layer(64, 128, 56, 3, 2),
        Layer(128, 128, 28, 3, 1),
        Layer(128, 256, 28, 3, 2),
        Layer(256, 256, 14, 3, 1),
        Layer(256, 512, 14, 3, 2),
        Layer(512, 512, 7, 3, 1),
    ),
    (
        Row("Y", "W dense", 1),
        Row("Y", "W 2:4", 1 / 2, (1.6, 1.35)),
        Row("Y", "W 1:4", 1 / 4, (2.9, 2.2)),
        Row("Y", "W 1:8", 1 / 8, (4.5, 3.3)),
        Row("dX", "W dense", 1),
        Row("dX", "W 2:4", 1 / 2, (1.6, 1.35)),
        Row("dX", "W 1:4", 1 / 4, (2.9, 2.2)),
        Row("dX", "W 1:8", 1 / 8, (4.5, 3.3)),
        Row("dX", "dY dense", 1),
        Row("dX", "dY 2:4", 1 / 2, (1.35, 1.15)),
        Row("dX", "dY 4:32", 1 / 8, (2.5, 2.0)),
        Row("dW", "X dense", 1),
        Row("dW", "X half", 1 / 2, (2.0, 1.5)),
    ),
    tuple(Row(p, zeros, 1 - share) for p in ("Y", BOTH) for zeros, share in UNSTRUCTURED.items()),
)
ONE = Group(
    "1×1 of ResNet-50's last three stages",
    (
        Layer(512, 128, 28, 1, 1),
        Layer(128, 512, 28, 1, 1),
        Layer(1024, 256, 14, 1, 1),
        Layer(256, 1024, 14, 1, 1),
        Layer(2048, 512, 7, 1, 1),
        Layer(512, 2048, 7, 1, 1),
    ),
    (
        Row("Y", "W dense", 1),
        Row("Y", "W 2:4", 1 / 2, (1.3, 1.15)),
        Row("Y", "W 1:4", 1 / 4, (2.0, 1.7)),
    ),
)


class Parts(NamedTuple):
    """Milliseconds of a row's program, all layers together: in all, and by what takes them."""

    all: float
    lists: float
    around: float

    @property
    def loop(self) -> float:
        """The time that is left for multiply-adds."""
        return self.all - self.lists - self.around


class Found(NamedTuple):
    """Measurements with a number of threads.

    Attributes:
        layers: group -> layer -> times of its programs.
        matrix: milliseconds of a product of two dense matrices.
        step: times of the steps of a network, and of building all of its lists.
    """

    layers: dict[Group, dict[Layer, Times]]
    matrix: float
    step: Times

    def ratio(self, group: Group, product: str, program: str) -> float:
        """Geometric mean of torch's time over the program's; NaN if it was not measured."""
        measured = [times for times in self.layers[group].values() if program in times]
        return geometric_mean(times[product] / times[program] for times in measured)

    def control(self, group: Group, product: str) -> float:
        """Geometric mean of torch's time over that of the same program, run a second time."""
        return self.ratio(group, product, f"{product}, {AGAIN}")

    def total(self, group: Group, program: str) -> float:
        """Milliseconds of all layers together."""
        return sum(times[program] for times in self.layers[group].values())

    def parts(self, group: Group, row: Row) -> Parts:
        """The parts of a row's time."""
        lists = self.total(group, row.lists) if row.lists else 0.0
        return Parts(self.total(group, str(row)), lists, self.total(group, row.around))
