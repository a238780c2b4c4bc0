"""Training steps that leave zeros out, network by network, on one page.

    python benchmarks/cpu/steps.py --threads 2
    python benchmarks/cpu/steps.py --only resnet18 vgg16

Each network is one run of `fst bench`. Runs that were made before are kept in benchmarks/out/steps:
a killed command goes on with the next network. The page is docs/results/cpu_zeros_avx2.md, or
cpu_zeros_avx512.md, as torch's instruction set is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fst.backends.timing import Timing
from fst.basics.arguments import positive
from fst.basics.text import table
from fst.lab.benchmark.steps import CONTROL, PLAIN

ROOT = Path(__file__).parents[2]
DETECTION = "fst::configs/detection/fst_"


class Network(NamedTuple):
    """A run of `fst bench`.

    Attributes:
        title: of its table.
        options: of `fst bench`.
        strategies: the steps besides torch's.
        repeats: rounds.
    """

    title: str
    options: tuple[str, ...]
    strategies: tuple[str, ...]
    repeats: int = 3


NETWORKS = {
    "resnet18": Network(
        "ResNet-18, 224 pixels, batch 64",
        ("--model", "resnet18", "--batch", "64"),
        ("dense", "sparsetrain", "srste", "srste,n=1", "fst_sampled", "fst", "sdgp"),
        repeats=5,
    ),
    "resnet18_sdgp": Network(
        "ResNet-18, 224 pixels, batch 64: large groups of dY",
        ("--model", "resnet18", "--batch", "64"),
        ("dense", "sdgp,n=2,m=8", "sdgp,n=4,m=32"),
    ),
    "resnet18_sampled": Network(
        "ResNet-18, 224 pixels, batch 64: positions drawn, and 2:4 weights",
        ("--model", "resnet18", "--batch", "64"),
        ("dense", "fst_w", "sampled", "sampled,grad_input=0.5"),
    ),
    "vgg16": Network(
        "VGG-16, 224 pixels, batch 16",
        ("--model", "vgg16", "--batch", "16"),
        ("dense", "sparsetrain", "srste"),
    ),
    "resnet50": Network(
        "ResNet-50, 224 pixels, batch 32",
        ("--model", "resnet50", "--batch", "32"),
        ("dense", "srste", "srste,n=1"),
    ),
    "vit_small": Network(
        "ViT-S, 224 pixels, batch 16, linear layers",
        ("--model", "timm:vit_small_patch16_224", "--layers", "linear", "--batch", "16"),
        ("dense", "srste", "srste,n=1"),
    ),
    "ssd300": Network(
        "SSD300 (VGG-16), batch 4",
        ("--model", f"{DETECTION}ssd300_voc0712.py", "--batch", "4"),
        ("dense", "sparsetrain", "srste"),
    ),
    "faster_rcnn": Network(
        "Faster R-CNN (ResNet-50, FPN, frozen batch norm), batch 1",
        ("--model", f"{DETECTION}faster-rcnn_r50_fpn_voc0712.py", "--batch", "1"),
        ("dense", "sparsetrain", "srste"),
    ),
}


def main() -> None:
    """Measure what has not been measured, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="+", choices=[*NETWORKS], default=[*NETWORKS])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.only:
        measure(name, NETWORKS[name], options.threads)
    instructions = torch.backends.cpu.get_cpu_capability()
    out = ROOT / "docs" / "results" / f"cpu_zeros_{instructions.lower()}.md"
    out.write_text(page(options.threads), encoding="utf-8")


def files_of(name: str, threads: int) -> Path:
    """Path of what `fst bench` writes, without its ending."""
    instructions = torch.backends.cpu.get_cpu_capability()
    return ROOT / "benchmarks" / "out" / "steps" / f"{name}_{threads}_{instructions}"


def measured(name: str, threads: int) -> dict[str, Any] | None:
    """Data of a run that came to its end."""
    file = files_of(name, threads).with_suffix(".json")
    if not file.exists():
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    return None if "incomplete" in found["header"] else found


def measure(name: str, network: Network, threads: int) -> None:
    """Run `fst bench`, unless its files are there."""
    if measured(name, threads) is not None:
        return
    command = [sys.executable, str(ROOT / "tools" / "benchmark.py"), *network.options]
    command += ["--threads", str(threads), "--repeats", str(network.repeats)]
    command += ["--measure", "steps", "--strategies", *network.strategies]
    print(f"== {name}", flush=True)
    subprocess.run([*command, "--out", str(files_of(name, threads))], check=True, cwd=ROOT)


def page(threads: int) -> str:
    """Tables of all networks that were measured."""
    runs = {name: measured(name, threads) for name in NETWORKS}
    found = {name: run for name, run in runs.items() if run is not None}
    if not found:
        return ""
    header = next(iter(found.values()))["header"]
    lines = [
        f"# Training steps that leave zeros out, {header['instruction set']}",
        "",
        f"{header['device']}, {header['instruction set']}, torch {header['torch']}, float32,",
        f"{threads} threads, random images and weights. A step is forward, backward and SGD.",
        "`dense` is the control: this library with nothing pruned. All steps of a network run in",
        "turns, in both orders; times are medians with quartiles.",
        f"`python benchmarks/cpu/steps.py --threads {threads}`",
        "",
        "Only the three products get faster. `dense, our kernel` takes dW from a list of all",
        "positions, and leaves out the zeros of ReLU where that is faster.",
    ]
    for name, run in found.items():
        lines += ["", f"## {NETWORKS[name].title}", "", *rows(NETWORKS[name], run)]
    return "\n".join(lines) + "\n"


def rows(network: Network, run: dict[str, Any]) -> list[str]:
    """The table of a network."""
    steps = run["steps"]["step"]
    found = []
    for strategy in (PLAIN, CONTROL, *network.strategies):
        if strategy not in steps:
            continue
        ratio = steps[PLAIN]["median"] / steps[strategy]["median"]
        found.append([f"`{strategy}`", str(Timing(**steps[strategy])), f"{ratio:.2f}"])
    titles = ("strategy", "ms (quartiles)", "torch's time / time")
    header = run["header"]
    layout = header["memory_format"].removeprefix("torch.")
    rounds = f"{run['steps']['rounds']} rounds, memory format {layout}, commit {header['commit']}."
    return [table(titles, found, markdown=True), "", rounds]


if __name__ == "__main__":
    main()
