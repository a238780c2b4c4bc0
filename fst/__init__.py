"""FST: N:M structured sparse training of convolutional networks."""

import importlib
from typing import TYPE_CHECKING, Any

from fst.basics.version import __version__ as __version__

if TYPE_CHECKING:
    from fst.attachment import attach as attach
    from fst.budgets import patterns as patterns
    from fst.conversion import convert as convert
    from fst.conversion import fold as fold
    from fst.exporting.model import export as export
    from fst.functional import sparse_conv2d as sparse_conv2d
    from fst.functional import sparse_linear as sparse_linear
    from fst.layers.frozen import frozen as frozen
    from fst.layers.modules import sparse_layers as sparse_layers
    from fst.measures import metrics as metrics
    from fst.permutation.model import permute as permute
    from fst.rules.nm import NM as NM
    from fst.rules.rule import Rule as Rule
    from fst.rules.schedule import Schedule as Schedule
    from fst.rules.strategy import Strategy as Strategy
    from fst.state import load_sparsity_state as load_sparsity_state
    from fst.state import seed_random_rules as seed_random_rules
    from fst.state import sparsity_state as sparsity_state
    from fst.strategies.registry import get_strategy as get_strategy
    from fst.strategies.registry import list_strategies as list_strategies
    from fst.strategies.registry import register_strategy as register_strategy
    from fst.verification import verify as verify
    from fst.zeros import hold as hold

_MODULES = {  # public name -> the module that defines it
    "NM": "rules.nm",
    "Rule": "rules.rule",
    "Schedule": "rules.schedule",
    "Strategy": "rules.strategy",
    "attach": "attachment",
    "convert": "conversion",
    "export": "exporting.model",
    "fold": "conversion",
    "frozen": "layers.frozen",
    "get_strategy": "strategies.registry",
    "hold": "zeros",
    "list_strategies": "strategies.registry",
    "load_sparsity_state": "state",
    "metrics": "measures",
    "patterns": "budgets",
    "permute": "permutation.model",
    "register_strategy": "strategies.registry",
    "seed_random_rules": "state",
    "sparse_conv2d": "functional",
    "sparse_layers": "layers.modules",
    "sparse_linear": "functional",
    "sparsity_state": "state",
    "verify": "verification",
}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    """Import torch and the modules at the first use of a name: `fst --help` uses none."""
    if not name.startswith("_"):
        for public, module in _MODULES.items():
            globals()[public] = getattr(importlib.import_module(f"fst.{module}"), public)
        importlib.import_module("fst.baselines")  # they register themselves with these names
    if name in globals():
        return globals()[name]
    raise AttributeError(f"module 'fst' has no attribute {name!r}")


def __dir__() -> list[str]:
    __getattr__("convert")
    return sorted(globals())
