"""timm's parts of a recipe: losses, mixup and cutmix, random erasing; arguments are checked."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from timm.data import Mixup
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import nn

from fst.basics.text import suggest
from fst.basics.values import check_number, one_of, refuse_unknown

# by what they take of a label: a class index, or a probability of each class
OF_INDICES = (nn.CrossEntropyLoss, LabelSmoothingCrossEntropy, BinaryCrossEntropy)
OF_PROBABILITIES = (nn.CrossEntropyLoss, SoftTargetCrossEntropy, BinaryCrossEntropy)
LOSSES = {kind.__name__: kind for kind in OF_INDICES + OF_PROBABILITIES}
REFUSED = (  # tensors; what is deprecated or would not be a mean; what the classifier sets
    "weight pos_weight size_average reduce reduction ignore_index num_splits device".split()
)
SHARES = (  # arguments in [0, 1], which timm does not check
    "label_smoothing smoothing prob switch_prob probability min_area max_area".split()
)


def build_loss(config: Mapping[str, Any] | None, mixed: bool) -> nn.Module:
    """The loss that a classifier's ``loss`` names: the mean over a batch.

    Args:
        config: ``type`` (default "CrossEntropyLoss", torch's; else one of timm's in `LOSSES`) and
            arguments of that class.
        mixed: Whether labels arrive as probabilities, because a mixup makes them so.

    Raises:
        ValueError: an unknown type or argument, or a loss that does not take such labels.
    """
    config = dict(config or {})
    name = config.pop("type", "CrossEntropyLoss")
    if name not in LOSSES:
        raise ValueError(f"loss type {name!r} is unknown.{suggest(name, LOSSES)}")
    fitting = OF_PROBABILITIES if mixed else OF_INDICES
    if LOSSES[name] not in fitting:
        reason = "is mixed by mixup" if mixed else "is not mixed (data_preprocessor.mixup)"
        names = ", ".join(kind.__name__ for kind in fitting)
        raise ValueError(f"loss type {name!r} does not fit: the data {reason}; use {names}.")
    smoothing = config.get("label_smoothing") or config.get("smoothing")
    if mixed and smoothing:
        raise ValueError(
            f"loss smoothing={smoothing!r}: with mixup, labels are smoothed there; set "
            "data_preprocessor.mixup.label_smoothing, and 0 here."
        )
    return built("loss", LOSSES[name], config)


def built(option: str, kind: type, config: Mapping[str, Any], **fixed: Any) -> Any:
    """An object of torch's or timm's ``kind``, from an ``option`` of a config.

    Raises:
        ValueError: an unknown argument, or a value out of range.
    """
    refuse_unknown(option, config, sorted(inspect.signature(kind).parameters.keys() - {*REFUSED}))
    for name in SHARES:
        check_number(f"{option} {name}", config.get(name, 0.0), "[0, 1]")
    if kind is Mixup:
        one_of("mixup mode", config.get("mode", "batch"), ("batch", "pair", "elem"))
    try:
        return kind(**config, **fixed)
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        values = ", ".join(f"{name}={value!r}" for name, value in config.items())
        raise ValueError(f"{option}: {kind.__name__}({values}) is refused. {error}") from error
