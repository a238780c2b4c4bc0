"""The command lines of the lab: ablations, benchmarks, the demo."""

from __future__ import annotations

import argparse
from pathlib import Path

from fst.basics.arguments import positive
from fst.cli.options.parsing import DTYPES, SIZE, add_cfg_options, command

MEASURES = ("layers", "steps", "compiled")
BENCHED = ["dense", "sampled", "sparsetrain", "srste", "fst_sampled", "fst"]
ROUNDS = 15  # of every comparison, where --repeats does not say it
STEP_SECONDS = 40.0  # of training steps, without --repeats
BENCH = """\
Time layers, GEMM by GEMM, and training steps: on random data, in one run, in turns.

    fst bench
    fst bench --batch 16 --measure layers steps
    fst bench --model timm:vit_small_patch16_224 --layers linear --batch 8 --measure layers
    fst bench --model resnet50 --batch 256 --dtype bfloat16 --measure steps compiled
    fst bench --model fst::configs/detection/fst_ssd300_voc0712.py --batch 2 --measure steps
    fst bench --infer resnet18 --batch 1 16 --threads 1

Prints Markdown tables: ratios to torch's dense layer and training step (above 1 is faster), and
the backends chosen and why. Writes them to OUT.md, and all times to OUT.json."""
DEMONSTRATED = ["dense", "srste", "fst", "sampled", "sdgp"]


def ablate() -> argparse.ArgumentParser:
    """`fst ablate`."""
    parser = command(
        "ablate",
        "Train a grid of settings and seeds, and compare them with published numbers. "
        "The same command goes on where an earlier one stopped.",
    )
    add = parser.add_argument
    add("grid", type=Path, help="grid file, or a packaged one: fst::configs/ablation/...")
    add("--work-dir", type=Path, help="folder (default: work_dirs/ablation/<grid name>)")
    add("--jobs", type=positive, default=1, help="runs at once (default: 1)")
    add("--seeds", type=int, nargs="+", help="instead of the grid's")
    add("--epochs", type=positive, help="per run, instead of the config's")
    add("--only", nargs="+", metavar="SETTING", help="only these settings")
    add_cfg_options(parser, "changes to the configs of all settings")
    add("--dry-run", action="store_true", help="check and list the runs")
    before = "write the results of the finished runs; the other options are those that trained them"
    add("--report-only", action="store_true", help=before)
    return parser


def bench() -> argparse.ArgumentParser:
    """`fst bench`."""
    parser = command("bench", BENCH)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    model = (
        "a classifier of torchvision, [timm:|fst:]NAME, or a training config, PATH.py or "
        "fst::configs/... (resnet18)"
    )
    add("--model", default="resnet18", metavar="NAME", help=model)
    layers = "which layers of a named --model are sparse and timed (conv; a config says it itself)"
    add("--layers", choices=("conv", "linear", "all"), help=layers)
    infer = (
        "instead: inference of this model (as --model) on a CPU: torch, torch.compile with "
        "freezing, ONNX Runtime, OpenVINO, and packed models at 2:4 and 1:4"
    )
    add("--infer", metavar="NAME", help=infer)
    batch = "batch size; several for --infer (8)"
    add("--batch", type=positive, nargs="+", default=[8], metavar="N", help=batch)
    size = "of the images; one number for squares (224; detectors: as the config resizes)"
    add("--size", **SIZE, help=size)
    strategies = (
        "strategies to compare, with options or without, such as sampled,keep=0.25 "
        f"({' '.join(BENCHED)})"
    )
    add("--strategies", nargs="+", default=BENCHED, metavar="NAME", help=strategies)
    add("--dtype", choices=DTYPES, default="float32", help="of the GEMMs (float32)")
    measure = (
        f"of {', '.join(MEASURES)}: times of each layer; of training steps, eager; steps with "
        "torch.compile too (steps)"
    )
    add("--measure", nargs="+", choices=MEASURES, default=["steps"], metavar="WHAT", help=measure)
    forced = "the step of each strategy also with these backends, where they can compute"
    add("--force-backends", default="", metavar="OPERATION=BACKEND,...", help=forced)
    repeats = (
        f"rounds, whose median counts ({ROUNDS}; of training steps as many of them as "
        f"fit into {STEP_SECONDS:.0f} seconds)"
    )
    add("--repeats", type=positive, help=repeats)
    threads = "CPU threads; several for --infer (torch's default)"
    add("--threads", type=positive, nargs="+", metavar="N", help=threads)
    processor = (
        "on a CPU: what the process spends on its processors, not wall-clock time; with "
        "--threads 1, for a machine that others use at the same time"
    )
    add("--processor-time", action="store_true", help=processor)
    out, written = Path("benchmarks/out/benchmark"), "files to write, without their ending"
    add("--out", type=Path, default=out, help=f"{written} ({out})")
    return parser


def demo() -> argparse.ArgumentParser:
    """`fst demo`."""
    text = "Train dense and sparse networks on cluttered digits and compare them."
    parser = command("demo", text)
    add = parser.add_argument
    compared = f"what to compare (default: {' '.join(DEMONSTRATED)})"
    add("--strategies", nargs="+", default=DEMONSTRATED, metavar="NAME", help=compared)
    add("--epochs", type=positive, default=6, help="per run (default: 6)")
    add("--seeds", type=int, nargs="+", default=[0, 1], help="a run each (default: 0 1)")
    threads = "of PyTorch (default: 1, robust on busy cores)"
    add("--threads", type=positive, default=1, help=threads)
    add("--repeats", type=positive, default=10, help="timings (default: 10)")
    out = Path("work_dirs/demo")
    add("--out", type=Path, default=out, help=f"folder (default: {out})")
    return parser
