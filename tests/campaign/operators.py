"""Hostile calls of all registered operators, in children: errors that say why, no crashes."""

from __future__ import annotations

import multiprocessing
import random
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fst.basics.errors import UsageError
from fst.ops import cpp
from fst.ops.backends import zeros_weight
from fst.ops.geometry import geometry_of
from tests.campaign.op import random_shape
from tests.campaign.weights import Checks
from tests.oracle.conv import output_size

CALLS = 100  # of one child
MEMORY, LIMIT = 1 << 30, 300  # bytes that a child may take, seconds that it may last
REFUSALS = (ValueError, TypeError, MemoryError, RuntimeError)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUMBERS = (-(2**63), -(2**31), -1, 0, 1, 2, 3, 7, 1000, 2**31 - 1, 2**31, 2**62, 2**63 - 1)
STARTS = (1.0, 0.0, 1 - 2**-53, -0.25, 1e300, -1e300, float("inf"), float("nan"))
Arguments = dict[str, Any]


def checks() -> Checks:
    """Children that call every operator in turn, most times with arguments that do not fit."""
    return [("call", 40, _check)]


def registered() -> set[str]:
    """The names of all operators of ``torch.ops.fst``."""
    names = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix("fst::") for name in names if name.startswith("fst::")}


# ---------------------------------------------------------------- calls that fit


def _maps(draw: random.Random, *shape: int) -> Tensor:
    layout = draw.choice((torch.contiguous_format, torch.channels_last))
    return torch.randn(shape).contiguous(memory_format=layout)


