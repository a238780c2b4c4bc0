"""The model of a config with the weights of a checkpoint."""

from __future__ import annotations

from typing import Any

from mmengine.config import Config
from mmengine.model import BaseModel

import fst
from fst.files.checkpoint import load_checkpoint_safely, state_dict_of
from fst.files.records import give_records, records_in
from fst.training.engine.checkpoint import check_sparsity
from fst.training.engine.config import read_sparsity
from fst.training.engine.model import build_model, sparse_root


def trained_model(config: Config, path: str) -> BaseModel:
    """Converted, with its masks, if the checkpoint comes from a sparse training; else dense.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: it does not fit the config.
    """
    strategy, selection = read_sparsity(config)
    checkpoint = load_checkpoint_safely(path)
    check_sparsity(checkpoint, path, strategy is not None)
    is_sparse = isinstance(checkpoint, dict) and bool(checkpoint.get("sparsity"))
    model = build_model(config)
    if is_sparse:
        fst.convert(sparse_root(model), strategy, **selection)
    load_weights(model, checkpoint, path, strategy)
    if is_sparse:
        fst.load_sparsity_state(sparse_root(model), checkpoint["sparsity"])
    else:
        give_records(sparse_root(model), records_in(checkpoint, path))
    return model


def load_weights(
    model: BaseModel, checkpoint: Any, path: str, strategy: fst.Strategy | None
) -> None:
    """Give ``model`` the weights of a checkpoint, and its channels if ``strategy`` removes some.

    Raises:
        ValueError: the checkpoint holds no weights, or does not fit the model.
    """
    state_dict = state_dict_of(checkpoint, path)
    if hasattr(model, "adopted"):
        state_dict = model.adopted(state_dict)
    if strategy is not None and strategy.schedule is not None:
        strategy.schedule.fit(model, state_dict)
    try:
        model.load_state_dict(state_dict)
    except RuntimeError as error:
        raise ValueError(f"{path!r} does not fit the model: {error}") from error
