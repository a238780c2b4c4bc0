"""No stale S(W): the call after any change of the weight has the mask of the weight as it is."""

from __future__ import annotations

import copy
import ctypes
import pickle
import random
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils import parametrize as para

import fst
from tests.campaign.shared import Checks
from tests.cases import TOLERANCE, error
from tests.oracle.conv import reference_operands
from tests.strategy_settings import setting

ROWS = [
    setting(name)
    for name in "dense srste srste-im2col srste-dense_backward srste-4:8 fst fst_w fst_w-3:5 sdgp "
    "wg gx tsm tsm-interval1".split()
]
VISIBLE = 5  # tolerances by which the outputs of the old and of the new weight must differ
MODES = ("train", "train-backward", "train-no_grad", "eval", "eval-inference_mode")


class Net(nn.Module):
    """One convolution, called ``conv``, and its arguments."""

    def __init__(self, draw: random.Random, dtype: torch.dtype) -> None:
        super().__init__()
        stride, groups = draw.choice(((1, 1), (1, 1), (2, 1), (1, 2)))
        self.arguments = dict(stride=stride, padding=1, dilation=1, groups=groups)
        self.conv = nn.Conv2d(8, 12, 3, stride, 1, groups=groups, dtype=dtype)
        if draw.random() < 0.3:
            self.to(memory_format=torch.channels_last)

    def forward(self, input: Tensor) -> Tensor:
        return self.conv(input)


