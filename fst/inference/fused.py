"""Models whose packed layers compute the batch norm, addition and activation that follow them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fst.inference.chained import Chain, is_depthwise_layer, is_pointwise_layer
from fst.inference.packed import PackedConv2d, PackedLayer, pack_layer
from fst.inference.traced import FROZEN_NORM, KEPT, TracedForward
from fst.layers.checks import is_hooked, refuses_packing
from fst.ops.cpp.zeros_weight import ACTIVATIONS

NORM_AND_ACTIVATION = "BatchNormAct2d"  # timm's
NOTHING = (nn.Dropout, nn.Dropout2d, nn.Identity)  # do nothing in evaluation
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
IN_EVALUATION_NOTHING = ("dropout", "stochastic_depth")


def fuse(
    model: nn.Module,
    graph: fx.Graph,
    arguments: tuple[Any, ...],
    named: Mapping[str, Any],
    prefix: str = "",
) -> None:
    """Pack the layers of ``model``, which compute what follows them where the graph allows it.

    Args:
        model: in evaluation mode; its layers change their class, and its ``forward`` is the traced
            one from now on.
        graph: of `trace`.
        arguments, named: of a call for which it computes the model.
        prefix: of the layers' names.
    """
    modules = dict(model.named_modules())
    counts: dict[int, int] = {}
    own: set[int] = set()
    for node in graph.nodes:
        if node.op == "call_module":
            counts[id(modules[node.target])] = counts.get(id(modules[node.target]), 0) + 1
    for node in list(graph.nodes):
        if _does_nothing(node, modules):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in list(graph.nodes):
        layer = modules.get(node.target) if node.op == "call_module" else None
        if layer is None or not isinstance(layer, nn.Conv2d | nn.Linear):
            continue
        if not isinstance(layer, PackedLayer):
            if refuses_packing(layer):
                continue
            pack_layer(layer, f"{prefix}{node.target}")
            own.add(id(layer))
        elif id(layer) not in own:
            counts[id(layer)] += 1  # another part of the model calls it too
            own.add(id(layer))
        if counts[id(layer)] == 1 and len(node.args) == 1 and not node.kwargs:
            _fuse_followers(graph, node, modules, counts)
    for node in list(graph.nodes):
        _chain_neighbours(graph, node, modules, counts)
    _lay_out(graph)
    graph.lint()
    model.__dict__["forward"] = TracedForward(model, graph, arguments, named)


def _lay_out(graph: fx.Graph) -> None:
    """Compute in channels_last; what sees the results finds the memory format of the inputs."""
    given = [node for node in graph.nodes if node.op == "placeholder"]
    output = graph.output_node()
    with graph.inserting_before(output):
        output.args = (graph.call_function(laid_as, (output.args[0], *given)),)
    (restored,) = output.args
    for node in given:
        with graph.inserting_after(node):
            laid = graph.call_function(channels_last, (node,))
        kept = (laid, restored)
        node.replace_all_uses_with(laid, delete_user_cb=lambda user, kept=kept: user not in kept)
    for node in graph.nodes:
        is_view = node.op == "call_method" and node.target == "view"
        if is_view and not any(isinstance(value, torch.dtype) for value in node.args):
            node.target = "reshape"  # which takes any memory format


def _is_maps(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 4


def channels_last(value: Any) -> Any:
    """Maps in the memory format in which both products, and poolings, are the fastest."""
    return value.contiguous(memory_format=torch.channels_last) if _is_maps(value) else value


def laid_as(outputs: Any, *inputs: Any) -> Any:
    """The outputs, contiguous where all maps among the inputs are."""
    if not all(value.is_contiguous() for value in inputs if _is_maps(value)):
        return outputs
    return pytree.tree_map(lambda value: value.contiguous() if _is_maps(value) else value, outputs)


def _fuse_followers(
    graph: fx.Graph, node: fx.Node, modules: dict[str, nn.Module], counts: dict[int, int]
) -> None:
    layer = modules[str(node.target)]
    assert isinstance(layer, PackedLayer)
    nodes, place, residual = [node], node, None
    norm = _follower(node)
    if norm is not None and norm.op == "call_module" and isinstance(layer, PackedConv2d):
        found = modules[str(norm.target)]
        if counts[id(found)] == 1 and _is_norm(found):
            layer.norms = (found,)  # type: ignore[assignment]
            nodes.append(norm)
            if own := MODULES.get(type(getattr(found, "act", None))):  # type: ignore[arg-type]
                layer.activation = ACTIVATIONS.index(own)
                _replace(graph, nodes, node, None)
                return
    added = _follower(nodes[-1])
    if added is not None and _is_addition(added):
        first, second = added.args
        other = second if first is nodes[-1] else first
        if (
            isinstance(other, fx.Node)
            and other is not nodes[-1]
            and _may_wait(node, added, other, modules)
        ):
            nodes.append(added)
            place, residual = added, other
    last = _follower(nodes[-1])
    activation = _activation(last, modules)
    if last is not None and activation:
        layer.activation = ACTIVATIONS.index(activation)
        nodes.append(last)
    if len(nodes) > 1:
        _replace(graph, nodes, place, residual)


def _replace(
    graph: fx.Graph, nodes: list[fx.Node], place: fx.Node, residual: fx.Node | None
) -> None:
    """Call the layer, the first of the nodes, before ``place`` in the stead of all of them."""
    given = (*nodes[0].args, residual, True)
    with graph.inserting_before(place):
        product = graph.call_module(str(nodes[0].target), given)
    nodes[-1].replace_all_uses_with(product)
    for past in reversed(nodes):
        graph.erase_node(past)


def _unchained(
    node: Any, modules: dict[str, nn.Module], counts: dict[int, int]
) -> PackedConv2d | None:
    """The packed convolution that a node calls, and no other node, and that ends no chain."""
    if not isinstance(node, fx.Node) or node.op != "call_module" or node.kwargs:
        return None
    layer = modules[str(node.target)]
    is_one = isinstance(layer, PackedConv2d) and counts[id(layer)] == 1
    return layer if is_one and layer.chain is None else None


def _chain_neighbours(
    graph: fx.Graph, node: fx.Node, modules: dict[str, nn.Module], counts: dict[int, int]
) -> None:
    """Chain a depthwise layer with the 1x1 layers before and behind it."""
    layer = _unchained(node, modules, counts)
    if layer is None or not is_depthwise_layer(layer) or _residual_of(node) is not None:
        return
    nodes, layers, first, last = [node], [layer], node.args[0], _follower(node)
    behind = _unchained(last, modules, counts)
    if last and behind and is_pointwise_layer(behind) and last.args[0] is node:
        if _residual_of(last) is not node and not _written_between(node, last, modules):
            nodes.append(last)
            layers.append(behind)
    before = _unchained(first, modules, counts)
    if isinstance(first, fx.Node) and before and is_pointwise_layer(before):
        alone = len(first.users) == 1 and _residual_of(first) is None
        if alone and not _written_between(first, nodes[-1], modules):
            nodes.insert(0, first)
            layers.insert(0, before)
    if len(nodes) == 1:
        return
    layers[-1].chain = Chain(layers)
    nodes[-1].args = (nodes[0].args[0], _residual_of(nodes[-1]), True, True)
    for past in reversed(nodes[:-1]):
        graph.erase_node(past)


def _written_between(first: fx.Node, last: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """True if a node between these writes to any tensor, which may share an input's memory."""
    nodes = list(first.graph.nodes)
    between = nodes[nodes.index(first) + 1 : nodes.index(last)]
    return any(_writes(node, modules) for node in between if node.op.startswith("call"))


