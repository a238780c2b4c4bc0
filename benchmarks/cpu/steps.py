"""Training steps that leave zeros out, network by network, on one page with their goals.

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
from page import (
    BOLD,
    OUT,
    RESULTS,
    ROOT,
    Goals,
    goal_cell,
    goal_of,
    is_reached,
    machine,
    operations_page,
)
from torch.profiler import ProfilerActivity, profile

from fst.backends.timing import Timing
from fst.basics.arguments import positive
from fst.basics.text import table
from fst.lab.benchmark.steps import CONTROL, PLAIN
from fst.lab.model import from_config, from_name, is_config

# of torch: convolutions forwards and backwards, linear layers
PRODUCTS = ("aten::mkldnn_convolution", "aten::convolution_backward", "aten::addmm", "aten::mm")
DETECTION = "fst::configs/detection/fst_"


class Network(NamedTuple):
    """A run of `fst bench`.

    Attributes:
        title: of its table.
        options: of `fst bench`.
        goals: strategy -> torch's time over its own: with AVX2, with AVX-512.
        repeats: rounds.
        memory: True where the peak of a step's memory is measured too.
    """

    title: str
    options: tuple[str, ...]
    goals: dict[str, Goals | None]
    repeats: int = 3
    memory: bool = False


NETWORKS = {
    "resnet18": Network(
        "ResNet-18, 224 pixels, batch 64",
        ("--model", "resnet18", "--batch", "64"),
        {
            "dense": None,
            "sparsetrain": (1.25, 1.1),
            "srste": (1.6, 1.35),
            "srste,n=1": (2.1, 1.7),
            "fst_sampled": (1.7, 1.4),
            "fst": (1.7, 1.4),
            "sdgp": (1.1, 1.05),
        },
        repeats=5,
        memory=True,
    ),
    "resnet18_sdgp": Network(
        "ResNet-18, 224 pixels, batch 64: large groups of dY",
        ("--model", "resnet18", "--batch", "64"),
        {"dense": None, "sdgp,n=2,m=8": None, "sdgp,n=4,m=32": (1.25, 1.15)},
    ),
    "resnet18_sampled": Network(
        "ResNet-18, 224 pixels, batch 64: positions drawn, and 2:4 weights",
        ("--model", "resnet18", "--batch", "64"),
        {"dense": None, "fst_w": None, "sampled": None, "sampled,grad_input=0.5": None},
    ),
    "vgg16": Network(
        "VGG-16, 224 pixels, batch 16",
        ("--model", "vgg16", "--batch", "16"),
        {"dense": None, "sparsetrain": (1.7, 1.35), "srste": (1.9, 1.5)},
    ),
    "resnet50": Network(
        "ResNet-50, 224 pixels, batch 32",
        ("--model", "resnet50", "--batch", "32"),
        {"dense": None, "srste": (1.25, 1.1), "srste,n=1": (1.5, 1.25)},
    ),
    "vit_small": Network(
        "ViT-S, 224 pixels, batch 16, linear layers",
        ("--model", "timm:vit_small_patch16_224", "--layers", "linear", "--batch", "16"),
        {"dense": None, "srste": (1.2, 1.2), "srste,n=1": (1.7, 1.7)},
    ),
    "ssd300": Network(
        "SSD300 (VGG-16), batch 4",
        ("--model", f"{DETECTION}ssd300_voc0712.py", "--batch", "4"),
        {"dense": None, "sparsetrain": (1.5, 1.2), "srste": (1.6, 1.3)},
    ),
    "faster_rcnn": Network(
        "Faster R-CNN (ResNet-50, FPN, frozen batch norm), batch 1",
        ("--model", f"{DETECTION}faster-rcnn_r50_fpn_voc0712.py", "--batch", "1"),
        {"dense": None, "sparsetrain": (1.15, 1.1), "srste": (1.2, 1.1)},
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
        file = share_file(name, options.threads)
        if not file.exists():
            file.write_text(json.dumps(share_of_products(NETWORKS[name])), encoding="utf-8")
    instructions = torch.backends.cpu.get_cpu_capability()
    out = RESULTS / f"cpu_zeros_{instructions.lower()}.md"
    out.write_text(page(options.threads), encoding="utf-8")


def files_of(name: str, threads: int) -> Path:
    """Path of what `fst bench` writes, without its ending."""
    instructions = torch.backends.cpu.get_cpu_capability()
    return OUT / "steps" / f"{name}_{threads}_{instructions}"


def share_file(name: str, threads: int) -> Path:
    """Of `share_of_products`."""
    return files_of(name, threads).with_suffix(".share.json")


def share_of_products(network: Network) -> float:
    """Part of torch's step that its convolutions or linear layers take, by torch.profiler."""
    named = dict(zip(network.options[::2], network.options[1::2], strict=True))
    build = from_config if is_config(named["--model"]) else from_name
    step = build(named["--model"], int(named["--batch"])).candidate(None)[1]
    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    times = {event.key: event.self_cpu_time_total for event in profiled.key_averages()}
    return sum(times.get(name, 0.0) for name in PRODUCTS) / sum(times.values())


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
    what = ("steps", "memory") if network.memory else ("steps",)
    command += ["--measure", *what, "--strategies", *network.goals]
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
        f"{machine(header)}, {threads} threads, float32, random images and weights.",
        "A step is forward, backward and SGD. `dense` is the control: this library with nothing",
        "pruned. All steps of a network run in turns, in both orders; times are medians with",
        f"quartiles. {BOLD} `python benchmarks/cpu/steps.py --threads {threads}`",
        "",
        "Only the three products get faster: "
        f"[their times alone]({operations_page().name}). `dense, our kernel` takes dW from a list",
        "of all positions, and leaves out the zeros of ReLU where that is faster.",
    ]
    for name, run in found.items():
        lines += ["", f"## {NETWORKS[name].title}", "", *rows(NETWORKS[name], run)]
        if (file := share_file(name, threads)).exists():
            share = json.loads(file.read_text(encoding="utf-8"))
            lines += [f"The products are {share:.0%} of torch's step (torch.profiler)."]
            lines += missed(NETWORKS[name], run, share)
    return "\n".join(lines) + "\n"


