"""A config's model: how it is built, the part that sparsity is about, what trains it."""

from __future__ import annotations

from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.model import BaseModel, is_model_wrapper
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import MODELS, init_default_scope
from torch import nn

PRETRAINED = "Pretrained"  # MMEngine's name of an initialisation


def build_model(config: Config) -> BaseModel:
    """The model of a config, dense, with the config's `data_preprocessor`."""
    init_default_scope(config.get("default_scope") or "mmengine")
    model = dict(config.model)
    if config.get("data_preprocessor") is not None:
        model.setdefault("data_preprocessor", config.data_preprocessor)
    return MODELS.build(model)


def initialise(model: BaseModel, *, fetches: bool = True) -> None:
    """Give the model the weights that a training begins with, without a log line per parameter.

    Until then some layers of MMDetection have the numbers that their memory had.

    ``fetches``: also the backbone's pretrained weights, which may be downloaded.
    """
    if not fetches:
        for module in model.modules():
            given = getattr(module, "init_cfg", None)
            found = [given] if isinstance(given, dict) else given or []
            if any(one["type"] == PRETRAINED for one in found):
                module.init_cfg = [one for one in found if one["type"] != PRETRAINED]
    logger = MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel("WARNING")
    try:
        model.init_weights()
    finally:
        logger.setLevel(level)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model within a wrapper such as DDP."""
    return model.module if is_model_wrapper(model) else model


def sparse_root(model: nn.Module) -> nn.Module:
    """The module whose layers are converted, and by whose names they go.

    A classifier's architecture, else the model itself; within a wrapper such as DDP.
    """
    model = unwrapped(model)
    return getattr(model, "sparse_root", model)


def built_wrappers(wrapper: object) -> list[OptimWrapper]:
    """The optimizer wrappers of a run; none before they are built, or if it does not train."""
    if isinstance(wrapper, OptimWrapperDict):
        return list(wrapper.optim_wrappers.values())
    return [wrapper] if isinstance(wrapper, OptimWrapper) else []
