"""Where a training step's time goes, layer by layer and GEMM by GEMM (SDGP, Figure 9)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fst.rules.strategy import GEMMS
from fst.studies.benchmark import PLAIN


class LayerRuntime(NamedTuple):
    """A distinct convolution: how often the model has it, and milliseconds of one call by
    contestant and GEMM.
    """

    layer: str
    count: int
    times: dict[str, dict[str, float]]


def layer_runtimes(report: Mapping[str, Any]) -> list[LayerRuntime]:
    """From the JSON report of `fst bench`.

    Raises:
        ValueError: it is no such report, or one without times of layers.
    """
    try:
        names = dict.fromkeys(n for entry in report["layers"] for n in entry["times"][GEMMS[0]])
        found = [
            LayerRuntime(entry["layer"], entry["count"], _by_contestant(entry["times"], names))
            for entry in report["layers"]
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"this is no report of `fst bench`: {type(error).__name__} {error}."
        ) from error
    if not found:
        raise ValueError("the report has no times of layers: it was made with --no-layers.")
    return found


def _by_contestant(times: Mapping[str, Any], names: Iterable[str]) -> dict[str, dict[str, float]]:
    """A strategy that was not timed leaves the layer dense."""
    return {
        name: {gemm: times[gemm].get(name, times[gemm][PLAIN])["median"] for gemm in GEMMS}
        for name in names
    }


def totals(layers: Sequence[LayerRuntime], contestant: str = PLAIN) -> dict[str, float]:
    """Milliseconds of each GEMM over all layers, as often as each occurs."""
    return {gemm: sum(x.count * x.times[contestant][gemm] for x in layers) for gemm in GEMMS}


def gemm_shares(report: Mapping[str, Any]) -> dict[str, float]:
    """Share of a dense training step that each GEMM of the convolutions takes.

    Where the report has no time of a step, all of it is taken to be convolutions, as SDGP does.
    """
    spent = totals(layer_runtimes(report))
    steps = report.get("steps") or {}
    step = steps["step"][PLAIN]["median"] if "step" in steps else sum(spent.values())
    return {gemm: min(1.0, time / step) for gemm, time in spent.items()}
