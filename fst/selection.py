"""Which layers of a model are left dense unless they are asked for, and which cannot be pruned.

Published 2:4 trainings of transformers prune within the blocks: the feed-forward layers (Hu et al.,
"Accelerating Transformer Pre-training with 2:4 Sparsity", ICML 2024; torchao's ViT), and neither
what makes tokens nor what makes logits. FST leaves a network's fully connected layer dense too.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator

import torch
from torch import nn

LAYERS = ("conv", "linear", "all")
HEAD_NAMES = frozenset("classifier fc head head_dist heads lm_head logits score".split())
# of a weight, not its values
DESCRIPTIONS = frozenset("device dim dtype is_cuda ndim numel requires_grad shape size".split())


def kept_dense(model: nn.Module, layers: str) -> dict[str, str]:
    """Layers that ``layers`` leaves alone, and why.

    Args:
        layers: "conv" chooses every `nn.Conv2d`; "linear" every `nn.Linear`, and "all" both, but no
            classifier head and no patch embedding.
    """
    heads, patches = classifier_heads(model), patch_embeddings(model)
    found = {}
    for name, module in model.named_modules():
        linear = isinstance(module, nn.Linear)
        if not linear and not isinstance(module, nn.Conv2d):
            continue
        if linear and layers == "conv":
            found[name] = (
                "linear layers are converted with layers='linear' or 'all', or if included"
            )
        elif linear and name in heads:
            found[name] = "the classifier head, which recipes leave dense; include it to convert it"
        elif layers != "conv" and name in patches:
            found[name] = "the patch embedding, which recipes leave dense; include it to convert it"
        elif not linear and layers == "linear":
            found[name] = "convolutions are converted if included, or by layers='conv' or 'all'"
    return found


def classifier_heads(model: nn.Module) -> set[str]:
    """Names of the linear layers that make logits.

    They are what timm's `get_classifier` returns, of ``model`` or of a model in it; else the last
    linear layer below a module with one of `HEAD_NAMES`, as torchvision's are called.
    """
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    told: set[int] = set()
    for module in model.modules():
        ask = getattr(module, "get_classifier", None)
        answer = ask() if callable(ask) else ()
        for head in answer if isinstance(answer, Iterable) else (answer,):
            told |= {id(m) for m in head.modules()} if isinstance(head, nn.Module) else set()
    heads = {name for name, module in linear.items() if id(module) in told}
    if heads:
        return heads
    named = [name for name in linear if HEAD_NAMES & set(name.split("."))]
    return set(named[-1:])


def patch_embeddings(model: nn.Module) -> set[str]:
    """Names of the layers that make tokens of the image.

    They are what lies below a module called "patch_embed", and the model's first convolution, if
    its windows do not overlap.
    """
    named = list(model.named_modules())
    found = {name for name, _ in named if "patch_embed" in name.split(".")}
    convolutions = ((name, m) for name, m in named if isinstance(m, nn.Conv2d))
    name, first = next(convolutions, ("", None))
    if first is not None and first.kernel_size == first.stride and max(first.stride) > 1:
        found.add(name)
    return found


def never_called(model: nn.Module) -> dict[str, str]:
    """Layers and Parameters whose weight a module of ``model`` multiplies with by itself, and why
    they cannot be pruned by converting a layer.

    A module does so if its `forward` reads the ``weight`` of a layer below it, as that of
    `nn.MultiheadAttention` does with ``out_proj``. So does the code that torch.jit has compiled.
    """
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            if module.original_name in ("Conv2d", "Linear"):
                found[name] = "compiled by torch.jit, with its weight in it; convert first"
            continue
        kind, prefix = type(module).__name__, f"{name}." if name else ""
        for path in _weights_read(module):
            found[prefix + path] = (
                f"{kind} reads its weight, with which it may multiply without calling the layer"
            )
        if isinstance(module, nn.MultiheadAttention):
            for parameter, _ in module.named_parameters(recurse=False):
                if parameter.endswith("proj_weight"):
                    found[prefix + parameter] = f"a bare Parameter of {kind}: there is no layer"
    return found


def _weights_read(module: nn.Module) -> Iterator[str]:
    """Paths of the layers below ``module`` whose weight its `forward` reads."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or not code.co_varnames:
        return
    read = _attributes_read(dis.get_instructions(code), code.co_varnames[0])
    chains = [chain for chain in read if "weight" in chain]
    below = dict(module.named_modules()) if chains else {}
    for chain in chains:
        at = chain.index("weight")
        path, rest = ".".join(chain[:at]), chain[at + 1 : at + 2]
        if isinstance(below.get(path), nn.Linear | nn.Conv2d) and at:
            if not DESCRIPTIONS & set(rest):
                yield path


def _attributes_read(code: Iterable[dis.Instruction], variable: str) -> Iterator[list[str]]:
    """The chains of attributes that ``code`` reads of ``variable``."""
    chain: list[str] | None = None
    for step in code:
        if chain is not None and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain.append(step.argval)
            continue
        if chain:
            yield chain
        # Python 3.13 fuses loads: ("x", "self"), of which an attribute is read of the last.
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        chain = [] if "LOAD_FAST" in step.opname and names[-1] == variable else None
    if chain:
        yield chain