def _residual_of(node: fx.Node) -> Any:
    return node.args[1] if len(node.args) > 1 else None


def _follower(node: fx.Node) -> fx.Node | None:
    """The only node that uses the result, and takes it as its first argument or adds it."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    return user if user.op.startswith("call") else None


def _is_norm(module: nn.Module) -> bool:
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
    return (
        node.op != "call_module"
        and node.target in ADDITIONS
        and len(node.args) == 2
        and (not node.kwargs)
    )


def _may_wait(node: fx.Node, added: fx.Node, other: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """True if the product can be computed where its sum is, and onto a new tensor."""
    position = {of: place for place, of in enumerate(node.graph.nodes)}
    if added.target in ONTO_THE_FIRST and added.args[0] is other:
        if any(position[user] > position[added] for user in other.users):
            return False  # it would see the sum
    used = node.args[0]
    assert isinstance(used, fx.Node)  # the input of a layer
    writers = [
        between
        for between in node.graph.nodes
        if position[node] < position[between] < position[added]
        if between.op.startswith("call") and _writes(between, modules)
    ]
    written = {source for writer in writers for source in writer.all_input_nodes}
    return not writers or not written & _shared_memory(used, modules)


def _shared_memory(node: fx.Node, modules: dict[str, nn.Module]) -> set[fx.Node]:
    """The nodes whose results may be views of this one's, or of what this one is a view of."""

    def is_new(other: fx.Node) -> bool:
        return other.op == "call_module" and isinstance(modules[str(other.target)], KEPT)

    found, waiting = {node}, [node]
    while waiting:
        one = waiting.pop()
        near = [user for user in one.users if not is_new(user)]
        near += [] if is_new(one) else one.all_input_nodes
        waiting += [other for other in near if other not in found]
        found.update(near)
    return found


def _writes(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """True if a node may change its first argument."""
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    name = node.target if isinstance(node.target, str) else node.target.__name__
    is_operator = getattr(node.target, "__module__", "") == "_operator" and name.startswith("i")
    named = node.kwargs.get("inplace") or node.kwargs.get("out") is not None
    return is_operator or name.endswith("_") or bool(named)


def _does_nothing(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.op == "call_module":
        module = modules[str(node.target)]
        return type(module) in NOTHING and not is_hooked(module)
    named: Iterable[Any] = (*node.args, node.kwargs.get("training"))
    return (
        node.op == "call_function"
        and getattr(node.target, "__name__", "") in IN_EVALUATION_NOTHING
        and any(value is False for value in named)
    )


def _activation(node: fx.Node | None, modules: dict[str, nn.Module]) -> str:
    """Which of ACTIVATIONS a node computes of its first argument; "" for none."""
    if node is None:
        return ""
    if node.op == "call_module":
        module = modules[str(node.target)]
        return "" if is_hooked(module) else MODULES.get(type(module), "")
    target: str | Callable[..., Any] = node.target
    return CALLS.get(target, "") if len(node.args) == 1 else ""
