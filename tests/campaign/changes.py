"""Every way in which PyTorch lets the weight of a layer change."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils import parametrize as para

import fst


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

    def __init__(self, net: Net, new: Tensor, strategy: Any, build: Callable[[], Net]) -> None:
        self.net, self.new, self.strategy, self.build = net, new, strategy, build
        self.conv = net.conv
        self.state = {"conv.weight": new, "conv.bias": torch.ones_like(net.conv.bias)}

    @property
    def weight(self) -> Any:
        return self.conv.weight

    @property
    def laid_out(self) -> Tensor:
        """The new weight, in memory as the old one."""
        return torch.empty_like(self.weight.detach()).copy_(self.new)

    def fill(self) -> None:
        self.weight.data.copy_(self.new)

    def call(self, net: Any = None) -> Tensor:
        return (net or self.net)(torch.randn(2, 8, 5, 5).to(self.conv.weight.dtype))


Change = Callable[[Situation], Any]
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
ROWS = torch.arange(6)
IN_PLACE: dict[str, Change] = {
    "copy": lambda s: s.weight.copy_(s.new),
    "data-copy": lambda s: s.fill(),
    "data-multiplied": lambda s: s.weight.data.mul_(-2),
    "data-assigned": lambda s: setattr(s.weight, "data", s.new),
    "data-of-a-flat-buffer": lambda s: setattr(s.weight, "data", s.new.flatten().view_as(s.new)),
    "detached-copy": lambda s: s.weight.detach().copy_(s.new),
    "indexed": lambda s: s.weight.__setitem__(slice(0, 6), s.new[:6]),
    "masked_fill": lambda s: s.weight.masked_fill_(s.new > 0, 0.5),
    "index_copy": lambda s: s.weight.index_copy_(0, ROWS, s.new[:6]),
    "index_put": lambda s: s.weight.index_put_((ROWS,), s.new[:6]),
    "scatter": lambda s: s.weight.scatter_(1, torch.zeros_like(s.new, dtype=torch.long), 2.0),
    "out": lambda s: torch.add(s.weight, s.new, out=s.weight.data),
    "view": lambda s: s.weight[::2].mul_(-3),
    "as_strided": lambda s: s.weight.as_strided((12,), (1,)).add_(9),
    "rolled": lambda s: s.weight.copy_(s.weight.roll(1, 1)),
    "clamped": lambda s: s.weight.clamp_(-0.02, 0.02),
    "renorm": lambda s: s.weight.renorm_(2, 0, 0.1),
    "ema": lambda s: s.weight.lerp_(s.new, 0.9),
    "foreach-ema": lambda s: torch._foreach_lerp_([s.weight], [s.new], 0.9),
    "foreach-add": lambda s: torch._foreach_add_([s.weight], [s.new]),
    "foreach-copy": lambda s: torch._foreach_copy_([s.weight], [s.new]),
    "broadcast-buckets": lambda s: s.weight.copy_(
        torch._utils._unflatten_dense_tensors(s.new.flatten(), [s.weight])[0]
    ),
    "set": lambda s: s.weight.set_(s.new),
    "set-storage": lambda s: s.weight.set_(
        s.laid_out.untyped_storage(), 0, s.new.shape, s.weight.stride()
    ),
    "storage-copy": lambda s: s.weight.untyped_storage().copy_(s.laid_out.untyped_storage()),
    "storage-resized": lambda s: (
        [s.weight.untyped_storage().resize_(n) for n in (0, 9999)] and s.fill()
    ),
    "memmove": lambda s: ctypes.memmove(
        s.weight.data_ptr(), (n := s.laid_out).data_ptr(), n.nbytes
    ),
    "dlpack": lambda s: torch.from_dlpack(s.weight.detach()).copy_(s.new),
    "numpy-view": lambda s: (
        s.weight.detach()
        .view(words := WORDS[s.new.itemsize])
        .numpy()
        .__setitem__(slice(None), s.new.view(words).numpy())
    ),
    "other-thread": lambda s: [t := threading.Thread(target=s.fill), t.start(), t.join()],
    "init-kaiming": lambda s: nn.init.kaiming_normal_(s.weight, a=3),
    "reset_parameters": lambda s: s.conv.reset_parameters(),
    "applied": lambda s: s.net.apply(lambda m: hasattr(m, "weight") and m.weight.copy_(s.new)),
    "apply-tensors": lambda s: s.net._apply(lambda t: t * -2),
    "vector_to_parameters": lambda s: nn.utils.vector_to_parameters(
        torch.cat([s.new.flatten(), s.conv.bias]), s.net.parameters()
    ),
    "load_state_dict": lambda s: s.net.load_state_dict(s.state),
    "load_state_dict-assign": lambda s: s.net.load_state_dict(s.state, assign=True),
    "load_state_dict-of-the-layer": lambda s: s.conv.load_state_dict({"weight": s.new}, False),
    "new-parameter": lambda s: setattr(s.conv, "weight", nn.Parameter(s.new)),
    "deleted-and-new": lambda s: [delattr(s.conv, "weight"), IN_PLACE["new-parameter"](s)],
    "register_parameter": lambda s: s.conv.register_parameter("weight", nn.Parameter(s.new)),
    "dictionary": lambda s: s.conv._parameters.update(weight=nn.Parameter(s.new)),
    "tied": lambda s: [
        setattr(o := nn.Conv2d(8, 12, 3), "weight", s.weight),
        o.weight.copy_(s.new),
    ],
    "share_memory": lambda s: s.net.share_memory().conv.weight.copy_(s.new),
    "to_empty": lambda s: s.net.to_empty(device="cpu").load_state_dict(s.state),
}


def _under(context: Callable[[], Any], change: Change, s: Situation) -> None:
    with context():
        change(s)


CHANGES: dict[str, Change] = {n: partial(_under, torch.no_grad, c) for n, c in IN_PLACE.items()}
for _name in ("copy", "ema", "foreach-copy", "view", "data-copy"):
    CHANGES[f"inference_mode-{_name}"] = partial(_under, torch.inference_mode, IN_PLACE[_name])


# ---------------------------------------------------------------- copies and other objects


def _saved(net: Net) -> Net:
    file = io.BytesIO()
    torch.save(net, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


COPIES: dict[str, Callable[[Net], Net]] = {
    "deepcopied": copy.deepcopy,
    "pickled": lambda net: pickle.loads(pickle.dumps(net)),
    "saved": _saved,
    "to-double": lambda net: net.to(torch.float64),
    "to-bfloat16": lambda net: net.to(torch.bfloat16),
    "to-bfloat16-and-float32": lambda net: net.bfloat16().float(),
    "to-channels_last": lambda net: net.to(memory_format=torch.channels_last),
    "swa": lambda net: torch.optim.swa_utils.AveragedModel(net).module,
}


def _copied(copied: Callable[[Net], Net], before: bool, s: Situation) -> Net:
    if before:
        s.fill()
    net = copied(s.net)
    if not before:
        net.conv.weight.data.copy_(s.new)
    return net


for _name, _copy in COPIES.items():
    CHANGES[f"{_name}-after"] = partial(_copied, _copy, True)
    CHANGES[f"{_name}-before"] = partial(_copied, _copy, False)


def _frozen(s: Situation) -> None:
    with fst.frozen(s.net):
        s.call()
        s.fill()


def _swapped_on_load(s: Situation) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        s.net.load_state_dict(s.state)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _parametrized_before_conversion(s: Situation) -> Net:
    """Such a layer is not converted: it can be as soon as the parametrization is removed."""
    net = s.build()
    para.register_parametrization(net.conv, "weight", Scaled())
    try:
        fst.convert(net, s.strategy)
    except ValueError as error:
        assert "parametrized" in str(error)
    para.remove_parametrizations(net.conv, "weight")
    fst.convert(net, s.strategy)
    s.call(net)
    net.conv.weight.data.copy_(s.new)
    return net


CHANGES |= {
    "frozen": _frozen,
    "swap_tensors": lambda s: torch.utils.swap_tensors(s.weight, nn.Parameter(s.new)),
    "swapped-on-load": _swapped_on_load,
    "functional_call": lambda s: FunctionalNet(s.net, s.new),
    "functional_call-and-back": lambda s: [s.call(FunctionalNet(s.net, -s.new)), s.fill()] and None,
    "forward_pre_hook": lambda s: s.conv.register_forward_pre_hook(lambda *_: s.fill()) and None,
    "parametrized-before-conversion": _parametrized_before_conversion,
}


# ---------------------------------------------------------------- computed weights


def _scaled(conv: Any) -> None:
    para.register_parametrization(conv, "weight", Scaled())


def _original(conv: Any, new: Tensor) -> None:
    conv.parametrizations.weight.original.data.copy_(new)


def _scale(conv: Any, new: Tensor) -> None:
    conv.parametrizations.weight[0].scale.data.fill_(-2)


def _removed(leave: bool, conv: Any, new: Tensor) -> None:
    _scale(conv, new)
    para.remove_parametrizations(conv, "weight", leave_parametrized=leave)
    conv.weight.data.mul_(1 if leave else -2)


def _norm(of: Any, conv: Any) -> None:
    conv.float()
    with torch.autocast("cpu", enabled=False):  # PyTorch makes no orthogonal matrix in 16 bits
        of(conv)
    # In training, spectral_norm has another weight each time that it is asked.
    computed = conv.parametrizations.weight[0].eval()
    computed.train = lambda mode=True: computed


def _norm_changed(conv: Any, _: Tensor) -> None:
    for parameter in conv.parametrizations.parameters():
        parameter.data.copy_(torch.randn(parameter.shape) * 3)


def _pruned(of: Any, conv: Any) -> None:
    conv.weight.data = conv.weight.data.contiguous()  # PyTorch prunes no other
    of(conv)


def _weight_orig(conv: Any, new: Tensor) -> None:
    conv.weight_orig.data.copy_(new)


L1 = partial(prune.l1_unstructured, name="weight", amount=0.4)
RANDOM = partial(prune.random_unstructured, name="weight", amount=0.4)
FILTERS = partial(prune.ln_structured, name="weight", amount=3, n=2, dim=0)
COMPUTED: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Tensor], Any]]] = {
    "parametrization-original": (_scaled, _original),
    "parametrization-scale": (_scaled, _scale),
    "parametrization-removed": (_scaled, partial(_removed, True)),
    "parametrization-removed-original": (_scaled, partial(_removed, False)),
    **{
        f"parametrization-{name}": (partial(_norm, getattr(parametrizations, name)), _norm_changed)
        for name in ("weight_norm", "spectral_norm", "orthogonal")
    },
    "weight_norm-hook": (nn.utils.weight_norm, lambda c, _: c.weight_g.data.mul_(-3)),
    "weight_norm-hook-removed": (
        nn.utils.weight_norm,
        lambda c, _: nn.utils.remove_weight_norm(c).weight.data.mul_(-3),
    ),
    "spectral_norm-hook": (nn.utils.spectral_norm, _weight_orig),
    "prune-l1": (partial(_pruned, L1), _weight_orig),
    "prune-random": (partial(_pruned, RANDOM), _weight_orig),
    "prune-mask": (partial(_pruned, L1), lambda c, new: c.weight_mask.copy_(new > 0.5)),
    "prune-filters": (lambda c: None, lambda c, _: FILTERS(c)),
    "prune-removed": (
        partial(_pruned, L1),
        lambda c, _: prune.remove(c, "weight").weight.data.mul_(3),
    ),
}


def _computed(prepare: Callable[[Any], Any], change: Any, cached: bool, s: Situation) -> None:
    prepare(s.conv)
    if cached:
        with para.cached():
            s.call()
    s.call()
    change(s.conv, s.new)


for _name, (_prepare, _act) in COMPUTED.items():
    CHANGES[_name] = partial(_computed, _prepare, _act, False)
CHANGES["parametrization-cached"] = partial(_computed, _scaled, _original, True)


# ---------------------------------------------------------------- optimizers

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": dict(lr=1.0, momentum=0.9),
    "Adam": {},
    "AdamW": dict(amsgrad=True),
    "Adagrad": {},
    "Adadelta": dict(lr=300.0),
    "Adamax": {},
    "ASGD": dict(lr=1.0),
    "NAdam": {},
    "RAdam": dict(lr=9.0),
    "RMSprop": {},
    "Rprop": {},
    "Adafactor": dict(lr=50.0),
}


def _step(name: str, options: dict[str, Any], s: Situation) -> None:
    if name == "LBFGS":
        s.weight.data = s.weight.data.contiguous()  # PyTorch flattens no other
        for layer in fst.sparse_layers(s.net).values():  # it refuses a decay in gradients
            layer.strategy = replace(layer.strategy, decay=0.0)
    if name == "SGD" and "fused" in options:
        s.net.float()  # in 16 bits, PyTorch 2.11 changes the last few elements alone
    optimizer = getattr(torch.optim, name)(s.net.parameters(), **{"lr": 0.3} | options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = s.call().square().mean()
        loss.backward()
        return loss

    s.net.train()
    for _ in range(2):
        optimizer.step(closure)


for _name, _options in OPTIMIZERS.items():
    for _how in ("loop", "foreach", "fused"):
        if _how != "fused" or _name in ("SGD", "Adam", "AdamW", "Adagrad"):
            _more = {"foreach": False} if _how == "loop" else {_how: True}
            CHANGES[f"optimizer-{_name}-{_how}"] = partial(_step, _name, _options | _more)
CHANGES["optimizer-LBFGS"] = partial(_step, "LBFGS", dict(lr=1.0, max_iter=9))
