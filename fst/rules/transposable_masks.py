"""Masks that satisfy an N:M pattern along rows and columns alike. True means kept."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from fst.basics.autocast import without_autocast
from fst.rules.masks import check_pattern, check_rule, constant


def transposable_mask(matrix: Tensor, n: int = 2, m: int = 4) -> Tensor:
    """Mask that keeps n of m in every row and every column of each m x m tile.

    Source: Hubara et al. 2021, "Accelerated Sparse Neural Training". For m <= 4 the best of all
    patterns (90 for 2:4) is found exactly; above that by the paper's greedy 2-approximation,
    completed by exchanges so that every row and column keeps exactly n. Infinite entries come
    first, NaN counts as one, and among them the others decide.

    Args:
        matrix: (..., rows, columns), floating point. Sizes not divisible by m are padded with
            zeros; a tile that is cut off keeps at most n per row and column.

    Returns:
        Boolean tensor of the same shape.
    """
    check_pattern(n, m)
    if matrix.dim() < 2:
        raise ValueError(f"matrix has shape {tuple(matrix.shape)}; at least two axes are needed.")
    check_rule(matrix, "magnitude")
    if n == m or matrix.numel() == 0:
        return torch.ones_like(matrix, dtype=torch.bool)
    rows, columns = matrix.shape[-2:]
    scores = matrix.abs().nan_to_num_(nan=float("inf"), posinf=float("inf"))
    scores = F.pad(scores, (0, -columns % m, 0, -rows % m))
    tiles = scores.unflatten(-2, (-1, m)).unflatten(-1, (-1, m)).transpose(-3, -2)
    flat = tiles.reshape(-1, m * m)
    kept = _best_pattern(flat, n, m) if m <= 4 else _greedy_pattern(flat, n, m)
    mask = kept.view(tiles.shape).transpose(-3, -2).flatten(-4, -3).flatten(-2, -1)
    return mask[..., :rows, :columns].contiguous()


def _transposable_patterns(n: int, m: int) -> tuple[tuple[int, ...], ...]:
    """All m x m 0/1 patterns with n ones in every row and column, rows enumerated in order."""
    rows = [tuple(int(i in kept) for i in range(m)) for kept in itertools.combinations(range(m), n)]
    return tuple(
        tuple(itertools.chain.from_iterable(pattern))
        for pattern in itertools.product(rows, repeat=m)
        if all(sum(column) == n for column in zip(*pattern, strict=True))
    )


_PATTERNS = {(n, m): _transposable_patterns(n, m) for m in (2, 3, 4) for n in range(1, m)}


def _best_pattern(tiles: Tensor, n: int, m: int) -> Tensor:
    """The first of the best patterns: (tiles, m²) bool.

    Sums are taken in float64, one entry of the tile after the other, so that they do not depend on
    a library's order of summation, and tiles with equal values have equal sums.
    """
    limit = torch.finfo(torch.float64).max / (4 * m * m)
    patterns = constant(_PATTERNS[n, m], tiles.device)
    table, infinite = patterns.T.double(), tiles.isinf()
    finite = tiles.double().masked_fill(infinite, 0).clamp(max=limit)
    totals = tiles.new_zeros(len(tiles), len(patterns), dtype=torch.float64)
    for entries, kept in zip(finite.unbind(1), table, strict=True):
        totals.addcmul_(entries[:, None], kept)
    with without_autocast(tiles.device):
        counts = infinite.double() @ table
    # Most infinities first, then the largest sum of the rest.
    totals.masked_fill_(counts < counts.amax(1, keepdim=True), -1)
    return patterns.bool()[totals.argmax(1)]


def _greedy_pattern(tiles: Tensor, n: int, m: int) -> Tensor:
    count = tiles.shape[0]
    tile = torch.arange(count, device=tiles.device)
    kept = torch.zeros(count, m, m, dtype=torch.bool, device=tiles.device)
    for entry in tiles.sort(dim=1, descending=True, stable=True).indices.unbind(1):
        row, column = entry // m, entry % m
        free = (kept[tile, row].sum(1) < n) & (kept[tile, :, column].sum(1) < n)
        kept[tile, row, column] = free
    values = tiles.view(count, m, m)
    # A row r and a column c that still lack one: exchange a kept (i, j) for (r, j) and (i, c).
    for _ in range(m * n):
        short_rows, short_columns = kept.sum(2) < n, kept.sum(1) < n
        short = short_rows.any(1)
        row, column = short_rows.int().argmax(1), short_columns.int().argmax(1)
        allowed = kept & ~kept[tile, row][:, None, :] & ~kept[tile, :, column][:, :, None]
        gain = values[tile, row][:, None, :] + values[tile, :, column][:, :, None] - values
        choice = gain.nan_to_num().masked_fill(~allowed, -float("inf")).flatten(1).argmax(1)
        i, j = choice // m, choice % m
        kept[tile, i, j] &= ~short
        kept[tile, row, j] |= short
        kept[tile, i, column] |= short
    return kept.flatten(1)
