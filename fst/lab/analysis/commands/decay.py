"""Which λ of SR-STE's decay keeps masks steady: flip rates of a short warm-up."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence

import torch
from matplotlib.figure import Figure

from fst.engine.checks import check_config
from fst.engine.config import load_config
from fst.lab.analysis.flips import DENSE, flip_rates
from fst.lab.reporting.document import Document
from fst.lab.reporting.figures import COLOURS, INK

NOTES = (
    "Flip rate: share of all masks' elements that differ from the step before, mean over the "
    "second half of the steps. Ratio: over that of the masks which the strategy's rule would "
    "choose for the weights of a dense training, from the same seed (Hu et al., ICML 2024).",
    "Too small a ratio holds masks that are not found yet, too large a one lets them oscillate. "
    "The range that counts as good is the paper's, for transformers; it is quoted from memory and "
    "was not checked against the paper's text. It is no promise of accuracy.",
)


def run(options: argparse.Namespace) -> Document:
    """Train a little dense and with each λ, and compare."""
    low, high = options.ratio
    if not 0 < low < high < math.inf:
        raise ValueError(f"--ratio {low:g} {high:g}: give two numbers, 0 < LOW < HIGH.")
    if options.threads:
        torch.set_num_threads(options.threads)
    config = load_config(options.config, options.cfg_options)
    check_config(config, ("train_dataloader",))
    seed = {"seed": 0, **(config.get("randomness") or {})}
    config.randomness = seed if options.seed is None else {**seed, "seed": options.seed}
    decays = sorted(set(options.decays))
    found = flip_rates(config, decays, options.steps)
    means = {decay: _late(rates) for decay, rates in found.items()}
    dense = means.pop(DENSE)
    if not dense:
        raise ValueError(f"--steps {options.steps}: no mask flips in dense training; use more.")
    ratios = {decay: mean / dense for decay, mean in means.items() if decay is not None}
    result = Document(
        "Decay by flip rate",
        f"{options.config}, strategy {config.sparsity['strategy']}, the first {options.steps} "
        f"optimizer steps, seed {config.randomness['seed']}. {verdict(ratios, low, high)}",
        notes=list(NOTES),
    )
    rows: list[list[object]] = [["dense", dense, 1.0, ""]]
    rows += [
        [f"{decay:g}", means[decay], ratio, "yes" if low <= ratio <= high else "no"]
        for decay, ratio in ratios.items()
    ]
    columns = ["λ", "flip rate", "ratio to dense", f"{low:g} to {high:g}"]
    result.add_table("Flip rates", columns, rows)
    labelled = {"dense" if d is DENSE else f"λ = {d:g}": rates for d, rates in found.items()}
    result.add_figure(
        "Flip rates", "decay", "Flip rate by optimizer step.", _drawn(labelled), options.out
    )
    return result


def _late(rates: Mapping[int, float]) -> float:
    """The mean over the second half of the looks."""
    values = list(rates.values())
    late = values[len(values) // 2 :]
    return sum(late) / len(late)


def verdict(ratios: Mapping[float, float], low: float, high: float) -> str:
    """Which λ to take, of those tried, in a sentence.

    That is the one whose ratio is in the middle of the range, as a factor.
    """
    good = {decay: ratio for decay, ratio in ratios.items() if low <= ratio <= high}
    if good:
        middle = math.log(low * high) / 2
        best = min(good, key=lambda decay: abs(math.log(good[decay]) - middle))
        return f"Take decay={best:g}: ratio {good[best]:.3g}."
    above = [decay for decay, ratio in ratios.items() if ratio > high]
    below = [decay for decay, ratio in ratios.items() if ratio < low]
    if not below:
        return f"Every λ tried lets masks flip too often: try more than {max(above):g}."
    if not above:
        return f"Every λ tried holds masks too fast: try less than {min(below):g}."
    return f"None is between {low:g} and {high:g}: try λ between {_around(above, below)}."


def _around(above: Sequence[float], below: Sequence[float]) -> str:
    largest = max((decay for decay in above if decay < max(below)), default=max(above))
    return f"{largest:g} and {min((d for d in below if d > largest), default=min(below)):g}"


def _drawn(rates: Mapping[str, Mapping[int, float]]) -> Figure:
    """Flip rates by optimizer step, a curve for each label; "dense" is black."""
    figure = Figure(figsize=(6.6, 3.6), layout="constrained")
    axis = figure.subplots()
    for index, (label, curve) in enumerate(rates.items()):
        colour = INK if label == "dense" else COLOURS[(index - 1) % len(COLOURS)]
        line = "-" if index <= len(COLOURS) else "--"
        axis.plot(list(curve), list(curve.values()), label=label, color=colour, linestyle=line)
    axis.set(xlabel="optimizer step", ylabel="flip rate", yscale="log")
    figure.legend(loc="outside right upper", fontsize=8)
    return figure
