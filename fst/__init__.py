"""FST: N:M structured sparse training of convolutional networks."""

from fst import masks
from fst.ops.conv import sparse_conv2d, sparse_linear
from fst.strategies import get_strategy, list_strategies, register_strategy
from fst.strategy import NM, Alternating, Rule, SameAsOutput, Strategy, Transposable

__version__ = "0.1.0"
