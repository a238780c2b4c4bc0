"""One object for each form of call: the geometry, and a function for each pruning and product."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst.backends import registry
from fst.backends.choice import CAPTURED, DENSE, choose
from fst.backends.record import Decision, Record
from fst.basics.errors import UsageError
from fst.ops.arguments import UNTRACEABLE
from fst.ops.geometry import Geometry, convolve_by_torch
from fst.ops.operands import (
    DrawnGradInput,
    DrawnGradWeight,
    FixedGradWeight,
    GradInput,
    GradWeight,
    Output,
    PrunedGradWeight,
    PruneWeight,
    Zeros,
)
from fst.ops.positions.lists import Lists
from fst.ops.prune import PrunedWeight, is_of_weight, maps_to_prune
from fst.ops.zeros import counted, share_by_rule, share_of_zeros
from fst.rules.rule import Lattice, Rule
from fst.rules.sampled import samples
from fst.rules.strategy import GEMMS, Strategy

TOO_SMALL = "the output map is too small for the rule"
Run = Callable[[Any], Any]
Needed = tuple[bool, bool, bool]
Found = tuple[Tensor | None, Tensor | None, Tensor | None]


class Draws(NamedTuple):
    """The values of one call that random rules and rules with a memory take.

    Attributes:
        generator: source of randomness of random rules on grad_output and input.
        phase: which fixed positions a rule of the input keeps.
        start: of a draw of positions, (), float64; None where none is drawn.
        memory: a rule of grad_output keeps here what its next backward pass needs.
    """

    generator: torch.Generator | None = None
    phase: int = 0
    start: Tensor | None = None
    memory: dict[str, Any] | None = None


NOTHING_DRAWN = Draws()


def draws_of(
    strategy: Strategy,
    input: Tensor,
    generator: torch.Generator | None = None,
    seed: int | None = None,
    memory: dict[str, Any] | None = None,
) -> Draws:
    """The draws of a call.

    Args:
        generator: source of randomness; torch's default generator if None.
        seed: decides which positions are kept, in the place of ``generator``.
    """
    phase, start, rule = 0, None, strategy.grad_weight
    if torch.is_grad_enabled():
        phase = 0 if rule is None else rule.draw_phase(generator, seed)
        sampling = strategy.sampling
        start = None if sampling is None else sampling.draw_start(generator, seed, input.device)
    return Draws(generator, phase, start, memory)


class CallPlan:
    """The computation of calls of one form; it keeps no value of any tensor.

    Backends are chosen in the first call, and in its backward pass. Zeros that are counted later
    change no plan: the layer makes a new one after the step.

    Attributes:
        strategy: what is pruned.
        dtype: of the products.
        record: by whose times and shares of zeros backends are chosen.
        decisions: operation -> which backend was chosen, and why.
        dense_since: the step in whose backward pass all products turned out to be dense; infinite
            before.
    """

    def __init__(
        self,
        strategy: Strategy,
        geometry: Geometry,
        dtype: torch.dtype,
        record: Record,
        *,
        trains: bool,
    ) -> None:
        """Plan calls of a strategy and a geometry.

        Args:
            trains: False for calls that are no part of a training step.
        """
        self.strategy, self.geometry, self.dtype = strategy, geometry, dtype
        self.record, self.trains = record, trains
        self.decisions: dict[str, Decision] = {}
        self.dense_since: float = math.inf
        self._runs: dict[Any, tuple[Run, bool]] = {}
        self._lattices: dict[Any, tuple[Lattice, ...] | None] = {}
        self._planned: dict[Any, Callable[..., Any]] = {}
        self._by_torch: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
        self._has_chosen = False
        of_input, of_weight = strategy.grad_input, strategy.grad_weight
        self._prunes_a_weight = strategy.output is not None or is_of_weight(of_input)
        self._draws_input = of_input if samples(of_input) else None
        self._draws_weight = of_weight if samples(of_weight) else None
        self._prunes_input = _of_grad_output(of_input)
        self._prunes_weight = _of_grad_output(of_weight)
        rules = {"grad_input": self._prunes_input, "grad_weight": self._prunes_weight}
        self._maps = {
            gemm: None if rule is None else maps_to_prune(rule, gemm, geometry.groups)
            for gemm, rule in rules.items()
        }
        self._prunes_once = (
            of_weight is not None and of_weight.is_whole and self._prunes_weight == of_input
        )

    # ------------------------------------------------------------------------------- forward

    def prune(
        self, weight: Tensor, generator: torch.Generator | None = None, mask: Tensor | None = None
    ) -> PrunedWeight:
        """S(W) and S(Wᵀ) of a weight (Cout, Cin/groups, kh, kw) that autograd does not follow.

        ``mask`` replaces that of the output GEMM, where one is kept for several steps.
        """
        if not self._prunes_a_weight:
            dense = weight if weight.dtype == self.dtype else weight.to(self.dtype)
            return PrunedWeight(dense, dense, None)
        groups = self.geometry.groups
        operands = PruneWeight(weight, self.strategy, groups, self.dtype, generator, mask)
        where = "prune_weight", mask is None
        found = self._runs.get(where)
        if found is None:
            if torch.jit.is_tracing():
                raise UsageError(UNTRACEABLE)
            found = self._choose(where, operands)
        pruned: PrunedWeight = found[0](operands)
        return pruned

    def output(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Y = W·X + bias."""
        operands = Output(weight, self.geometry, input, bias)
        found = self._runs.get("output")
        if found is None:
            zeros = Zeros(self._share("weight", weight), self._share("input", input))
            operands.zeros = zeros
            found = self._choose("output", operands)
        product: Tensor = found[0](operands)
        return product

    def dense_output(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`output` by operators that PyTorch differentiates, where all products are dense."""
        if self._by_torch is None:
            self._by_torch = convolve_by_torch(input, weight, self.geometry)
        return self._by_torch(input, weight, bias)

    def count(self, operand: str, tensor: Tensor) -> None:
        """Count the zeros of an operand; a share that has moved changes plans after the step."""
        if self.strategy.skips_zeros:
            self.record.count(operand, counted(tensor))

    def _share(self, operand: str, tensor: Tensor) -> float:
        if not self.strategy.skips_zeros:
            return 0.0
        if torch.compiler.is_compiling():
            return share_by_rule(self.strategy) if operand == "weight" else 0.0
        return share_of_zeros(operand, tensor, self.record, trains=self.trains)

    def _choose(self, where: Any, operands: Any) -> tuple[Run, bool]:
        if torch.compiler.is_compiling():  # traced code keeps no plan
            run, decision = choose(operands)
            return run, decision.backend == DENSE
        self._has_chosen = True
        run, decision = choose(operands, self.record)
        found = run, decision.backend == DENSE
        if decision.reason != CAPTURED:  # it is measured as soon as it can be
            self._runs[where] = found
        self.decisions[decision.operation] = decision
        return found

    # ------------------------------------------------------------------------------ backward

    def gradients(
        self,
        grad_output: Tensor,
        input: Tensor | None,
        weight: Tensor,
        input_shape: torch.Size,
        needed: Needed,
        draws: Draws,
        *,
        own_transposed: bool,
        counts: bool,
        step: int,
    ) -> Found:
        """dX, dW and db, as far as they are needed.

        Args:
            grad_output: (N, Cout, P, Q).
            input: (N, Cin, H, W); None where dW is not needed.
            weight: (Cout, Cin/groups, kh, kw), as grad_input multiplies with it.
            own_transposed: whether that is another tensor than output has multiplied with.
            counts: whether zeros are counted.
            step: of the layer.
        """
        need_input, need_weight, need_bias = needed
        geometry = self.geometry
        form: Any = grad_output.stride(), needed, draws.phase, registry.demands
        grad_input = grad_weight = grad_bias = None

        # The operands: dY as each of the two GEMMs multiplies with it, and lists of positions.
        dy_input = dy_weight = grad_output
        if need_input and self._prunes_input is not None:
            dy_input = self._pruned(grad_output, self._prunes_input, "grad_input", form, draws)
        if need_input and self._prunes_once:
            dy_weight = dy_input
        elif need_weight and self._prunes_weight is not None:
            dy_weight = self._pruned(grad_output, self._prunes_weight, "grad_weight", form, draws)
        names = "grad_output", "grad_output" if dy_weight is dy_input else "dY of grad_weight"
        if counts:
            if need_input or dy_weight is dy_input:
                self.count(names[0], dy_input)
            if dy_weight is not dy_input:
                self.count(names[1], dy_weight)
        lists = None
        if draws.start is not None and grad_output.numel():
            rule, size, kernel = self._draws_weight, input_shape[2:], weight.shape[2:]
            lists = Lists(
                *(grad_output, input, (size[0], size[1]), (kernel[0], kernel[1]), geometry),
                draws.start,
                with_sums=rule is not None and rule.center,
                planned={} if torch.compiler.is_compiling() else self._planned,
            )

        # The GEMMs: where dX draws nothing, its backend is chosen first, as the library computes
        # both gradients by one call; where it draws, dW comes first, whose list then serves dX too.
        shape = (weight, geometry, dy_input, input_shape, input)
        of_input, is_dense = GradInput(*shape), False
        draws_input = lists is not None and self._draws_input is not None
        run: Run | None = None
        if need_input and not draws_input:
            run, is_dense = self._gradient(of_input, form, names[0], own_transposed)
        if need_weight:
            assert input is not None
            alone = need_input and dy_input is not dy_weight
            is_whole = dy_weight is grad_output and (lists is None or self._draws_weight is None)
            of_weight = self._grad_weight_operands(dy_weight, input, weight, draws, lists)
            of_weight.joint = is_dense and not alone
            of_weight.bias = need_bias and is_whole
            form = form, of_weight.joint, of_weight.bias
            multiply, is_dense = self._gradient(of_weight, form, names[1], own_transposed)
            grad_input, grad_weight, grad_bias = multiply(of_weight)
        if need_input and grad_input is None:
            if draws_input:
                assert lists is not None and self._draws_input is not None
                drawn = lists if lists.is_drawn else lists.fresh(with_sums=False)
                of_input = DrawnGradInput(*shape, rule=self._draws_input, lists=drawn)
                run, _ = self._gradient(of_input, form, names[0], own_transposed)
            assert run is not None
            grad_input = run(of_input)
        if need_bias and grad_bias is None:
            grad_bias = grad_output.sum((0, 2, 3))
        if self._has_chosen and not torch.compiler.is_compiling():
            self._has_chosen = False
            chosen = [self.decisions[gemm].backend for gemm in GEMMS if gemm in self.decisions]
            self.dense_since = math.inf if {*chosen} != {DENSE} else step
        return grad_input, grad_weight, grad_bias

    def _grad_weight_operands(
        self, grad_output: Tensor, input: Tensor, weight: Tensor, draws: Draws, lists: Lists | None
    ) -> GradWeight:
        """The operands of dW, of the kind that the strategy's rule needs."""
        maps, rule = (weight, self.geometry, grad_output, input), self.strategy.grad_weight
        if self._draws_weight is not None and lists is not None:
            return DrawnGradWeight(*maps, rule=self._draws_weight, lists=lists)
        if rule is None or rule.operand != "input":
            return GradWeight(*maps)
        where = grad_output.shape, draws.phase
        if where in self._lattices:
            lattices = self._lattices[where]
        else:
            lattices = _kept(rule, grad_output.shape, draws.phase)
            if not torch.compiler.is_compiling():
                self._lattices[where] = lattices
        if lattices is None:
            by = self.record
            return PrunedGradWeight(*maps, rule=rule, generator=draws.generator, record=by)
        if not lattices:
            return GradWeight(*maps)
        return FixedGradWeight(*maps, rule=rule, phase=draws.phase, lattices=lattices)

    def _gradient(
        self, operands: GradInput | GradWeight, form: Any, grad_output: str, own_transposed: bool
    ) -> tuple[Run, bool]:
        """The function for these operands, and whether it is the dense one.

        Args:
            grad_output: the name under which the zeros of dY are counted.
        """
        where = operands.operation, form
        found = self._runs.get(where)
        if found is None:
            of_grad_output = self._share(grad_output, operands.grad_output)
            if isinstance(operands, GradWeight):
                zeros = Zeros(0.0, self._share("input", operands.input), of_grad_output)
            else:
                name = "transposed" if own_transposed else "weight"
                zeros = Zeros(self._share(name, operands.weight), 0.0, of_grad_output)
            operands.zeros = zeros
            found = self._choose(where, operands)
            if torch.compiler.is_compiling():
                return found
            rule = self.strategy.grad_weight
            if type(operands) is GradWeight and rule is not None and rule.operand == "input":
                decision = self.decisions["grad_weight"]._replace(reason=TOO_SMALL)
                self.decisions["grad_weight"] = self.record.decisions["grad_weight"] = decision
        return found

    def _pruned(
        self, grad_output: Tensor, rule: Rule, gemm: str, form: Any, draws: Draws
    ) -> Tensor:
        """grad_output as a rule prunes it for a GEMM."""
        groups, where = self.geometry.groups, ("prune_grad_output", gemm, form)
        maps = self._maps[gemm]
        if maps is None:
            return rule.prune_grad_output(grad_output, gemm, groups, draws.generator, draws.memory)
        operands = maps(grad_output, draws.generator, draws.memory)
        found = self._runs.get(where)
        if found is None:
            found = self._choose(where, operands)
        pruned: Tensor = found[0](operands)
        return pruned


def _kept(rule: Rule, shape: torch.Size, phase: int) -> tuple[Lattice, ...] | None:
    """The output positions that a rule of the input keeps; () for all, None if values decide."""
    _, _, height, width = shape
    lattices = rule.kept_positions(height, width, phase)
    if lattices is None:
        return None
    kept = sum(math.prod(lattice.size(height, width)) for lattice in lattices)
    return () if kept == height * width else lattices


def _of_grad_output(rule: Rule | None) -> Rule | None:
    """The rule, if it prunes values of grad_output."""
    is_one = rule is not None and rule.operand == "grad_output" and not rule.samples
    return rule if is_one else None
