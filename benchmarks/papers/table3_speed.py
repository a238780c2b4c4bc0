"""The speed of every system of FST's Table 3, and of SDGP, by measured training steps on a CPU.

    python benchmarks/papers/table3_speed.py resnet18 resnet50

With ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 the same on a machine with AVX-512.

A dense network of full width is trained on Imagenette first (configs/imagenette_subset.py), in
WORK_DIR/NETWORK_N_images. Each system goes on from its weights, on one batch of photographs of 224
pixels. Its masks act before its step is timed. Systems are timed a few at a time, in turns with
plain PyTorch and with the library's dense control. Their results lie in WORK_DIR/NETWORK_ISA.json;
the same command goes on with the systems that are missing there. The page has all of these files.
"""

from __future__ import annotations

import argparse
import copy
import json
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from model_under_test import ModelUnderTest, from_config
from table3_systems import BATCHES, CONTROL, SYSTEMS, System
from torch import nn

from fst import get_strategy
from fst.api.report import describe_layer
from fst.backends.record import STEPS
from fst.backends.timing import Timing, sample
from fst.baselines.channel_removal import channel_groups, channel_maxima, remove_channels
from fst.basics.arguments import add_traceback, positive, user_errors
from fst.basics.machine import keep_freed_memory
from fst.basics.values import one_of
from fst.cli.environment import surroundings
from fst.cli.options.parsing import add_cfg_options
from fst.files.checkpoint import write_text_atomically
from fst.lab.ablation.runs import as_text
from fst.lab.benchmark.layers import PLAIN
from fst.lab.document import Document, Table, markdown
from fst.lab.model import Training
from fst.layers.coverage import multiply_adds
from fst.layers.modules import SparseLayer, sparse_layers
from fst.rules.strategy import GEMMS
from fst.training.engine.checkpoint import newest_checkpoint
from fst.training.engine.config import load_config, set_epochs
from fst.training.engine.model import sparse_root

CONFIG = "configs/imagenette_subset.py"
WIDTHS = (64, 128, 256, 512)  # of the four stages, in both networks
SIZE = 224
COUNTED = 2  # images of a count of multiply-adds
LISTED = "listed_zeros"  # the backend that leaves out positions and zeros
# product -> backend that leaves zeros out -> whose; in a layer's record under one of these names
ZEROS = {
    "output": {"zeros_weight": ("W", "weight"), "zeros_input": ("X", "input")},
    "grad_input": {
        "zeros_weight": ("W", "transposed", "weight"),
        "zeros_grad_output": ("dY", "grad_output"),
    },
    "grad_weight": {
        "zeros_input": ("X", "input"),
        "zeros_grad_output": ("dY", "dY of grad_weight", "grad_output"),
    },
}


class Trained(NamedTuple):
    """A dense network in training, on one batch of photographs.

    Attributes:
        training: what every system goes on with.
        images: a few of the batch as `sparse_root` sees them, for counts.
    """

    training: Training
    images: torch.Tensor


