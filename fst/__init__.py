"""FST: N:M structured sparse training of convolutional networks."""

from fst import masks
from fst.channel_lasso import ChannelLasso
from fst.channels import fit_channels
from fst.convert import convert
from fst.fold import fold
from fst.modules import SparseConv2d, SparseLinear, sparse_layers
from fst.ops.conv import sparse_conv2d, sparse_linear
from fst.report import ConversionReport
from fst.rules_gradient import Reuse, TopK
from fst.rules_weight import KernelPatterns, Unstructured
from fst.schedule import HeldMasks, Run, Schedule
from fst.state import (
    Attachment,
    attach,
    load_sparsity_state,
    seed_random_rules,
    set_grad_scaler,
    sparsity_state,
)
from fst.strategies import get_strategy, list_strategies, register_strategy
from fst.strategies.asfp import SoftFilters
from fst.strategies.asp import OneShot
from fst.strategies.clicktrain import PatternSelection
from fst.strategies.dpf import GrowingSparsity
from fst.strategies.rigl import DropAndGrow
from fst.strategy import NM, Alternating, Rule, SameAsOutput, Strategy, Transposable
from fst.verify import verify

__version__ = "0.1.0"
__all__ = [
    "NM",
    "Alternating",
    "Attachment",
    "ChannelLasso",
    "ConversionReport",
    "DropAndGrow",
    "GrowingSparsity",
    "HeldMasks",
    "KernelPatterns",
    "OneShot",
    "PatternSelection",
    "Reuse",
    "Rule",
    "Run",
    "SameAsOutput",
    "Schedule",
    "SoftFilters",
    "SparseConv2d",
    "SparseLinear",
    "Strategy",
    "TopK",
    "Transposable",
    "Unstructured",
    "attach",
    "convert",
    "fit_channels",
    "fold",
    "get_strategy",
    "list_strategies",
    "load_sparsity_state",
    "masks",
    "register_strategy",
    "seed_random_rules",
    "set_grad_scaler",
    "sparse_conv2d",
    "sparse_layers",
    "sparse_linear",
    "sparsity_state",
    "verify",
]
