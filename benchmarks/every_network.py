"""A training step of twenty networks, plain and converted to several strategies, in turns.

    python benchmarks/every_network.py --size 64 --batch 8 --out table.md

A strategy's column is the time of a plain step / that of a converted one, and in brackets how many
products leave something out. Each converted step is compared with the plain steps just before and
after it, because a machine's speed moves within seconds; the column has the median. "control" is
the same ratio for a second copy of the plain network; "node" for one whose layers that `srste`
prunes are computed inside a `torch.autograd.Function` which does nothing else: the least that any
op costs whose backward pass is Python.
"""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import fst
from fst.backends.timing import geometric_mean
from fst.basics.arguments import positive
from fst.basics.machine import keep_freed_memory, processor
from fst.basics.text import table
from fst.ops import cpp
from fst.training.architecture import named_model

NETWORKS = (
    "torchvision:resnet50",
    "torchvision:vgg16_bn",
    "torchvision:densenet121",
    "torchvision:mobilenet_v3_large",
    "torchvision:efficientnet_b0",
    "torchvision:regnet_y_400mf",
    "torchvision:shufflenet_v2_x1_0",
    "torchvision:convnext_tiny",
    "torchvision:swin_t",
    "torchvision:vit_b_16",
    "timm:resnetblur50",
    "timm:tf_efficientnet_b0",
    "timm:tf_mobilenetv3_large_100",
    "timm:resnetv2_50x1_bit",
    "timm:nf_resnet50",
    "timm:dm_nfnet_f0",
    "timm:convnext_tiny",
    "timm:vit_small_patch16_224",
    "timm:swin_tiny_patch4_window7_224",
    "timm:ghostnet_100",
)
STRATEGIES = ("sparsetrain", "srste", "fst_sampled", "sdgp")
SIZE_OPTIONS = {  # of networks that are built for one size of images
    "torchvision:vit_b_16": "image_size",
    "timm:vit_small_patch16_224": "img_size",
    "timm:swin_tiny_patch4_window7_224": "img_size",
}


def main() -> None:
    """Print a table, a row for each network as it is measured."""
    arguments = _parser().parse_args()
    torch.manual_seed(0)
    keep_freed_memory()
    isa, kernels = torch.backends.cpu.get_cpu_capability(), cpp.missing() or "compiled"
    head = (
        f"{processor()}, {isa}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"C++ kernels {kernels}; batch {arguments.batch}, {arguments.size} pixels, "
        f"{arguments.rounds} rounds"
    )
    print(head, flush=True)
    columns = ("control", "node", *arguments.strategies)
    rows, measured = [], []
    for name in arguments.models:
        found = measure(name, arguments)
        if isinstance(found, str):
            row = (name, found, *("" for _ in columns))
        else:
            measured.append(found.ratios)
            cells = (f"{found.ratios[key]:.3f}{found.left_out.get(key, '')}" for key in columns)
            row = (name, f"{found.plain:.1f}", *cells)
        print("  ".join(row), flush=True)
        rows.append(row)
    for title, of in (("geometric mean", geometric_mean), ("least", min)):
        if measured:
            cells = (f"{of([ratios[key] for ratios in measured]):.3f}" for key in columns)
            rows.append((title, "", *cells))
    text = f"{head}\n\n{table(('network', 'plain ms', *columns), rows, markdown=True)}\n"
    print(f"\n{text}")
    if arguments.out is not None:
        arguments.out.write_text(text)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.rest = rest
        return F.conv2d(input, weight, *rest)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        bias, stride, padding, dilation, groups = ctx.rest
        sizes = None if bias is None else bias.shape
        grads = torch.ops.aten.convolution_backward(
            *(grad_output, *ctx.saved_tensors, sizes, stride, padding, dilation, False, (0, 0)),
            *(groups, ctx.needs_input_grad[:3]),
        )
        return *grads, None, None, None, None


def _in_node(
    layer: nn.Conv2d, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    rest = layer.stride, layer.padding, layer.dilation, layer.groups
    found: torch.Tensor = _Node.apply(input, weight, bias, *rest)
    return found


class Measured(NamedTuple):
    """Steps of one network.

    Attributes:
        plain: milliseconds of its median step.
        ratios: copy -> the median of plain time / its time.
        left_out: strategy -> " (N)", the number of products that leave something out.
    """

    plain: float
    ratios: dict[str, float]
    left_out: dict[str, str]


def measure(name: str, arguments: argparse.Namespace) -> Measured | str:
    """Steps of the network and of its copies, or why it cannot be trained like that."""
    try:
        options = {SIZE_OPTIONS[name]: arguments.size} if name in SIZE_OPTIONS else {}
        plain = named_model(name, num_classes=100, **options)
        models = {"plain": plain, "control": copy.deepcopy(plain), "node": copy.deepcopy(plain)}
        for strategy in arguments.strategies:
            models[strategy] = copy.deepcopy(plain)
            fst.convert(models[strategy], strategy, layers=arguments.layers)
        pruned = fst.convert(copy.deepcopy(plain), "srste", layers=arguments.layers).converted
        for layer in (models["node"].get_submodule(name) for name in pruned):
            if isinstance(layer, nn.Conv2d):
                layer._conv_forward = functools.partial(_in_node, layer)
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    images = torch.randn(arguments.batch, 3, arguments.size, arguments.size)
    labels = torch.randint(0, 100, (arguments.batch,))
    optimizers = {key: torch.optim.SGD(m.parameters(), lr=1e-3) for key, m in models.items()}

    def step(key: str) -> float:
        begin = time.perf_counter()
        optimizers[key].zero_grad()
        F.cross_entropy(_logits(models[key], images), labels).backward()
        optimizers[key].step()
        return (time.perf_counter() - begin) * 1e3

    try:
        for _ in range(2):
            [step(key) for key in models]
    except (RuntimeError, ValueError) as error:  # a network that needs larger images
        return str(error).splitlines()[0][:60]
    copies = collections.deque(key for key in models if key != "plain")
    plains, found = [step("plain")], collections.defaultdict(list)
    for _ in range(arguments.rounds):
        for key in copies:
            time_of_copy = step(key)
            plains.append(step("plain"))
            found[key].append((plains[-2] + plains[-1]) / 2 / time_of_copy)
        copies.rotate(1)
        copies.reverse()
    ratios = {key: statistics.median(found[key]) for key in copies}
    left_out = {key: f" ({_products(models[key])})" for key in arguments.strategies}
    return Measured(statistics.median(plains), ratios, left_out)


def _products(model: nn.Module) -> int:
    """Count the products that leave something out."""
    layers = fst.sparse_layers(model).values()
    return sum(bool(d.skipped) for x in layers for d in x.state.record.decisions.values())


def _logits(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    found = model(images)
    return found if isinstance(found, torch.Tensor) else found[0]


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--models", nargs="+", default=list(NETWORKS), help="SOURCE:NAME, as fst's")
    made.add_argument(
        "--strategies", nargs="+", default=STRATEGIES, help=f"their names ({' '.join(STRATEGIES)})"
    )
    made.add_argument("--layers", default="all", help="conv, linear or all (all)")
    made.add_argument("--size", type=positive, default=224, help="pixels (224)")
    made.add_argument("--batch", type=positive, default=8, help="images (8)")
    made.add_argument("--rounds", type=positive, default=7, help="timed steps of each (7)")
    made.add_argument("--out", type=Path, help="text file to write")
    return made


if __name__ == "__main__":
    main()