def main(argv: Sequence[str] | None = None) -> int:
    """Train, time what is missing, write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("networks", nargs="*", help="resnet18, resnet50; none: only the page")
    parser.add_argument("--batch", type=positive, help="images (resnet18: 32, resnet50: 16)")
    parser.add_argument("--rounds", type=positive, default=3, help="timed steps of each (3)")
    parser.add_argument("--epochs", type=positive, default=2, help="of the dense training (2)")
    parser.add_argument("--images", type=positive, default=1200, help="of that training (1200)")
    parser.add_argument("--together", type=positive, default=10, help="systems in memory (10)")
    parser.add_argument("--threads", type=positive, help="(default: torch's)")
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, metavar="SYSTEM", help="of the table")
    parser.add_argument("--work-dir", type=Path, default=Path("work_dirs/table3_speed"))
    parser.add_argument("--out", type=Path, help="page to write (WORK_DIR/table3_speed.md)")
    add_cfg_options(parser)
    add_traceback(parser)
    options = parser.parse_args(argv)
    with user_errors(options):
        if options.threads:
            torch.set_num_threads(options.threads)
        keep_freed_memory()
        for network in options.networks:
            one_of("network", network, tuple(BATCHES))
            _complete(network, options)
        words = sys.argv[1:] if argv is None else argv
        page = options.out or options.work_dir / "table3_speed.md"
        write_text_atomically(markdown(describe(options.work_dir, words)), page)
    print(f"written: {page}")
    return 0


def _complete(network: str, options: argparse.Namespace) -> None:
    """Time the systems that have no result yet."""
    capability = torch.backends.cpu.get_cpu_capability().replace(" ", "-")
    path = options.work_dir / f"{network}_{capability}.json"
    batch = options.batch or BATCHES[network]
    same = {"batch": batch, "epochs": options.epochs, "images": options.images}
    same["threads"] = torch.get_num_threads()
    found: dict[str, Any] = {"network": network, **same, "systems": {}}
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        for name, value in same.items():
            if found[name] != value:
                raise ValueError(f"--{name} {value}: {path} has results of {found[name]}.")
    missing = [name for name in options.only or SYSTEMS if name not in found["systems"]]
    if not missing:
        return
    trained = _trained(network, batch, options)
    found["made with"] = surroundings(torch.device("cpu"))
    for first in range(0, len(missing), options.together):
        names = missing[first : first + options.together]
        systems = {name: SYSTEMS[name] for name in (CONTROL, *names)}
        print(f"{network}: {', '.join(systems)} …", flush=True)
        timed = measure(trained, systems, options.rounds)
        code = {"commit": found["made with"].get("commit", "unknown")}
        found["systems"] |= {name: {**timed[name], **code} for name in names}
        write_text_atomically(json.dumps(found, indent=1) + "\n", path)


def _trained(network: str, batch: int, options: argparse.Namespace) -> Trained:
    """The dense network after its training, which goes on if it was interrupted."""
    folder = options.work_dir / f"{network}_{options.images}_images"
    folder.mkdir(parents=True, exist_ok=True)
    path, architecture = folder / "trained.py", "model.architecture"
    changes = {f"{architecture}.name": network, f"{architecture}.channels": WIDTHS}
    changes |= {"model.channels_last": True, "train_dataloader.dataset.subset": options.images}
    config = load_config(CONFIG, {**changes, **options.cfg_options})
    set_epochs(config, options.epochs)
    config.train_cfg.val_begin = options.epochs + 1
    write_text_atomically(as_text(config), path)
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None or Path(checkpoint).name != f"epoch_{options.epochs}.pth":
        command = [sys.executable, "-m", "fst", "train", str(path), "--work-dir", str(folder)]
        subprocess.run([*command, *(["--resume"] if checkpoint else [])], check=True)
    large = {"train_dataloader.dataset.transforms": [{"type": "RandomResizedCrop", "size": SIZE}]}
    checkpoint = newest_checkpoint(folder)
    tested = from_config(str(path), large, checkpoint=checkpoint, batch_size=batch)
    return of_tested(tested)


def of_tested(tested: ModelUnderTest) -> Trained:
    """Its model, and the loss on its first batch."""
    (images,) = tested.batches
    training = Training(tested.model, lambda model: tested.loss(model, images), sparse_root)
    return Trained(training, images["inputs"][:COUNTED])


def measure(
    trained: Trained, systems: Mapping[str, System], rounds: int
) -> dict[str, dict[str, Any]]:
    """Time a step of each system in turns, beside torch's; what it leaves out, and how it runs."""
    steps: dict[str, Callable[[], object]] = {PLAIN: trained.training.candidate(None)[1]}
    steps[PLAIN]()
    models: dict[str, nn.Module] = {}
    macs = {}
    for name, system in systems.items():
        training = _smaller(trained, system.removed)
        macs[name] = _multiply_adds(sparse_root(training.model), trained.images)
        if system.exclude is not None:
            training = replace(training, selection={"exclude": system.exclude})
        strategy = get_strategy(system.strategy)
        models[name], steps[name] = training.candidate(strategy)
        steps[name]()
        if strategy.schedule is not None:  # its masks act after the first step
            for layer in sparse_layers(models[name]).values():
                layer.state.record.shares.clear()
                layer.transient.plans.clear()
            steps[name]()
    taken = sample(steps, rounds, trained.training.device, warmup=0)
    whole = _multiply_adds(sparse_root(trained.training.model), trained.images)
    return {
        name: {
            "ms": taken[name].done,
            "torch ms": taken[PLAIN].done,
            **products(sparse_root(model), macs[name], whole),
        }
        for name, model in models.items()
    }


