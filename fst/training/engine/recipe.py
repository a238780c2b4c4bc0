"""timm's parts of a recipe: losses, mixup and cutmix, random erasing; arguments are checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import nn

from fst.basics.text import suggest
from fst.basics.values import check_number, one_of, refuse_unknown

# The loss and what it takes of a label: a class index, or a probability of each class
LOSSES: dict[str, tuple[type[nn.Module], Collection[str]]] = {
    "CrossEntropyLoss": (nn.CrossEntropyLoss, ("index", "probabilities")),
    "LabelSmoothingCrossEntropy": (LabelSmoothingCrossEntropy, ("index",)),
    "SoftTargetCrossEntropy": (SoftTargetCrossEntropy, ("probabilities",)),
    "BinaryCrossEntropy": (BinaryCrossEntropy, ("index", "probabilities")),
}
_TENSORS = ("weight", "pos_weight")  # no config can give one
_DEPRECATED = ("size_average", "reduce", "reduction")  # the loss is a mean


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
    kind = config.pop("type", "CrossEntropyLoss")
    if kind not in LOSSES:
        raise ValueError(f"loss type {kind!r} is unknown.{suggest(kind, LOSSES)}")
    loss, labels = LOSSES[kind]
    needed = "probabilities" if mixed else "index"
    if needed not in labels:
        reason = "is mixed by mixup" if mixed else "is not mixed (data_preprocessor.mixup)"
        fitting = ", ".join(name for name, (_, taken) in LOSSES.items() if needed in taken)
        raise ValueError(f"loss type {kind!r} does not fit: the data {reason}; use {fitting}.")
    for name in ("label_smoothing", "smoothing"):
        check_number(f"loss {name}", config.get(name, 0.0), "[0, 1]")
        if mixed and config.get(name):
            raise ValueError(
                f"loss {name}={config[name]!r}: with mixup, labels are smoothed there; set "
                "data_preprocessor.mixup.label_smoothing, and 0 here."
            )
    return _built("loss", loss, config, refused=(*_TENSORS, *_DEPRECATED, "ignore_index"))


def build_mixup(config: Mapping[str, Any] | None) -> Mixup | None:
    """timm's mixup and cutmix of a batch; None without arguments.

    Raises:
        ValueError: an unknown argument, or a value out of range.
    """
    if not config:
        return None
    mixup = _built("mixup", Mixup, config, refused=("multi_label",))
    if config.get("num_classes") is None:
        raise ValueError("mixup needs num_classes, which a Classifier takes from its architecture.")
    one_of("mixup mode", mixup.mode, ("batch", "pair", "elem"))
    for name in ("prob", "switch_prob", "label_smoothing"):
        check_number(f"mixup {name}", config.get(name, 0.0), "[0, 1]")
    alphas = (mixup.mixup_alpha, mixup.cutmix_alpha)
    if min(alphas) < 0 or max(alphas) == 0:
        raise ValueError(
            f"mixup_alpha={alphas[0]!r} and cutmix_alpha={alphas[1]!r} must not be negative, and "
            "one of them positive."
        )
    return mixup


def build_random_erasing(config: Mapping[str, Any] | None) -> RandomErasing | None:
    """timm's random erasing of normalised images; None without arguments.

    It draws on the CPU, whose generators are seeded for each batch.

    Raises:
        ValueError: an unknown argument, or a value out of range.
    """
    if not config:
        return None
    refused = ("num_splits", "device")
    erasing = _built("random_erasing", RandomErasing, config, refused, device="cpu")
    for name in ("probability", "min_area", "max_area"):
        check_number(f"random_erasing {name}", getattr(erasing, name), "[0, 1]")
    return erasing


def check_keys(
    option: str, function: Callable[..., Any], given: Collection[str], refused: Collection[str] = ()
) -> None:
    """Raise ValueError for a key that ``function`` does not take, or that is ``refused``."""
    known = [name for name in inspect.signature(function).parameters if name not in refused]
    refuse_unknown(option, given, known)


def _built(
    option: str, kind: type, config: Mapping[str, Any], refused: Collection[str], **fixed: Any
) -> Any:
    check_keys(option, kind, config, refused)
    try:
        return kind(**config, **fixed)
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        values = ", ".join(f"{name}={value!r}" for name, value in config.items())
        raise ValueError(f"{option}: {kind.__name__}({values}) is refused. {error}") from error
