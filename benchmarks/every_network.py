"""A training step of twenty networks, plain and with `fst.convert(model, STRATEGY)`, in turns.

    python benchmarks/every_network.py --size 224 --batch 8 --out table.md

The ratio is plain time / converted time, of medians of rounds in which all take turns; "control" is
the same ratio for a second copy of the plain network, which shows how far the machine drifts.
"sampled" is the number of layers whose weight gradient is sampled after the first step. Layers that
gain nothing by sampling are computed exactly, so a ratio below the control's is what the conversion
itself costs.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import fst
from fst.backends.timing import geometric_mean
from fst.basics.machine import processor
from fst.basics.text import table
from fst.lab.arguments import source_and_name
from fst.models.named import build_architecture
from fst.ops import cpp

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
SIZE_OPTIONS = {  # of networks that are built for one size of images
    "torchvision:vit_b_16": "image_size",
    "timm:vit_small_patch16_224": "img_size",
    "timm:swin_tiny_patch4_window7_224": "img_size",
}


def main() -> None:
    """Print a table, a row for each network as it is measured."""
    arguments = _parser().parse_args()
    torch.manual_seed(0)
    isa, kernels = torch.backends.cpu.get_cpu_capability(), cpp.missing() or "compiled"
    head = (
        f"{processor()}, {isa}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"C++ kernels {kernels}; {arguments.strategy}, batch {arguments.batch}, "
        f"{arguments.size} pixels, {arguments.rounds} rounds"
    )
    print(head, flush=True)
    rows, ratios, controls = [], [], []
    for name in arguments.models:
        row = measure(name, arguments)
        print("  ".join(map(str, row)), flush=True)
        rows.append(row)
        if isinstance(row[3], float):
            ratios.append(row[3])
            controls.append(row[4])
    means = round(geometric_mean(ratios), 3), round(geometric_mean(controls), 3)
    rows.append(("geometric mean", "", "", *means, ""))
    header = ("network", "plain ms", "converted ms", "ratio", "control", "sampled")
    text = f"{head}\n\n{table(header, rows)}\n"
    print(f"\n{text}\nleast ratio: {min(ratios, default=math.nan):.3f}")
    if arguments.out is not None:
        arguments.out.write_text(text)


def measure(name: str, arguments: argparse.Namespace) -> tuple[object, ...]:
    """Name, milliseconds of both, their ratio, the control's, and how many layers are sampled."""
    try:
        options = {SIZE_OPTIONS[name]: arguments.size} if name in SIZE_OPTIONS else {}
        plain = build_architecture(*source_and_name(name), num_classes=100, **options)
    except (RuntimeError, ValueError) as error:
        return name, "", "", str(error).splitlines()[0], "", ""
    converted = copy.deepcopy(plain)
    fst.convert(converted, arguments.strategy, layers=arguments.layers)
    models = {"plain": plain, "control": copy.deepcopy(plain), "converted": converted}
    images = torch.randn(arguments.batch, 3, arguments.size, arguments.size)
    labels = torch.randint(0, 100, (arguments.batch,))
    optimizers = {key: torch.optim.SGD(m.parameters(), lr=1e-3) for key, m in models.items()}

    def step(key: str) -> float:
        begin = time.perf_counter()
        optimizers[key].zero_grad()
        F.cross_entropy(_logits(models[key], images), labels).backward()
        optimizers[key].step()
        return (time.perf_counter() - begin) * 1e3

    taken: dict[str, list[float]] = {key: [] for key in models}
    try:
        for _ in range(2):
            [step(key) for key in models]
    except (RuntimeError, ValueError) as error:  # a network that needs larger images
        return name, "", "", str(error).splitlines()[0][:60], "", ""
    for order in itertools.islice(
        itertools.cycle(itertools.permutations(models)), arguments.rounds
    ):
        for key in order:
            taken[key].append(step(key))
    layers = fst.sparse_layers(converted).values()
    found = [layer.state.record.decisions.get("grad_weight") for layer in layers]
    sampled = sum(decision is not None and decision.backend != "dense" for decision in found)
    before, again, after = (statistics.median(taken[key]) for key in models)
    ratios = round(before / after, 3), round(before / again, 3)
    return name, round(before, 1), round(after, 1), *ratios, f"{sampled} of {len(found)}"


def _logits(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    found = model(images)
    return found if isinstance(found, torch.Tensor) else found[0]


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--models", nargs="+", default=list(NETWORKS), help="SOURCE:NAME, as fst's")
    made.add_argument("--strategy", default="sampled", help="name of a strategy (sampled)")
    made.add_argument("--layers", default="conv", help="conv, linear or all (conv)")
    made.add_argument("--size", type=int, default=224, help="pixels (224)")
    made.add_argument("--batch", type=int, default=8, help="images (8)")
    made.add_argument(
        "--rounds", type=int, default=6, help="timed steps of each, best a multiple of six (6)"
    )
    made.add_argument("--out", type=Path, help="text file to write")
    return made


if __name__ == "__main__":
    main()
