"""Hostile calls of all registered operators, in children: errors that say why, no crashes.

The calls that fit are those that random convolutions make; then arguments are changed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fst
from fst import backends
from fst.basics.errors import UsageError
from fst.ops import cpp
from fst.ops.backends import zeros_weight
from fst.ops.geometry import geometry_of
from tests.campaign.shared import Checks, in_child
from tests.cases import random_case, random_layout
from tests.strategy_settings import SETTINGS

CALLS = 100  # of one child
LIMIT = 300  # seconds that it may last
REFUSALS = (ValueError, TypeError, MemoryError, RuntimeError)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PREFERRED = {
    "output": ("zeros_weight", "zeros_input"),
    "grad_input": ("zeros_weight", "zeros_grad_output", "cpp"),
    "grad_weight": ("zeros_input", "zeros_grad_output", "cpp"),
}
ALIKE = {"prune_weight_cpp": "prune_weight", "prune_grad_output_cpp": "prune_grad_output"}
NUMBERS = (-(2**63), -(2**31), -1, 0, 1, 2, 3, 7, 1000, 2**31 - 1, 2**31, 2**62, 2**63 - 1)
STARTS = (1.0, 0.0, 1 - 2**-53, -0.25, 1e300, -1e300, float("inf"), float("nan"))
Calls = dict[str, list[Any]]  # operator -> its arguments, in the order of its schema


def checks() -> Checks:
    """Children that call every operator in turn, most times with arguments that do not fit."""
    return [("call", 40, _check)]


def registered() -> set[str]:
    """The operators of this library."""
    names = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix("fst::") for name in names if name.startswith("fst::")}


class _Recorder(TorchDispatchMode):
    """The calls of this library's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Calls = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        if function.namespace == "fst":
            rest = function._schema.arguments[len(args) :]
            given = [*args, *(kwargs.get(a.name, a.default_value) for a in rest)]
            self.calls[function.overloadpacket.__name__] = given
        return function(*args, **kwargs)


def calls_of(draw: random.Random) -> Calls:
    """Those of a random convolution, forwards and backwards, and of masks and packed layers."""
    shape, row, dtype = random_case(draw), draw.choice(SETTINGS), draw.choice(DTYPES)
    operands = shape.operands(dtype)
    input, weight = random_layout(draw, operands.input.relu()), operands.weight
    leaves = [tensor.requires_grad_() for tensor in (input, weight)]
    preferred = {product: draw.choice(names) for product, names in PREFERRED.items()}
    with _Recorder() as recorder, backends.prefer(**preferred):
        output = fst.sparse_conv2d(*leaves, **shape.arguments, strategy=row.build())
        output.backward(random_layout(draw, operands.grad_output.relu()))
    found = {name: [_detached(a) for a in given] for name, given in recorder.calls.items()}
    found |= {ALIKE[name]: list(found[name]) for name in ALIKE.keys() & found.keys()}
    found["nm_mask_on_cpu"] = [_detached(weight), 2, 4, draw.randint(-4, 3)]
    if "zeros_output_cpp" in found and draw.random() < 0.7:
        given = found["zeros_output_cpp"]
        first, filters, *rest = given
        where = first.shape, filters.shape, geometry_of(*rest[3:7]), False, rest[-1]
        given[2] = zeros_weight.lists_of(filters, zeros_weight.product_numbers(*where))
    return found


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


# ---------------------------------------------------------------- calls that do not fit


def _hostile_tensor(draw: random.Random, x: Tensor) -> Tensor:
    if x.dtype == torch.float64:
        return torch.tensor(draw.choice(STARTS), dtype=torch.float64)
    if x.dtype in (torch.int32, torch.int64) and x.numel() and draw.random() < 0.7:
        changed = x.clone()
        place = draw.randrange(x.numel())
        changed.view(-1)[place] = draw.choice((-(2**31), -1, 0, 10**6, 2**31 - 1))
        return changed
    made: tuple[Callable[[], Tensor], ...] = (
        lambda: x[:0],
        lambda: x[1:],
        lambda: torch.cat([x, x]),
        x.double,
        lambda: x.unsqueeze(0),
        lambda: x.flatten()[0],
        lambda: x.transpose(0, -1),
        lambda: torch.stack([x, x], -1)[..., 0],
        lambda: x[:1].expand(x.shape),
        lambda: torch.full_like(x, float("nan")) if x.is_floating_point() else x.flip(0),
        lambda: x[:, 1:] if x.dim() > 1 else x[::2],
        lambda: x.to("meta"),
    )
    return draw.choice(made)()


def _hostile(draw: random.Random, value: Any) -> Any:
    """Another value of the same kind, which most often does not fit."""
    if isinstance(value, Tensor):
        return _hostile_tensor(draw, value)
    if isinstance(value, list | tuple):
        changed, place = list(value), draw.randrange(len(value) or 1)
        if not changed or draw.random() < 0.2:
            return changed + changed[:1] if draw.random() < 0.5 else changed[:place]
        changed[place] = draw.choice(NUMBERS)
        return changed
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice(NUMBERS)
    if isinstance(value, torch.dtype):
        return draw.choice((*DTYPES, torch.float64, torch.bool))
    return draw.choice(("", "magnitude", "channel", "no such rule")) if value is not None else None


def _outcome(seed: str, tell: Callable[[str], None]) -> str:
    """What is wrong with the call; "" if nothing is."""
    draw = random.Random(seed)
    torch.manual_seed(draw.getrandbits(32))
    calls = calls_of(draw)
    name = draw.choice(sorted(calls))
    given, changes = calls[name], draw.choice((0, 1, 1, 1, 2, 3))
    for place in draw.sample(range(len(given)), min(changes, len(given))):
        given[place] = _hostile(draw, given[place])
    shown = [f"{v.dtype}{list(v.shape)}" if isinstance(v, Tensor) else str(v) for v in given]
    tell(call := f"call {seed}, {name}({', '.join(shown)})")
    try:
        getattr(torch.ops.fst, name)(*given)
    except REFUSALS as error:
        lacks = isinstance(error, UsageError) and (cpp.missing() or not name.endswith("_cpp"))
        short = name in ALIKE.values() and "must be at most" in str(error)  # Triton's patterns
        return "" if changes or lacks or short else f"{error!r}, though the arguments fit: {call}"
    except BaseException as error:
        named = isinstance(error, IndexError) and "dim=" in str(error)
        return "" if named else f"unclear {error!r}: {call}"
    return ""


def _check(draw: random.Random) -> None:
    answer = in_child(_run, str(draw.getrandbits(32)), limit=LIMIT)
    assert not answer, answer


def _run(tell: Callable[[str], None], seed: str) -> str:
    return next(filter(None, (_outcome(f"{seed}/{n}", tell) for n in range(CALLS))), "")
