"""The names of the library: `fst.NAME` is the NAME of this module."""

from fst.attachment import attach
from fst.basics.version import __version__
from fst.budgets import patterns
from fst.conversion import convert, fold
from fst.exporting.model import export
from fst.functional import sparse_conv2d, sparse_linear
from fst.layers.frozen import frozen
from fst.layers.modules import sparse_layers
from fst.measures import metrics
from fst.permutation.model import permute
from fst.rules.nm import NM
from fst.rules.rule import Rule
from fst.rules.schedule import Schedule
from fst.rules.strategy import Strategy
from fst.state import load_sparsity_state, seed_random_rules, sparsity_state
from fst.strategies.registry import get_strategy, list_strategies, register_strategy
from fst.verification import verify
from fst.zeros import hold

__all__ = [
    "NM",
    "Rule",
    "Schedule",
    "Strategy",
    "__version__",
    "attach",
    "convert",
    "export",
    "fold",
    "frozen",
    "get_strategy",
    "hold",
    "list_strategies",
    "load_sparsity_state",
    "metrics",
    "patterns",
    "permute",
    "register_strategy",
    "seed_random_rules",
    "sparse_conv2d",
    "sparse_layers",
    "sparse_linear",
    "sparsity_state",
    "verify",
]
