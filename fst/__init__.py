"""FST: N:M structured sparse training of convolutional networks."""

import importlib
from typing import TYPE_CHECKING, Any

from fst.basics.version import __version__ as __version__

if TYPE_CHECKING:
    from fst.api.attach import attach as attach
    from fst.api.convert import convert as convert
    from fst.api.export import export as export
    from fst.api.fold import fold as fold
    from fst.api.functional import sparse_conv2d as sparse_conv2d
    from fst.api.functional import sparse_linear as sparse_linear
    from fst.api.hold import hold as hold
    from fst.api.load import load as load
    from fst.api.metrics import metrics as metrics
    from fst.api.pack import pack as pack
    from fst.api.patterns import patterns as patterns
    from fst.api.report import backends_table as backends_table
    from fst.api.state import load_sparsity_state as load_sparsity_state
    from fst.api.state import seed_random_rules as seed_random_rules
    from fst.api.state import sparsity_state as sparsity_state
    from fst.api.unconvert import unconvert as unconvert
    from fst.api.verify import verify as verify
    from fst.layers.frozen import frozen as frozen
    from fst.layers.modules import sparse_layers as sparse_layers
    from fst.rules.nm import NM as NM
    from fst.rules.rule import Rule as Rule
    from fst.rules.schedule import Schedule as Schedule
    from fst.rules.strategy import Strategy as Strategy
    from fst.strategies.registry import get_strategy as get_strategy
    from fst.strategies.registry import list_strategies as list_strategies
    from fst.strategies.registry import register_strategy as register_strategy

_MODULES = {  # public name -> the module that defines it
    "NM": "rules.nm",
    "Rule": "rules.rule",
    "Schedule": "rules.schedule",
    "Strategy": "rules.strategy",
    "attach": "api.attach",
    "backends_table": "api.report",
    "convert": "api.convert",
    "export": "api.export",
    "fold": "api.fold",
    "frozen": "layers.frozen",
    "get_strategy": "strategies.registry",
    "hold": "api.hold",
    "list_strategies": "strategies.registry",
    "load": "api.load",
    "load_sparsity_state": "api.state",
    "metrics": "api.metrics",
    "pack": "api.pack",
    "patterns": "api.patterns",
    "register_strategy": "strategies.registry",
    "seed_random_rules": "api.state",
    "sparse_conv2d": "api.functional",
    "sparse_layers": "layers.modules",
    "sparse_linear": "api.functional",
    "sparsity_state": "api.state",
    "unconvert": "api.unconvert",
    "verify": "api.verify",
}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    """Import torch and the modules at the first use of a name: `fst --help` uses none."""
    if not name.startswith("_"):
        for public, module in _MODULES.items():
            globals()[public] = getattr(importlib.import_module(f"fst.{module}"), public)
        importlib.import_module("fst.baselines")  # registers its strategies
    if name in globals():
        return globals()[name]
    raise AttributeError(f"module 'fst' has no attribute {name!r}")


def __dir__() -> list[str]:
    __getattr__("convert")
    return sorted(globals())
