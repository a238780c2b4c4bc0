"""Which layers of a model are left dense unless they are asked for, and which cannot be pruned.

Published 2:4 trainings of transformers prune within the blocks: the feed-forward layers (Hu et al.,
"Accelerating Transformer Pre-training with 2:4 Sparsity", ICML 2024; torchao's ViT), and neither
what makes tokens nor what makes logits. FST leaves a network's fully connected layer dense too.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

LAYERS = ("conv", "linear", "all")
HEAD_NAMES = frozenset("classifier fc head head_dist heads lm_head logits score".split())
_TORCH, _SWIN = "torch.nn.modules", "torchvision.models.swin_transformer"
# module -> layers below it with whose weights it multiplies, in some mode, without calling them
USES_WEIGHTS = {
    f"{_TORCH}.activation.MultiheadAttention": ("out_proj",),
    f"{_TORCH}.transformer.TransformerEncoderLayer": ("linear1", "linear2"),
    f"{_SWIN}.ShiftedWindowAttention": ("qkv", "proj"),
    f"{_SWIN}.ShiftedWindowAttentionV2": ("qkv", "proj"),
    "torchvision.models.video.swin_transformer.ShiftedWindowAttention3d": ("qkv", "proj"),
    "timm.models.beit.Attention": ("qkv",),
    "timm.models.eva.EvaAttention": ("qkv",),
    "timm.models.naflexvit.NaFlexEmbeds": ("proj",),
    "timm.models.swin_transformer_v2.WindowAttention": ("qkv",),
}


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


def shared_parameters(model: nn.Module) -> list[list[tuple[str, str]]]:
    """Of each Parameter that several modules have: the name of each, and the Parameter's in it."""
    users: dict[nn.Parameter, list[tuple[str, str]]] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault(parameter, []).append((name, key))
    return [found for found in users.values() if len(found) > 1]


def never_called(model: nn.Module) -> dict[str, str]:
    """Layers and Parameters whose weight a module of ``model`` multiplies with by itself, and why
    they cannot be pruned by converting a layer.

    The modules of `USES_WEIGHTS` do so, and code that torch.jit has compiled. Of others the trial
    call of ``example_input`` shows in the report which layers were not called.
    """
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            if module.original_name in ("Conv2d", "Linear"):
                found[name] = "compiled by torch.jit, with its weight in it; convert first"
            continue
        kind, prefix = type(module).__name__, f"{name}." if name else ""
        below = dict(module.named_modules())
        for path in _used(module):
            if not isinstance(below.get(path), nn.Linear | nn.Conv2d):
                continue  # which some of a kind are built without
            found[prefix + path] = (
                f"{kind} uses its weight, with which it may multiply without calling the layer"
            )
        if isinstance(module, nn.MultiheadAttention):
            for parameter, _ in module.named_parameters(recurse=False):
                if parameter.endswith("proj_weight"):
                    found[prefix + parameter] = f"a bare Parameter of {kind}: there is no layer"
    return found


def _used(module: nn.Module) -> tuple[str, ...]:
    kinds = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__)
    return next((USES_WEIGHTS[kind] for kind in kinds if kind in USES_WEIGHTS), ())
