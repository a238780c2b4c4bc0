"""Graphs of models whose packed layers compute what follows them: batch norm, sum, activation."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fst.inference.chained import Chain, is_depthwise_layer, is_pointwise_layer
from fst.inference.checks import is_hooked, refuses_packing
from fst.inference.packed import PackedConv2d, PackedLayer, pack_layer
from fst.inference.traced import FROZEN_NORM, writes

NORM_AND_ACTIVATION = "BatchNormAct2d"  # timm's
MODULES = {nn.ReLU: "relu", nn.ReLU6: "relu6", nn.SiLU: "silu", nn.Hardswish: "hardswish"}
CALLS = {
    F.relu: "relu",
    torch.relu: "relu",
    torch.relu_: "relu",
    "relu": "relu",
    "relu_": "relu",
    F.relu6: "relu6",
    F.silu: "silu",
    F.hardswish: "hardswish",
}
ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")
ONTO_THE_FIRST = (operator.iadd, "add_")


def fuse(model: nn.Module, graph: fx.Graph, prefix: str = "") -> None:
    """Pack the layers of ``model``, and let the graph call them with what follows them.

    Args:
        model: in evaluation mode; its layers change their class.
        graph: of `trace`; it is changed.
        prefix: of the layers' names.
    """
    modules, own = dict(model.named_modules()), set()
    calls = [node for node in graph.nodes if node.op == "call_module"]
    counts = Counter(id(modules[node.target]) for node in calls)
    for node in calls:
        layer = modules[node.target]
        if not refuses_packing(layer):
            layer = pack_layer(layer, f"{prefix}{node.target}")
            if counts[id(layer)] == 1 and len(node.args) == 1 and not node.kwargs:
                own.add(id(layer))
                _fuse_followers(node, layer, modules)
    for node in list(graph.nodes):
        _chain_neighbours(node, modules, own)
    _compute_in_channels_last(graph)
    graph.lint()


def _compute_in_channels_last(graph: fx.Graph) -> None:
    """Users of the results find the memory format of the inputs."""
    given = [node for node in graph.nodes if node.op == "placeholder"]
    output = graph.output_node()
    with graph.inserting_before(output):
        output.args = (graph.call_function(formatted_as, (output.args[0], *given)),)
    (restored,) = output.args
    for node in given:
        with graph.inserting_after(node):
            last = graph.call_function(channels_last, (node,))
        kept = (last, restored)
        node.replace_all_uses_with(last, delete_user_cb=lambda user, kept=kept: user not in kept)
    for node in graph.nodes:
        is_view = node.op == "call_method" and node.target == "view"
        if is_view and not any(isinstance(value, torch.dtype) for value in node.args):
            node.target = "reshape"  # which takes any memory format


def _is_maps(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 4


def channels_last(value: Any) -> Any:
    """Maps in the memory format in which both products, and poolings, are the fastest."""
    return value.contiguous(memory_format=torch.channels_last) if _is_maps(value) else value


def formatted_as(outputs: Any, *inputs: Any) -> Any:
    """The outputs, contiguous where all maps among the inputs are."""
    if not all(value.is_contiguous() for value in inputs if _is_maps(value)):
        return outputs
    return pytree.tree_map(lambda value: value.contiguous() if _is_maps(value) else value, outputs)


def _fuse_followers(node: fx.Node, layer: PackedLayer, modules: dict[str, nn.Module]) -> None:
    """Replace the call of a layer, and of what follows it, by one of `run`."""
    nodes, place, residual, norm = [node], node, None, None
    found = _follower(node)
    if found is not None and found.op == "call_module" and isinstance(layer, PackedConv2d):
        if _is_norm(modules[str(found.target)]):
            norm = modules[str(found.target)]
            nodes.append(found)
    activation = MODULES.get(type(getattr(norm, "act", None)), "")  # type: ignore[arg-type]
    added = None if activation else _follower(nodes[-1])
    if added is not None and _is_addition(added):
        first, second = added.args
        is_new = first is nodes[-1] or added.target not in ONTO_THE_FIRST
        other = second if first is nodes[-1] else first
        if isinstance(other, fx.Node) and first is not second and is_new:
            if not _written_between(node, added, modules):
                nodes.append(added)
                place, residual = added, other
    last = None if activation else _follower(nodes[-1])
    if last is not None and (activation := activation or _activation(last, modules)):
        nodes.append(last)
    if len(nodes) == 1:
        return
    words = ("batch norm" if norm else "", "residual" if residual else "", activation)
    layer.__dict__.update(norm=norm, activation=activation, follows=tuple(filter(None, words)))
    with node.graph.inserting_before(place):
        product = node.graph.call_module(str(node.target), (node.args[0], residual, True))
    nodes[-1].replace_all_uses_with(product)
    for past in reversed(nodes):
        node.graph.erase_node(past)


def _unchained(node: Any, modules: dict[str, nn.Module], own: set[int]) -> PackedLayer | None:
    """The packed layer that a node calls, and no other node, and that ends no chain."""
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    layer = modules[str(node.target)]
    is_one = isinstance(layer, PackedLayer) and id(layer) in own and layer.chain is None
    return layer if is_one else None  # type: ignore[return-value]


def _chain_neighbours(node: fx.Node, modules: dict[str, nn.Module], own: set[int]) -> None:
    """Chain a depthwise layer with the 1x1 layers before and behind it."""
    layer = _unchained(node, modules, own)
    if layer is None or not is_depthwise_layer(layer) or _residual_of(node) is not None:
        return
    nodes, layers, first, last = [node], [layer], node.args[0], _follower(node)
    behind = _unchained(last, modules, own)
    if last and behind and is_pointwise_layer(behind) and last.args[0] is node:
        if _residual_of(last) is not node and not _written_between(node, last, modules):
            nodes.append(last)
            layers.append(behind)
    before = _unchained(first, modules, own)
    if isinstance(first, fx.Node) and before and is_pointwise_layer(before):
        alone = len(first.users) == 1 and _residual_of(first) is None
        if alone and not _written_between(first, nodes[-1], modules):
            nodes.insert(0, first)
            layers.insert(0, before)
    if len(nodes) == 1:
        return
    layers[-1].chain = Chain(layers)
    nodes[-1].args = (nodes[0].args[0], _residual_of(nodes[-1]), True)
    for past in reversed(nodes[:-1]):
        node.graph.erase_node(past)


def _residual_of(node: fx.Node) -> Any:
    return node.args[1] if len(node.args) > 1 else None


def _written_between(first: fx.Node, last: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """True if a node between these writes to any tensor, which may share an input's memory."""
    nodes = list(first.graph.nodes)
    between = nodes[nodes.index(first) + 1 : nodes.index(last)]
    return any(writes(node, modules) for node in between if node.op.startswith("call"))


def _follower(node: fx.Node) -> fx.Node | None:
    """The only node that uses the result, and takes it as its first argument or adds it."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    return user if user.op.startswith("call") else None


def _is_norm(module: nn.Module) -> bool:
    """True for a batch norm whose call does nothing else than can be folded into a weight."""
    if is_hooked(module):
        return False
    if type(module).__name__ == FROZEN_NORM:
        return True
    if not isinstance(module, nn.BatchNorm2d) or module.running_mean is None:
        return False
    if type(module).__name__ == NORM_AND_ACTIVATION:
        known = type(module.act) is nn.Identity or type(module.act) in MODULES
        return known and type(module.drop) is nn.Identity
    return type(module) is nn.BatchNorm2d


def _is_addition(node: fx.Node) -> bool:
    known = node.op != "call_module" and node.target in ADDITIONS
    return known and len(node.args) == 2 and not node.kwargs


def _activation(node: fx.Node, modules: dict[str, nn.Module]) -> str:
    """Which of ACTIVATIONS a node computes of its first argument; "" for none."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        return "" if is_hooked(module) else MODULES.get(type(module), "")
    target: Any = node.target
    return CALLS.get(target, "") if len(node.args) == 1 else ""
