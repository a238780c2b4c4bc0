"""Limits, and keys of what packed layers choose and make for each size of their input."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor

REPEATS, MOST_MS = 5, 200.0  # of a candidate's timing
MOST_TIMED = 8  # sizes of an input; further ones do as the nearest of these
MOST_PRODUCTS = 8  # sizes for which a product is prepared
CHOOSING = threading.RLock()

Key = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]
Product = TypeVar("Product")


def key_of(input: Tensor, residual: Tensor | None) -> Key:
    """The form of an input, and whether there is a residual."""
    return input.shape, input.stride(), input.dtype, residual is not None


def remember(products: dict[Key, Product], key: Key, product: Product) -> None:
    """Keep a product; of too many the oldest is forgotten."""
    with CHOOSING:
        while len(products) >= MOST_PRODUCTS:
            products.pop(next(iter(products)))
        products[key] = product


def nearest(known: Iterable[Key], key: Key) -> Key:
    """Which of the known inputs has the size nearest to one's; the batch counts twice."""

    def of(a: float, b: float) -> float:
        return abs(math.log(max(a, 1) / max(b, 1)))

    def distance(other: Key) -> float:
        one, size = other[0], key[0]
        return of(one[0], size[0]) + of(math.prod(one), math.prod(size))

    return min(known, key=distance)
