"""The one table of strategies x options x properties that every parametrised test reads.

A new strategy is tested by adding rows to ``SETTINGS``; a new option of one by adding a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest

import fst
from fst.baselines.meprop import TopK
from fst.rules.nm import NM
from fst.rules.strategy import Strategy
from fst.strategies import registry

SHIPPED = [n for n in fst.list_strategies() if registry._RECIPES[n].__module__[:4] == "fst."]
GEMMS = ("output", "grad_input", "grad_weight")


@dataclass(frozen=True)
class Setting:
    """One strategy with one choice of options.

    ``dense``: the GEMMs whose result is bit-equal to the dense convolution's. ``drawn``: the GEMMs
    whose mask the reference cannot compute itself (random rules, the greedy 4:8 transposable mask).
    ``random_phase``: which positions are kept is drawn, by a phase or by the place where a draw
    starts.
    ``custom`` builds a strategy that is not in the registry.
    """

    id: str
    name: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    dense: frozenset[str] = frozenset()
    drawn: frozenset[str] = frozenset()
    random_phase: bool = False
    custom: Callable[[], Strategy] | None = None

    def build(self, **more: Any) -> Strategy:
        if self.custom is not None:
            return self.custom()
        return fst.get_strategy(self.name, **{**self.overrides, **more})

    @property
    def deterministic(self) -> bool:
        return not self.drawn and not self.random_phase

    @property
    def prunes_weight(self) -> bool:
        """Whether the output GEMM runs with S(W)."""
        return "output" not in self.dense


def _row(
    name: str,
    tag: str = "",
    *,
    dense: str = "",
    drawn: str = "",
    random_phase: bool = False,
    custom: Callable[[], Strategy] | None = None,
    **overrides: Any,
) -> Setting:
    return Setting(
        id=f"{name}-{tag}" if tag else name,
        name=name,
        overrides=MappingProxyType(overrides),
        dense=frozenset(dense.split()),
        drawn=frozenset(drawn.split()),
        random_phase=random_phase,
        custom=custom,
    )


def _patterns(name: str, dense: str = "") -> list[Setting]:
    patterns = ((1, 4), (2, 8), (4, 8), (4, 16), (16, 32), (3, 5))
    return [_row(name, f"{n}:{m}", dense=dense, n=n, m=m) for n, m in patterns]


def _alternating(name: str, **fixed: Any) -> list[Setting]:
    """The options of ``Alternating``, for fst and, with ``rule="alternating"``, for wx and gx."""
    return [
        _row(name, "flat", pairing="flat", **fixed),
        _row(name, "phase1", phase=1, **fixed),
        _row(name, "flat-phase1", pairing="flat", phase=1, **fixed),
        _row(name, "phase_random", phase="random", random_phase=True, **fixed),
        _row(name, "block2x1", block=(2, 1), **fixed),
        _row(name, "block2x1-phase1", block=(2, 1), phase=1, **fixed),
        _row(name, "block2x2", block=(2, 2), **fixed),
        _row(name, "norestore", restore=False, **fixed),
        _row(name, "phase1-norestore", phase=1, restore=False, **fixed),
        _row(name, "flat-norestore", pairing="flat", restore=False, **fixed),
        _row(name, "block2x2-norestore", block=(2, 2), restore=False, **fixed),
    ]


def _sampled(name: str, dense: str = "", **fixed: Any) -> list[Setting]:
    """The options of ``Sampled``."""
    return [
        _row(name, "", dense=dense, random_phase=True, **fixed),
        _row(name, "quarter", dense=dense, random_phase=True, keep=0.25, **fixed),
        _row(name, "not_centred", dense=dense, random_phase=True, center=False, **fixed),
        _row(name, "all", dense=f"{dense} grad_weight" * bool(dense), keep=1.0, **fixed),
    ]


_ALL = "output grad_input grad_weight"

SETTINGS: tuple[Setting, ...] = (
    _row("dense", dense=_ALL),
    # SR-STE: weight in output, and the same in grad_input
    _row("srste"),
    *_patterns("srste"),
    _row("srste", "4:4", dense=_ALL, n=4, m=4),
    _row("srste", "im2col", group_order="im2col"),
    _row("srste", "im2col-4:8", group_order="im2col", n=4, m=8),
    _row("srste", "random", drawn="output", rule="random"),
    _row("srste", "dense_backward", dense="grad_input", backward="dense"),
    _row(
        "srste",
        "dense_backward-im2col-2:8",
        dense="grad_input",
        backward="dense",
        group_order="im2col",
        n=2,
        m=8,
    ),
    _row(
        "srste",
        "dense_backward-random",
        dense="grad_input",
        drawn="output",
        backward="dense",
        rule="random",
    ),
    _row("srste", "decay_large", decay=0.5),
    _row("srste", "decay0", dense="grad_weight", decay=0.0),
    _row("srste", "decoupled", dense="grad_weight", decay_mode="decoupled"),
    # FST
    _row("fst"),
    _row("fst", "1:4", n=1, m=4),
    _row("fst", "4:8", n=4, m=8),
    _row("fst", "im2col", group_order="im2col"),
    _row("fst", "literal", literal=True),
    _row("fst", "decoupled", decay_mode="decoupled"),
    _row("fst", "decay_large", decay=0.5),
    *_alternating("fst"),
    _row("fst_w"),
    *_patterns("fst_w"),
    _row("fst_w", "im2col", group_order="im2col"),
    _row("fst_w", "decoupled", dense="grad_weight", decay_mode="decoupled"),
    _row("fst_w", "decay0", dense="grad_weight", decay=0.0),
    # double pruning: grad_input starts from S(W)
    _row("fst_w", "double", grad_input="double"),
    _row("fst_w", "double-1:4-im2col", grad_input="double", n=1, m=4, group_order="im2col"),
    _row("fst_w", "double-3:5", grad_input="double", n=3, m=5),
    _row("fst_w", "double-orders", grad_input="double", permutations=3, interval=2),
    # dY unbiased
    _row("fst_w", "mvue", drawn="grad_weight", grad_weight="mvue,n=1"),
    _row("mvue", dense="output grad_input", drawn="grad_weight"),
    _row("mvue", "approximate", dense="output grad_input", drawn="grad_weight", approximate=True),
    _row("mvue", "3:8", dense="output grad_input", drawn="grad_weight", n=3, m=8),
    _row("mvue", "4:4", dense=_ALL, n=4, m=4),
    # SDGP: grad_output in grad_input
    _row("sdgp", dense="output grad_weight"),
    *_patterns("sdgp", dense="output grad_weight"),
    _row("sdgp", "magnitude", dense="output grad_weight", rule="magnitude"),
    _row("sdgp", "random", dense="output grad_weight", drawn="grad_input", rule="random"),
    _row("sdgp", "mvue", dense="output grad_weight", drawn="grad_input", rule="mvue"),
    _row("sdgp", "channel", dense="output grad_weight", rescale="channel"),
    _row("sdgp", "group", dense="output grad_weight", rescale="group"),
    _row("sdgp", "position", dense="output grad_weight", group_order="position"),
    _row(
        "sdgp",
        "position-group",
        dense="output grad_weight",
        group_order="position",
        rescale="group",
        n=2,
        m=8,
    ),
    _row("sdgp", "both-gradients", dense="output", prune_grad_weight=True),
    _row("sdgp", "all", rule="magnitude", prune_grad_weight=True, prune_weight=True),
    _row("sdgp", "group-4:8", dense="output grad_weight", rescale="group", n=4, m=8),
    _row("sdgp", "sampled", dense="output", random_phase=True, grad_weight="sampled"),
    # backward passes from a part of the positions
    *_sampled("sampled", dense="output grad_input"),
    _row("sampled", "both", dense="output", random_phase=True, grad_input=0.5),
    _row("sampled", "two_lists", dense="output", random_phase=True, keep=0.25, grad_input=0.75),
    *_sampled("fst_sampled"),
    # the four saliency strategies of FST Eq. 4
    _row("wg"),
    _row("wg", "4:8", n=4, m=8),
    _row("wg", "im2col", group_order="im2col"),
    _row("gg"),
    _row("gg", "1:4", n=1, m=4),
    _row("gg", "im2col", group_order="im2col"),
    _row("wx"),
    _row("wx", "4:8", n=4, m=8),
    _row("wx", "random", drawn="grad_weight", rule="random"),
    _row("wx", "im2col", group_order="im2col"),
    _row("wx", "alternating", rule="alternating"),
    _row("wx", "alternating-norestore", rule="alternating", restore=False),
    _row("gx"),
    _row("gx", "2:8", n=2, m=8),
    _row("gx", "random", drawn="grad_weight", rule="random"),
    _row("gx", "im2col", group_order="im2col"),
    _row("gx", "alternating", rule="alternating"),
    _row("gx", "alternating-flat-phase1", rule="alternating", pairing="flat", phase=1),
    _row("gx", "alternating-block2x2", rule="alternating", block=(2, 2)),
    _row("gx", "decoupled", decay_mode="decoupled"),
    # TSM
    _row("tsm", dense="grad_weight"),
    _row("tsm", "im2col", dense="grad_weight", group_order="im2col"),
    _row("tsm", "interval1", dense="grad_weight", interval=1),
    _row("tsm", "4:8", dense="grad_weight", drawn="output", n=4, m=8),
    # the methods since 2021
    _row("sste", drawn="grad_weight"),
    _row("sste", "1:4-im2col", dense="grad_weight", n=1, m=4, group_order="im2col", mvue=False),
    _row("sste", "3:5", drawn="grad_weight", n=3, m=5, dense_tail=0.25),
    _row("tsrste", drawn="grad_weight"),
    _row("tsrste", "no_tail", interval=1, mvue=False, dense_tail=0.0, decay=0.5),
    _row("acdc", dense="grad_weight"),
    _row("acdc", "1:4-im2col", dense="grad_weight", n=1, m=4, group_order="im2col"),
    _row("sdgf", dense="grad_weight"),
    _row("sdgf", "1:4-geometric", dense="grad_weight", n=1, m=4, structure="geometric"),
    _row("sdgf", "1:8-im2col", dense="grad_weight", n=1, m=8, group_order="im2col"),
    _row("mdgf", dense="grad_weight"),
    _row("mdgf", "1:8-im2col", dense="grad_weight", n=1, m=8, group_order="im2col"),
    _row("mdgf", "exponential", dense="grad_weight", n=1, m=4, decline="exponential"),
    _row("maxq"),
    _row("maxq", "1:4-im2col", n=1, m=4, group_order="im2col", ramp=0.5, decline="cubic"),
    # grad_output as a whole: the first step of resprop is dense
    _row("meprop", dense="output"),
    _row("meprop", "tenth", dense="output", density=0.1),
    _row("resprop", dense=_ALL),
    _row("resprop", "warmup", dense=_ALL, density=0.2, warmup=3),
    # dense, and zeros are counted
    _row("sparsetrain", dense=_ALL),
    # one-shot mask, kept weights held at zero
    _row("asp", dense="grad_weight"),
    _row("asp", "4:8-im2col", dense="grad_weight", n=4, m=8, group_order="im2col"),
    # unstructured masks of the weight; in layers they follow a schedule
    _row("dpf", dense="grad_weight"),
    _row("dpf", "uniform", dense="grad_weight", sparsity=0.9, allocation="uniform", ramp=0.0),
    _row("rigl", dense="grad_weight"),
    _row("rigl", "uniform", dense="grad_weight", sparsity=0.8, allocation="uniform", interval=2),
    _row("rigl", "2:4", dense="grad_weight", n=2, m=4, interval=2),
    _row("rigl", "1:4-im2col", dense="grad_weight", n=1, m=4, group_order="im2col", interval=1),
    # Adam's second moment is held
    _row("step", dense="grad_weight"),
    _row("step", "1:4-im2col", dense="grad_weight", n=1, m=4, group_order="im2col"),
    _row("step", "geometric", dense="grad_weight", mean="geometric", earliest=0.0),
    # kernel patterns
    _row("clicktrain", dense="grad_weight"),
    _row("clicktrain", "8", dense="grad_weight", patterns=8, connectivity=0.6),
    _row("clicktrain", "12", dense="grad_weight", patterns=12, connectivity=0.1, choose=0.0),
    # filters, zeroed between epochs
    _row("asfp", dense=_ALL),
    _row("asfp", "half", dense=_ALL, goal=0.5),
    # dense, and channels are removed
    _row("prunetrain", dense=_ALL),
    _row("prunetrain", "often", dense=_ALL, interval=1, ratio=0.1),
    # not in the registry: every operand and rule that a user can combine
    _row(
        "custom",
        "rescaled_both",
        dense="output",
        custom=lambda: Strategy(
            "custom-rescaled_both",
            grad_input=NM("grad_output", 2, 4, rule="magnitude_rescaled", rescale="channel"),
            grad_weight=NM("grad_output", 2, 4, rule="magnitude_rescaled", rescale="group"),
        ),
    ),
    _row(
        "custom",
        "rescaled_sample",
        dense="output grad_input",
        custom=lambda: Strategy(
            "custom-rescaled_sample",
            grad_weight=NM("grad_output", 1, 4, rule="magnitude_rescaled"),
        ),
    ),
    _row(
        "custom",
        "top_k_input",
        dense="output grad_weight",
        custom=lambda: Strategy("custom-top_k_input", grad_input=TopK(density=0.3)),
    ),
    _row(
        "custom",
        "top_k_weight",
        dense="output grad_input",
        custom=lambda: Strategy("custom-top_k_weight", grad_weight=TopK(density=0.3)),
    ),
    _row(
        "custom",
        "random_input",
        dense="output grad_input",
        drawn="grad_weight",
        custom=lambda: Strategy(
            "custom-random_input", grad_weight=NM("input", 2, 4, rule="random")
        ),
    ),
    _row(
        "custom",
        "random_grads",
        dense="output",
        drawn="grad_input grad_weight",
        custom=lambda: Strategy(
            "custom-random_grads",
            grad_input=NM("grad_output", 2, 5, rule="random"),
            grad_weight=NM("grad_output", 1, 4, rule="random"),
        ),
    ),
)

DETERMINISTIC = tuple(row for row in SETTINGS if row.deterministic)
DEFAULTS = tuple(
    row for row in SETTINGS if not row.overrides and row.custom is None
)  # one row per registered strategy


def _choices(row: Setting) -> set[tuple[object, ...]]:
    """The operands that the row prunes, and its options but mere amounts.

    What matters of a pattern is whether it is 2:4, which has code of its own, and
    whether they prune at all.
    """

    def named(options: Mapping[str, object]) -> tuple[object, ...]:
        return tuple(
            (name, value)
            for name, value in options.items()
            if isinstance(value, bool | str | tuple) or name == "phase"
        )

    strategy = row.build()
    found = {("decay", strategy.decay > 0, strategy.decay_mode), *named(row.overrides)}
    for part in (*GEMMS, "schedule"):
        rule = getattr(strategy, part)
        options = {} if rule is None else vars(rule)
        n, m = options.get("n"), options.get("m")
        found.add((part, type(rule), named(options), (n, m) == (2, 4), n == m))
    return found


def _kinds() -> Iterator[Setting]:
    known = set().union(*map(_choices, DEFAULTS))
    for row in SETTINGS:
        choices = _choices(row)
        if row in DEFAULTS or row.custom or not choices <= known:
            known |= choices
            yield row


# The default and the custom rows, and those with a rule or an option that no earlier row has.
KINDS = tuple(_kinds())


def _case(*values: Any, always: bool) -> object:
    id = "-".join(str(getattr(value, "id", value)) for value in values)
    return pytest.param(*values, id=id, marks=() if always else pytest.mark.exhaustive)


def of_each_kind(rows: Sequence[Setting]) -> list[object]:
    """Cases of a test in which amounts cannot matter; rows not in ``KINDS`` are `exhaustive`."""
    return [_case(row, always=row in KINDS) for row in rows]


def quick_first(rows: Sequence[Setting], quick: Sequence[str]) -> list[object]:
    """Cases of a slow test: the rows ``quick`` run in `make test`, every fourth of the others in
    `make test-system`; the rest is `exhaustive`.
    """
    others = [row.id for row in rows if row.id not in quick]
    marks = {id: pytest.mark.exhaustive for id in others}
    marks |= {id: pytest.mark.system for id in others[::4]}
    return [pytest.param(row, id=row.id, marks=marks.get(row.id, ())) for row in rows]


def rows_and_shapes(
    rows: Sequence[Setting],
    shapes: Sequence[object],
    hard: Sequence[object],
    amounts: object = None,
) -> list[object]:
    """(row, shape) for all rows and shapes, as cases of a test.

    ``DEFAULTS`` run on all shapes, ``KINDS`` on the shapes ``hard``, all rows on the shape
    ``amounts``. The other pairs are marked `exhaustive`.
    """
    return [
        _case(
            *(row, shape),
            always=row in DEFAULTS or row in KINDS and shape in hard or shape is amounts,
        )
        for row in rows
        for shape in shapes
    ]


def setting(id: str) -> Setting:
    """The row of that id."""
    (row,) = (row for row in SETTINGS if row.id == id)
    return row
