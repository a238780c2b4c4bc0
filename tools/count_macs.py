"""Which share of a model's multiply-adds runs sparse: one real training step per strategy.

    python tools/count_macs.py                          # the four detectors of configs/detection
    python tools/count_macs.py configs/fst_resnet50_imagenet.py --size 224 224 --out macs.md

Random images (of a detector at the size to which its config resizes them, with random boxes) and
random weights: no data set is needed, and the counts depend on sizes alone.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch

import fst
from fst.basics.text import table
from fst.engine.config import load_config
from fst.engine.sample import sample_step
from fst.rules.strategy import GEMMS
from fst.studies.analysis import MacReport, count_macs
from fst.studies.analysis.macs import total_cell

CONFIGS = (
    "configs/detection/_base_/ssd300_voc0712.py",
    "configs/detection/_base_/ssd300_coco.py",
    "configs/detection/_base_/faster-rcnn_r50_fpn_voc0712.py",
    "configs/detection/_base_/faster-rcnn_r50_fpn_1x_coco.py",
)
INTRODUCTION = """\
# How much of a model "fully sparse" is

A training step for one image, counted layer by layer and GEMM by GEMM. A cell reads
`GMAC: share in sparse GEMMs -> share left`: the multiply-adds (10⁹) of dense training, which part
of them lies in GEMMs with a pruned operand, and which part of all of them the strategy leaves.

- Counted are the GEMMs that autograd computes in this step. A frozen stage has no weight gradient;
  what lies below it, and the first layer, has no grad_input. Neither is in any number, dense or
  sparse: nobody pays for it. Only the output of a frozen stage is computed. The configs of Faster
  R-CNN leave it dense (`exclude`): pruned, its pretrained weights could never adapt.
- A layer that several feature maps share (a detector's RPN head) counts once for each of them.
- 2:4 leaves a half. More is left where a group is short (3 input channels keep 2), in grad_weight
  where a row has an odd width (its last position stands alone), and all of it in 1x1 maps.
- Fully connected layers stay dense, as in the paper. A two-stage detector's are those of its RoI
  head; they are `linear` in the tables. `--all` converts them, and what a config excludes.
- The counts say what the strategies leave, not what runs faster: only grad_weight of `fst` does
  fewer multiply-adds on today's code path, the other two GEMMs are dense arithmetic on pruned
  values (`simulated` in the report of a conversion).
"""


class Counted(NamedTuple):
    """A config's model under one strategy."""

    config: str
    strategy: str
    batch_shape: tuple[int, ...]
    macs: MacReport


def main(arguments: Sequence[str] | None = None) -> None:
    """Count, print, write."""
    command_line = parser()
    options = command_line.parse_args(arguments)
    counted = []
    for path in options.configs:
        for strategy in options.strategies:
            print(f"{path}, {strategy} …", file=sys.stderr, flush=True)
            try:
                counted.append(count(path, strategy, options))
            except (ValueError, FileNotFoundError, ImportError) as error:
                command_line.error(str(error))
    command = shlex.join(["python", "tools/count_macs.py", *(arguments or sys.argv[1:])])
    text = markdown(command, counted)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "configs",
        nargs="*",
        default=CONFIGS,
        metavar="CONFIG",
        help="training configs (SSD and Faster R-CNN, PASCAL VOC and COCO)",
    )
    made.add_argument(
        "--strategies",
        nargs="+",
        default=["fst", "sdgp"],
        choices=fst.list_strategies(),
        metavar="NAME",
        help=f"of: {', '.join(fst.list_strategies())} (fst sdgp)",
    )
    made.add_argument(
        "--size",
        type=int,
        nargs=2,
        metavar=("HEIGHT", "WIDTH"),
        help="of the image; a detector's config says it otherwise",
    )
    made.add_argument(
        "--all",
        action="store_true",
        help="convert what the strategy or the config leaves dense, fully connected layers too",
    )
    made.add_argument("--out", type=Path, help="file to write, besides printing")
    return made


def count(path: str, strategy: str, options: argparse.Namespace) -> Counted:
    """Convert the model of a config, with its include and exclude, and count one step."""
    torch.manual_seed(0)
    config = load_config(path)
    size = tuple(options.size) if options.size else None
    step = sample_step(config, 1, size)
    sparsity = config.get("sparsity") or {}
    selection = {key: sparsity[key] for key in ("include", "exclude") if key in sparsity}
    if options.all:
        selection = {"include": [torch.nn.Conv2d, torch.nn.Linear]}
    conversion = fst.convert(step.root, strategy, **selection)
    optimizer = torch.optim.SGD(step.root.parameters(), lr=0.1)
    fst.attach(step.root, optimizer, total_steps=1000, steps_per_epoch=100)  # some rules need it
    macs = count_macs(step.root, lambda: step.loss(step.model).backward(), conversion.skipped)
    return Counted(path, strategy, step.batch_shape, macs)


def markdown(command: str, counted: list[Counted]) -> str:
    """The report."""
    lines = [INTRODUCTION, *_versions(command), "", "## Convolutions", ""]
    rows = [
        (
            f"`{Path(c.config).stem}`",
            "x".join(map(str, c.batch_shape)),
            c.strategy,
            *(total_cell(c.macs.total(gemm)) for gemm in (*GEMMS, None)),
            total_cell(c.macs.total(kind=None)),
        )
        for c in counted
    ]
    header = ("config", "batch", "strategy", *GEMMS, "three GEMMs", "with linear layers")
    lines.append(table(header, rows, markdown=True))
    for c in counted:
        lines += ["", f"## {Path(c.config).stem}, {c.strategy}", ""]
        lines += [c.macs.by_module(markdown=True), "", "Not sparse, or not computed:", ""]
        lines.append(c.macs.exceptions(markdown=True))
        if c.macs.idle:
            lines += ["", f"Did not run: {', '.join(c.macs.idle)}"]
        if c.macs.uncounted:
            lines += ["", f"Not counted: {', '.join(c.macs.uncounted)}"]
    return "\n".join(lines) + "\n"


def _versions(command: str) -> list[str]:
    packages = ("torch", "onedl-mmdetection", "onedl-mmcv")
    found = ", ".join(f"{package} {_version(package)}" for package in packages)
    return [
        f"- command: `{command}`",
        f"- versions: Python {platform.python_version()}, fst {fst.__version__}, {found}",
    ]


def _version(package: str) -> str:
    """Its version, or that of the upstream distribution."""
    for name in (package, package.replace("onedl-mmdetection", "mmdet").removeprefix("onedl-")):
        try:
            return version(name)
        except ModuleNotFoundError:  # PackageNotFoundError is one
            continue
    return "not installed"


if __name__ == "__main__":
    main()