def _smaller(trained: Trained, share: float) -> Training:
    """Without this share of each group of channels: those whose largest weight is smallest."""
    if not share:
        return trained.training
    model = copy.deepcopy(trained.training.model)
    root = sparse_root(model)
    producers = [module for module in root.modules() if isinstance(module, nn.Conv2d)]
    removed = []
    for group in channel_groups(root, trained.images, producers):
        if not group.obstacle:
            order = channel_maxima(root, group).argsort()
            mask = torch.zeros(group.size, dtype=torch.bool)
            mask[order[: int(share * group.size)]] = True
            removed.append((group, mask))
    remove_channels(root, removed)
    return replace(trained.training, model=model)


def _multiply_adds(model: nn.Module, images: torch.Tensor) -> dict[str, dict[str, int]]:
    """Convolution -> product -> multiply-adds of a step."""
    counted = multiply_adds(model, images)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    found = {name: dict.fromkeys(GEMMS, counted[f"{name}.weight"]) for name in names}
    found[names[0]]["grad_input"] = 0  # images need no gradient
    return found


def products(
    model: nn.Module,
    macs: Mapping[str, Mapping[str, int]],
    whole: Mapping[str, Mapping[str, int]],
) -> dict[str, Any]:
    """Of each product: shares of zeros, by multiply-adds; the share of the dense network's
    multiply-adds that is left out; how many layers run how.
    """
    layers = sparse_layers(model)
    zeros: dict[str, dict[str, float]] = {}
    left: dict[str, float] = {}
    ran: dict[str, dict[str, int]] = {}
    for gemm in GEMMS:
        dense = {name: of[gemm] for name, of in macs.items()}
        total = sum(dense.values())
        zeros[gemm] = {
            operand: sum(dense[name] * _share(layer, names) for name, layer in layers.items())
            / total
            for operand, *names in ZEROS[gemm].values()
        }
        left[gemm] = sum(
            work * (_kept(layers[name], gemm) if name in layers else 1)
            for name, work in dense.items()
        )
        modes = Counter(describe_layer(layer).gemms[gemm].mode for layer in layers.values())
        ran[gemm] = dict(modes + Counter({"not converted": len(macs) - len(layers)}))
    of = {gemm: sum(layer[gemm] for layer in whole.values()) for gemm in GEMMS}
    out = {gemm: 1 - left[gemm] / of[gemm] for gemm in GEMMS}
    out["all"] = 1 - sum(left.values()) / sum(of.values())
    return {"zeros": zeros, "left out": out, "ran": ran}


def _share(layer: SparseLayer, names: Sequence[str]) -> float:
    """The share of zeros that the layer has counted under the first of these names, else 0."""
    shares = layer.state.record.shares
    return next((shares[name] / STEPS for name in names if name in shares), 0.0)


