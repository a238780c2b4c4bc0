"""`unconvert`: a sparse training goes on dense."""

from __future__ import annotations

from torch import nn

from fst.layers.modules import converted_layers


def unconvert(model: nn.Module) -> None:
    """Turn converted layers back into the layers they were, in place, with W and not S(W).

    Parameters stay the same objects, so the optimizer goes on with its momentum. Schedules end and
    the decay stops, also where `fst.attach` attached them. Values that a strategy has written into
    the weights stay: the zeros of `asp`, the channels that `prunetrain` removed. `fst.convert` may
    follow again.

    Args:
        model: a converted model, at any time between two steps.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: no layer is converted, or the class of one was changed since, by a
            parametrization or fully_shard; nothing is changed then.
    """
    layers = converted_layers(model)
    for name, layer in layers.items():
        if "dense_class" not in vars(type(layer)):
            raise ValueError(
                f"layer {name!r} became a {type(layer).__name__} after fst.convert: undo that "
                "first (remove_parametrizations), or let fully_shard wrap a module around it."
            )
    for layer in layers.values():
        layer.restore()