def _convolution(draw: random.Random) -> Arguments:
    """Operands of one dtype, and the numbers of their convolution."""
    shape, dtype = random_shape(draw), draw.choice(DTYPES)
    padding = (0, 0) if shape.padding == "same" else shape.padding
    cin, cout = shape.channels
    rows, columns = output_size(shape.size, shape.kernel, shape.stride, padding, shape.dilation)
    count = draw.randint(1, shape.batch * rows * columns)
    index = sorted(draw.sample(range(shape.batch * rows * columns), count))
    return {
        "grad_output": _maps(draw, shape.batch, cout, rows, columns).to(dtype),
        "input": _maps(draw, shape.batch, cin, *shape.size).to(dtype),
        "weight": _maps(draw, cout, cin // shape.groups, *shape.kernel).to(dtype),
        "index": torch.tensor(index, dtype=torch.int32),
        "scale": torch.rand(count) + 1,
        "geometry": (list(shape.stride), list(padding), list(shape.dilation)),
        "groups": shape.groups,
    }


def _named(names: str, *values: Any) -> Arguments:
    return dict(zip(names.split(), values, strict=True))


def _measure(draw: random.Random) -> Arguments:
    c = _convolution(draw)
    size, kernel = list(c["input"].shape), list(c["weight"].shape[2:])
    names = "grad_output input_size kernel stride padding dilation with_sums"
    return _named(names, c["grad_output"], size, kernel, *c["geometry"], draw.random() < 0.5)


def _draw_positions(draw: random.Random) -> Arguments:
    count = draw.choice((1, 5, 300, 5000))
    start = torch.tensor(draw.random(), dtype=torch.float64)
    return _named("scores n start", torch.rand(count), draw.randint(0, count), start)


def _list_grad_weight(draw: random.Random) -> Arguments:
    c = _convolution(draw)
    grad_output, weight, given = c["grad_output"], c["weight"], (draw.random() < 0.5,) * 2
    rows = grad_output[:, 0].numel()
    source = torch.randint(rows, c["index"].shape, dtype=torch.int32)
    names = "grad_output input index weight source mean sums weight_shape stride padding dilation "
    values = (
        *(grad_output, c["input"], c["index"]),
        c["scale"] if draw.random() < 0.7 else None,
        source if draw.random() < 0.5 else None,
        torch.randn(c["input"].shape[1]) if given[0] else None,
        torch.randn(len(weight), *weight.shape[2:]) if given[1] else None,
        *(list(weight.shape), *c["geometry"], c["groups"], draw.random() < 0.5),
    )
    return _named(names + "groups channels_last", *values)


def _list_grad_input(draw: random.Random) -> Arguments:
    c = _convolution(draw)
    names = "grad_output weight index list_weight input_size stride padding dilation groups"
    operands = (c["grad_output"], c["weight"], c["index"], c["scale"], list(c["input"].shape))
    return _named(names, *operands, *c["geometry"], c["groups"])


def _prune_weight(draw: random.Random) -> Arguments:
    c, (n, m) = _convolution(draw), draw.choice(((2, 4), (1, 2), (4, 8), (3, 5)))
    patterns = [*draw.choice(((0, 0), (n, m))), *draw.choice(((0, 0), (n, m)))]
    return _named(
        "weight groups patterns dtype", c["weight"], c["groups"], patterns, c["weight"].dtype
    )


def _prune_grad_output(draw: random.Random) -> Arguments:
    c, (n, m) = _convolution(draw), draw.choice(((2, 4), (1, 2), (4, 8), (3, 5)))
    rule = draw.choice(("magnitude", "random", "magnitude_rescaled"))
    rescale = draw.choice(("group", "sample_channel")) if rule == "magnitude_rescaled" else ""
    seed = torch.tensor([draw.getrandbits(62)]) if rule == "random" else None
    names = "grad_output n m rule rescale groups seed"
    return _named(names, c["grad_output"], n, m, rule, rescale, c["groups"], seed)


def _mask(draw: random.Random) -> Arguments:
    n, m = draw.choice(((2, 4), (1, 2), (4, 8), (3, 5)))
    tensor = _maps(draw, *(draw.randint(1, 9) for _ in range(4)))
    return _named("tensor n m dim", tensor.to(draw.choice(DTYPES)), n, m, draw.randint(-4, 3))


def _nonzeros(draw: random.Random) -> Arguments:
    c = _convolution(draw)
    return _named("maps every", c["input"], draw.choice((1, 2, 7)))


def _maps_output(draw: random.Random) -> Arguments:
    c = _convolution(draw)
    bias = torch.randn(len(c["weight"])).to(c["weight"].dtype) if draw.random() < 0.5 else None
    names = "input weight bias stride padding dilation groups"
    return _named(names, c["input"].relu(), c["weight"], bias, *c["geometry"], c["groups"])


def _maps_grad_input(draw: random.Random) -> Arguments:
    c = _convolution(draw)
    names = "grad_output weight input_size stride padding dilation groups"
    operands = (c["grad_output"].relu(), c["weight"], list(c["input"].shape))
    return _named(names, *operands, *c["geometry"], c["groups"])


def _maps_grad_weight(draw: random.Random) -> Arguments:
    c, listed = _convolution(draw), draw.random() < 0.6
    weight, centred = c["weight"], draw.random() < 0.5
    names = "grad_output input index weight mean sums weight_shape stride padding dilation groups "
    values = (
        *(c["grad_output"].relu(), c["input"].relu(), c["index"] if listed else None),
        c["scale"] if listed and draw.random() < 0.7 else None,
        torch.randn(c["input"].shape[1]) if listed and centred else None,
        torch.randn(len(weight), *weight.shape[2:]) if listed and centred else None,
        *(list(weight.shape), *c["geometry"], c["groups"], draw.random() < 0.5),
    )
    return _named(names + "channels_last zeros_of", *values, draw.choice(("input", "grad_output")))


def _zeros(draw: random.Random, grad_input: bool) -> Arguments:
    """Of Y or dX of a weight with zeros."""
    c, lanes = _convolution(draw), draw.randint(0, 2)
    size, shape = list(c["input"].shape), list(c["weight"].shape)
    geometry = _named("stride padding dilation groups", *c["geometry"], c["groups"])
    source = {"weight": c["weight"] * (torch.rand(shape) < draw.choice((0.0, 0.5, 1.0)))}
    if grad_input:
        maps = {"grad_output": c["grad_output"]}
        return maps | source | {"input_size": size} | geometry | {"lanes": lanes}
    bias = torch.randn(shape[0]) if draw.random() < 0.5 else None
    added = {"bias": bias, "residual": None}
    last = {"activation": draw.randint(0, 4), "lanes": lanes}
    return {"input": c["input"]} | source | added | geometry | last


def _kept(draw: random.Random) -> Arguments:
    """Of Y of a weight, with lists of it or without."""
    given = _zeros(draw, grad_input=False)
    lists = None
    if draw.random() < 0.5 and not cpp.missing():
        geometry = geometry_of(*(given[n] for n in ("stride", "padding", "dilation", "groups")))
        where = given["input"].shape, given["weight"].shape, geometry, False, given["lanes"]
        lists = zeros_weight.lists_of(given["weight"], zeros_weight.product_numbers(*where))
    first = {"input": given.pop("input"), "weight": given.pop("weight"), "lists": lists}
    return first | given


BUILDERS: dict[str, Callable[[random.Random], Arguments]] = {
    "measure_positions_cpp": _measure,
    "draw_positions_cpp": _draw_positions,
    "list_grad_weight_cpp": _list_grad_weight,
    "list_grad_input_cpp": _list_grad_input,
    "prune_weight_cpp": _prune_weight,
    "prune_grad_output_cpp": _prune_grad_output,
    "prune_weight": _prune_weight,
    "prune_grad_output": _prune_grad_output,
    "nm_mask_on_cpu": _mask,
    "nonzeros_cpp": _nonzeros,
    "maps_output_cpp": _maps_output,
    "maps_grad_input_cpp": _maps_grad_input,
    "maps_grad_weight_cpp": _maps_grad_weight,
    "zeros_output_cpp": partial(_zeros, grad_input=False),
    "zeros_grad_input_cpp": partial(_zeros, grad_input=True),
    "kept_output_cpp": _kept,
}


# ---------------------------------------------------------------- calls that do not fit


def _hostile_tensor(draw: random.Random, x: Tensor) -> Tensor:
    if x.dtype == torch.float64:
        return torch.tensor(draw.choice(STARTS), dtype=torch.float64)
    if x.dtype in (torch.int32, torch.int64) and draw.random() < 0.7:
        changed = x.clone()
        changed[draw.randrange(len(x))] = draw.choice((-(2**31), -1, 0, 10**6, 2**31 - 1))
        return changed
    return draw.choice(
        (
            lambda: x[:0],
            lambda: x[1:],
            lambda: torch.cat([x, x]),
            lambda: x.double(),
            lambda: x.unsqueeze(0),
            lambda: x.flatten()[0],
            lambda: x.transpose(0, -1),
            lambda: torch.stack([x, x], -1)[..., 0],
            lambda: x[:1].expand(x.shape),
            lambda: torch.full_like(x, float("nan")) if x.is_floating_point() else x.flip(0),
            lambda: x[:, 1:] if x.dim() > 1 else x[::2],
            lambda: x.to("meta"),
        )
    )()


def _hostile(draw: random.Random, value: Any) -> Any:
    """Another value of the same kind, which most often does not fit."""
    if isinstance(value, Tensor):
        return _hostile_tensor(draw, value)
    if isinstance(value, list):
        changed, place = list(value), draw.randrange(len(value))
        if draw.random() < 0.2:
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


def _call(seed: str) -> tuple[str, Arguments, bool]:
    """An operator's name, its arguments, and whether they fit."""
    draw = random.Random(seed)
    torch.manual_seed(draw.getrandbits(32))
    name = draw.choice(sorted(BUILDERS))
    arguments = BUILDERS[name](draw)
    changes = draw.choice((0, 1, 1, 1, 2, 3))
    for key in draw.sample(sorted(arguments), min(changes, len(arguments))):
        arguments[key] = _hostile(draw, arguments[key])
    return name, arguments, changes == 0


def _outcome(seed: str) -> str:
    """What is wrong with the call; "" if nothing is."""
    name, arguments, fits = _call(seed)
    try:
        getattr(torch.ops.fst, name)(*arguments.values())
    except REFUSALS as error:
        missing = isinstance(error, UsageError) and (cpp.missing() or not name.endswith("_cpp"))
        return f"{error!r}, though the arguments fit" if fits and not missing else ""
    except BaseException as error:
        named = isinstance(error, IndexError) and f"dim={arguments.get('dim')}" in str(error)
        return "" if named else f"unclear {error!r}"
    return ""


# ---------------------------------------------------------------- children


def _check(draw: random.Random) -> None:
    missing = registered() - BUILDERS.keys()
    assert not missing, f"tests/campaign/operators.py builds no calls of {sorted(missing)}"
    seed = str(draw.getrandbits(32))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", __name__])
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(seed, sender))
    child.start()
    sender.close()
    last, answer = 0, None
    try:
        while answer is None:
            assert receiver.poll(LIMIT), f"no answer within {LIMIT} s: {_described(seed, last)}"
            last, answer = receiver.recv()
    except EOFError:
        child.join()
        answer = f"the child ended with {child.exitcode}"
    finally:
        child.kill()
        child.join()
    assert not answer, f"{answer}: {_described(seed, last)}"


def _described(seed: str, number: int) -> str:
    name, arguments, _ = _call(f"{seed}/{number}")
    shown = {
        k: f"{v.dtype}{list(v.shape)}" if isinstance(v, Tensor) else v for k, v in arguments.items()
    }
    return f"call {seed}/{number}, {name}({', '.join(f'{k}={v}' for k, v in shown.items())})"


def _run(seed: str, sender: Any) -> None:
    """Send the number of each call before it is made, and at the end what was wrong, or ""."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(random.Random(seed).choice((1, 2)))
    for number in range(CALLS):
        sender.send((number, None))
        if wrong := _outcome(f"{seed}/{number}"):
            sender.send((number, wrong))
            return
    sender.send((CALLS - 1, ""))