def _kept(layer: SparseLayer, gemm: str) -> float:
    """The share of a product's multiply-adds that the layer's backend does."""
    decision = layer.state.record.decisions.get(gemm)
    if decision is None or not decision.skipped:
        return 1.0
    if decision.backend in ZEROS[gemm]:
        return 1 - _share(layer, ZEROS[gemm][decision.backend][1:])
    rule = layer.strategy.rule(gemm)
    assert rule is not None  # others leave positions out, by a rule
    zeros = _share(layer, ["input"]) if decision.backend == LISTED else 0.0
    return rule.density * (1 - zeros)


def describe(work_dir: Path, words: Sequence[str]) -> Document:
    """The page: two tables for each file of results."""
    document = Document(
        "FST's Table 3 as measured speed",
        "A training step (forward, backward, SGD) of each system on a CPU. A dense network of full "
        "width is trained on Imagenette; each system goes on from its weights, with its own masks, "
        f"on photographs of {SIZE} pixels. A strategy says what is pruned; each layer leaves zeros "
        "out of a product where that is measured to be faster.",
        command=shlex.join(["python", "benchmarks/papers/table3_speed.py", *words]),
    )
    for path in sorted(work_dir.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        network, timed = found["network"], found["systems"]
        made = found["made with"]
        title = f"{network}, {made['instruction set']}"
        rounds = min(len(of["ms"]) for of in timed.values())
        commits = " and ".join(dict.fromkeys(of["commit"] for of in timed.values()))
        plain = [Timing.of(of["torch ms"]).median for of in timed.values()]
        caption = (
            f"Batch {found['batch']}, after {found['epochs']} dense epochs of {found['images']} "
            f"photographs; {made['device']}, {found['threads']} threads, torch {made['torch']}, "
            f"commit {commits}, C++ kernels {made['C++ kernels']}, float32, channels_last. Medians "
            f"(and quartiles) of {rounds} rounds, in turns with plain PyTorch, whose time over the "
            "system's is the speed; in brackets, the same of the fastest steps. PyTorch's own time "
            f"moved between {min(plain):.0f} and {max(plain):.0f} ms. Paper: the speed in FST's "
            "Table 3 or in SDGP; – where it names none, empty where it has no such row. "
            "Left out: of the multiply-adds of the convolutions' three products."
        )
        rows = [_speed_row(name, timed[name], network) for name in SYSTEMS if name in timed]
        columns = ["system", "ms (quartiles)", "speed", "paper", "left out", "why they differ"]
        document.tables.append(Table(f"Speed: {title}", columns, rows, caption))
        rows = [_product_row(name, timed[name]) for name in SYSTEMS if name in timed]
        caption = (
            "Shares of zeros in the operands, weighted by multiply-adds; each layer knows them in "
            "eighths, and counts them only where a kernel could leave them out. Then the share of "
            "the product's multiply-adds that is left out, and the number of layers: accelerated "
            "(something is left out), simulated (dense arithmetic on pruned values) or dense."
        )
        document.tables.append(Table(f"Products: {title}", ["system", *GEMMS], rows, caption))
    return document


def _speed_row(name: str, found: Mapping[str, Any], network: str) -> list[Any]:
    system, own, plain = SYSTEMS[name], found["ms"], found["torch ms"]
    speed = Timing.of(plain).median / Timing.of(own).median
    out = f"{found['left out']['all']:.0%}"
    paper = system.paper.get(network, "")
    best = f"{speed:.2f} ({min(plain) / min(own):.2f})"
    return [name, str(Timing.of(own)), best, paper, out, system.why]


def _product_row(name: str, found: Mapping[str, Any]) -> list[Any]:
    cells = [name]
    for gemm in GEMMS:
        zeros = ", ".join(f"{of} {share:.0%}" for of, share in found["zeros"][gemm].items())
        ran = ", ".join(f"{count} {mode}" for mode, count in found["ran"][gemm].items())
        cells.append(f"zeros {zeros}; left out {found['left out'][gemm]:.0%}; {ran}")
    return cells


if __name__ == "__main__":
    sys.exit(main())