class Scaled(nn.Module):
    """A parametrization with a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.scale.to(weight.dtype)


class FunctionalNet:
    """A net that is called with another weight than its own."""

    def __init__(self, net: Net, weight: Tensor) -> None:
        self.net, self.arguments, self.train = net, net.arguments, net.train
        self.conv = SimpleNamespace(weight=weight, bias=net.conv.bias, state=net.conv.state)

    def __call__(self, input: Tensor) -> Tensor:
        return torch.func.functional_call(self.net, {"conv.weight": self.conv.weight}, (input,))


class Situation:
    """A converted net that has been called, and a weight ``new`` unlike its own."""

    def __init__(self, net: Net) -> None:
        self.net, self.conv = net, net.conv
        self.new = torch.randn_like(net.conv.weight.detach())
        self.state = {"conv.weight": self.new, "conv.bias": torch.ones_like(net.conv.bias)}

    @property
    def weight(self) -> Any:
        return self.conv.weight

    @property
    def in_layout(self) -> Tensor:
        """The new weight, in memory as the old one."""
        return torch.empty_like(self.weight.detach()).copy_(self.new)

    def fill(self) -> None:
        self.weight.data.copy_(self.new)

    def call(self) -> Tensor:
        return self.net(torch.randn(2, 8, 5, 5).to(self.weight.dtype))


# ---------------------------------------------------------------- changes in place, new Parameters

Change = Callable[[Situation], Any]  # a changed copy, or the net itself was changed
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
IN_PLACE: dict[str, Change] = {
    "copy": lambda s: s.weight.copy_(s.new),
    "data-copy": lambda s: s.fill(),
    "data-assigned": lambda s: setattr(s.weight, "data", s.new),
    "view": lambda s: s.weight[::2].mul_(-3),
    "storage-set": lambda s: s.weight.set_(s.in_layout),
    "foreach-copy": lambda s: torch._foreach_copy_([s.weight], [s.new]),
    "storage-copy": lambda s: s.weight.untyped_storage().copy_(s.in_layout.untyped_storage()),
    "memmove": lambda s: ctypes.memmove(
        s.weight.data_ptr(), (n := s.in_layout).data_ptr(), n.nbytes
    ),
    "numpy-view": lambda s: (
        s.weight.detach()
        .view(words := WORDS[s.new.itemsize])
        .numpy()
        .__setitem__(slice(None), s.new.view(words).numpy())
    ),
    "other-thread": lambda s: [t := threading.Thread(target=s.fill), t.start(), t.join()],
    "load_state_dict-assign": lambda s: s.net.load_state_dict(s.state, assign=True),
    "new-parameter": lambda s: setattr(s.conv, "weight", nn.Parameter(s.new)),
    "dictionary": lambda s: s.conv._parameters.update(weight=nn.Parameter(s.new)),
    "to_empty": lambda s: s.net.to_empty(device="cpu").load_state_dict(s.state),
}


def _within(context: Callable[[], Any], change: Change, s: Situation) -> None:
    with context():
        change(s)


def _swapped_on_load(s: Situation) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        s.net.load_state_dict(s.state)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _frozen(s: Situation) -> None:
    with fst.frozen(s.net):
        s.call()
        s.fill()


CHANGES: dict[str, Change] = {
    **{name: partial(_within, torch.no_grad, change) for name, change in IN_PLACE.items()},
    **{
        f"inference_mode-{name}": partial(_within, torch.inference_mode, IN_PLACE[name])
        for name in ("copy", "view", "data-copy")
    },
    "frozen": _frozen,
    "swap_tensors": lambda s: torch.utils.swap_tensors(s.weight, nn.Parameter(s.new)),
    "swapped-on-load": _swapped_on_load,
    "functional_call": lambda s: FunctionalNet(s.net, s.new),
    "forward_pre_hook": lambda s: s.conv.register_forward_pre_hook(lambda *_: s.fill()) and None,
}


# ---------------------------------------------------------------- copies


def _copied(copied: Callable[[Net], Net], s: Situation) -> Net:
    net = copied(s.net)
    net.conv.weight.data.copy_(s.new)
    return net


COPIES: dict[str, Callable[[Net], Net]] = {
    "deepcopied": copy.deepcopy,
    "pickled": lambda net: pickle.loads(pickle.dumps(net)),
    "to-double": lambda net: net.to(torch.float64),
    "to-bfloat16": lambda net: net.to(torch.bfloat16),
    "swa": lambda net: torch.optim.swa_utils.AveragedModel(net).module,
}
CHANGES |= {name: partial(_copied, copied) for name, copied in COPIES.items()}


# ---------------------------------------------------------------- computed weights


def _scaled(conv: Any) -> None:
    para.register_parametrization(conv, "weight", Scaled())


def _removed(conv: Any, new: Tensor) -> None:
    conv.parametrizations.weight[0].scale.data.fill_(-2)
    para.remove_parametrizations(conv, "weight")


def _norm(of: Any, conv: Any) -> None:
    conv.float()
    with torch.autocast("cpu", enabled=False):  # PyTorch makes no orthogonal matrix in 16 bits
        of(conv)
    # in training, spectral_norm has another weight at each access
    computed = conv.parametrizations.weight[0].eval()
    computed.train = lambda mode=True: computed


def _norm_changed(conv: Any, _: Tensor) -> None:
    for parameter in conv.parametrizations.parameters():
        parameter.data.copy_(torch.randn(parameter.shape) * 3)


def _pruned(conv: Any) -> None:
    conv.weight.data = conv.weight.data.contiguous()  # PyTorch prunes no other
    prune.l1_unstructured(conv, "weight", 0.4)


COMPUTED: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Tensor], Any]]] = {
    "parametrization-original": (
        _scaled,
        lambda c, new: c.parametrizations.weight.original.data.copy_(new),
    ),
    "parametrization-scale": (
        _scaled,
        lambda c, _: c.parametrizations.weight[0].scale.data.fill_(-2),
    ),
    "parametrization-removed": (_scaled, _removed),
    **{
        f"parametrization-{name}": (partial(_norm, getattr(parametrizations, name)), _norm_changed)
        for name in ("weight_norm", "spectral_norm", "orthogonal")
    },
    "weight_norm-hook": (nn.utils.weight_norm, lambda c, _: c.weight_g.data.mul_(-3)),
    "prune-mask": (_pruned, lambda c, new: c.weight_mask.copy_(new > 0.5)),
    "prune-removed": (_pruned, lambda c, _: prune.remove(c, "weight").weight.data.mul_(3)),
}


def _computed(prepare: Callable[[Any], Any], change: Any, s: Situation) -> None:
    prepare(s.conv)
    with para.cached():
        s.call()
    s.call()
    change(s.conv, s.new)


for _name, (_prepare, _act) in COMPUTED.items():
    CHANGES[_name] = partial(_computed, _prepare, _act)


# ---------------------------------------------------------------- optimizers


def _step(name: str, options: dict[str, Any], s: Situation) -> None:
    if "fused" in options:
        s.net.float()  # in 16 bits, PyTorch 2.11 changes the last few elements alone
    optimizer = getattr(torch.optim, name)(s.net.parameters(), **options)
    s.net.train()
    for _ in range(2):
        optimizer.zero_grad()
        s.call().square().mean().backward()
        optimizer.step()


for _how in ("foreach", "fused"):
    CHANGES[f"optimizer-SGD-{_how}"] = partial(_step, "SGD", {"lr": 1.0, _how: True})
    CHANGES[f"optimizer-AdamW-{_how}"] = partial(_step, "AdamW", {"lr": 0.3, _how: True})


# ---------------------------------------------------------------- the check


def checks() -> Checks:
    """Each change, with strategies, dtypes and modes drawn for each case."""
    return [(name, 5, partial(_check, change)) for name, change in CHANGES.items()]


def _check(change: Change, draw: random.Random) -> None:
    torch.manual_seed(draw.getrandbits(32))
    row = draw.choice(ROWS)
    dtype = draw.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16))
    autocast = dtype == torch.float32 and draw.random() < 0.3
    net: Any = Net(draw, dtype)
    fst.convert(net, row.build())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, of its older ways
        first, second = draw.choice(MODES), draw.choice(MODES)
        _call(net, first, autocast)
        old = net.conv.weight.detach().clone()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            changed = change(Situation(net))
            net = changed if isinstance(changed, Net | FunctionalNet) else net
        input, found = _call(net, second, autocast)
    tolerance = TOLERANCE[torch.bfloat16 if autocast else net.conv.weight.dtype]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        weight = net.conv.weight.detach()  # after the call: hooks may compute it there
    expected = _expected(row.build(), net, input, weight, found[1])
    what = f"{row.id}, {dtype}{', autocast' if autocast else ''}, {first} then {second}"
    stale = error(_expected(row.build(), net, input, old, found[1])[0], expected[0])
    assert stale > VISIBLE * tolerance, f"void: the weight has hardly changed ({what}, {stale:.1e})"
    for name, actual, right in zip(("output", "grad_input"), found[::2], expected, strict=True):
        if actual is not None:
            assert error(actual, right) <= tolerance, (
                f"{name} is {error(actual, right):.1e} off, the old weight's {stale:.1e} ({what})"
            )


def _call(net: Any, mode: str, autocast: bool) -> tuple[Tensor, tuple[Any, Tensor, Any]]:
    """The input; the output, a gradient for it, and that of the input where there is one."""
    input = torch.randn(2, 8, 5, 5).to(net.conv.weight.dtype).requires_grad_()
    kind, _, more = mode.partition("-")
    net.train(kind == "train")
    contexts = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    with contexts.get(more, nullcontext)():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = net(input)
    grad_output = torch.randn(output.shape).to(output.dtype)
    if more == "backward":
        output.backward(grad_output)
    return input, (output.detach(), grad_output, input.grad)


def _expected(
    strategy: fst.Strategy, net: Any, input: Tensor, weight: Tensor, grad_output: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and grad_input with `F.conv2d` in float64, on the reference's masks of ``weight``."""
    kept, where = net.conv.state.kept_mask, net.arguments
    draws = {} if kept is None else {"output": kept}
    exact = reference_operands(input, weight, grad_output, **where, strategy=strategy, draws=draws)
    bias = net.conv.bias.detach().double()
    output = F.conv2d(input.detach().double(), exact.output_weight, bias, **where)
    grad_input = torch.nn.grad.conv2d_input(
        input.shape, exact.grad_input_weight, exact.grad_input_grad_output, **where
    )
    return output, grad_input