def rows(network: Network, run: dict[str, Any]) -> list[str]:
    """The table of a network."""
    steps, memory = run["steps"]["step"], run["memory"]
    plain = steps[PLAIN]["median"]
    control = plain / steps["dense"]["median"]
    found = []
    for strategy in (PLAIN, CONTROL, *network.goals):
        if strategy not in steps:
            continue
        ratio = plain / steps[strategy]["median"]
        goal = goal_cell(network.goals.get(strategy), ratio, control)
        peak = memory.get(strategy, {}).get("peak")
        share = f"{peak / memory[PLAIN]['peak']:.2f}" if peak else ""
        found.append([f"`{strategy}`", str(Timing(**steps[strategy])), f"{ratio:.2f}", goal, share])
    titles = ("strategy", "ms (quartiles)", "torch's time / time", "goal", "peak memory / torch's")
    header = run["header"]
    layout = header["memory_format"].removeprefix("torch.")
    rounds = f"{run['steps']['rounds']} rounds, memory format {layout}, commit {header['commit']}."
    return [table(titles, found, markdown=True), "", rounds]


def missed(network: Network, run: dict[str, Any], share: float) -> list[str]:
    """Each goal that is missed, and why: the speed of the products, and the one it would take.

    Args:
        share: of the products in torch's step; nothing is gained in the rest.
    """
    steps, lines = run["steps"]["step"], []
    plain = steps[PLAIN]["median"]
    control = plain / steps["dense"]["median"]
    for strategy, goals in network.goals.items():
        ratio = plain / steps[strategy]["median"]
        if goals is None or is_reached(goals, ratio, control):
            continue
        runs, needed = (share / (1 / r - 1 + share) for r in (ratio, goal_of(goals)))
        lines.append(
            f"- `{strategy}`: {ratio:.2f} instead of {goal_of(goals)}. The rest of a step gains "
            f"nothing, so its products ran at {runs:.2f} times torch's speed; the goal takes "
            f"{needed:.2f}."
        )
    return ["", "Goals that are missed:", "", *lines] if lines else []


if __name__ == "__main__":
    main()
