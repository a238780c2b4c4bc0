"""What cheaper weight gradients lose in each layer, and the plan for a budget (`fst.plan`)."""

from __future__ import annotations

import argparse

import fst
from fst.engine.model import within_root
from fst.plan import COSTS, best, check_budget, measure
from fst.rules.by_name import options_of
from fst.studies.analysis.commands.options import add_subject, subject_of
from fst.studies.analysis.result import Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    add_subject(parser, batches=6, batch_size=128, needs_data=True)
    parser.add_argument(
        "--budget", type=float, default=0.5, help="share of the dense cost (default: 0.5)"
    )
    parser.add_argument("--cost", choices=COSTS, default=COSTS[0], help=f"(default: {COSTS[0]})")


def run(options: argparse.Namespace) -> Result:
    """Measure all choices in all layers, and choose."""
    check_budget(options.budget, options.cost)
    subject = subject_of(options)
    model, _ = subject.converted(subject.strategy or fst.get_strategy("dense"))
    found = within_root(model, measure(model, subject.batches, loss=subject.loss))
    chosen = best(found, options.budget, options.cost)
    result = Result(
        "Cheaper weight gradients, layer by layer",
        f"{subject.title}; {options.batches} batches of {options.batch_size} images. Mean lost: "
        "|E g' - E g|^2 / |E g|^2 over batches and draws. Variance: that of a draw, beside that "
        "between batches.",
    )
    whole = sum(measured.multiply_adds for measured in found.values())
    rows = []
    for name, measured in found.items():
        for choice in measured.choices:
            rule = "dense" if choice.rule is None else str(choice.rule).removeprefix("input ")
            rows.append(
                [
                    name,
                    measured.multiply_adds / whole,
                    rule,
                    choice.multiply_adds / measured.multiply_adds,
                    choice.bias,
                    choice.variance,
                    choice.milliseconds,
                    "chosen" if chosen[name] is choice else "",
                ]
            )
    header = ["layer", "of all", "grad_weight", "multiply-adds", "mean lost", "variance", "ms", ""]
    result.add_table(f"Choices for {options.budget:.0%} of the {options.cost}", header, rows)
    plan = {name: options_of(choice.rule) for name, choice in chosen.items()}
    result.notes.append(f"In a config: sparsity = dict(..., plan={plan})")
    return result
