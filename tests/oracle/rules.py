"""What the reference keeps of each operand: group by group, with Python's ``sorted``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fst.baselines.clicktrain import KERNEL_PATTERNS, KernelPatterns
from fst.baselines.meprop import TopK
from fst.baselines.resprop import Reuse
from fst.rules.alternating import Alternating
from fst.rules.nm import NM, Transposable
from fst.rules.rule import Rule
from fst.rules.weight import Unstructured
from tests.oracle import methods


def exact(tensor: Tensor) -> Tensor:
    """The values in float64 on the CPU."""
    return tensor.detach().to("cpu", torch.float64)


def _kept(magnitudes: list[float], n: int) -> list[bool]:
    """The ``n`` largest of one group; ties keep the lower index and NaN counts as +inf."""
    scores = [float("inf") if value != value else value for value in magnitudes]
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    chosen = set(order[:n])
    return [index in chosen for index in range(len(scores))]


def reference_nm_mask(tensor: Tensor, n: int, m: int, dim: int) -> Tensor:
    """Magnitude N:M mask of ``tensor`` (any shape), groups of ``m`` elements along ``dim``.

    A last group of r < m elements keeps min(n, r) (FST's zero padding). Returns a bool tensor of
    the same shape, True where kept. SDGP's example (McDanel et al. 2022, section III-B):
    (1, 7, -3, 2) with 2:4 gives (0, 7, -3, 0).
    """
    moved = exact(tensor).abs().movedim(dim, -1)
    lines = moved.reshape(-1, moved.shape[-1]).tolist()
    kept = [
        [flag for start in range(0, len(line), m) for flag in _kept(line[start : start + m], n)]
        for line in lines
    ]
    mask = torch.tensor(kept, dtype=torch.bool).reshape(moved.shape)
    return mask.movedim(-1, dim).contiguous()


def transposable_patterns(n: int = 2, m: int = 4) -> list[tuple[tuple[bool, ...], ...]]:
    """All m x m patterns with ``n`` kept per row and per column: 90 of them for 2:4.

    Order: ``itertools.product`` of the rows' n-subsets, each in ``itertools.combinations`` order.
    """
    rows = [tuple(i in subset for i in range(m)) for subset in itertools.combinations(range(m), n)]
    return [
        pattern
        for pattern in itertools.product(rows, repeat=m)
        if all(sum(row[column] for row in pattern) == n for column in range(m))
    ]


def reference_transposable_mask(matrix: Tensor) -> Tensor:
    """Best 2:4 transposable mask (Hubara et al. 2021) of a (rows, columns) ``matrix``.

    The matrix is padded with zeros to 4x4 tiles; in each the pattern wins that keeps most infinite
    entries (NaN counts as one), then that of largest L1 norm of the others, then the first one of
    `transposable_patterns`. Returns a bool (rows, columns).
    """
    rows, columns = matrix.shape
    padded = torch.zeros(-(-rows // 4) * 4, -(-columns // 4) * 4, dtype=torch.float64)
    padded[:rows, :columns] = exact(matrix).abs()
    mask = torch.zeros(padded.shape, dtype=torch.bool)
    patterns = transposable_patterns()
    for top, left in itertools.product(range(0, len(padded), 4), range(0, padded.shape[1], 4)):
        tile = padded[top : top + 4, left : left + 4].tolist()
        scores = []
        for pattern in patterns:
            kept = [tile[i][j] for i in range(4) for j in range(4) if pattern[i][j]]
            finite = [value for value in kept if math.isfinite(value)]
            scores.append((len(kept) - len(finite), sum(finite)))
        mask[top : top + 4, left : left + 4] = torch.tensor(patterns[scores.index(max(scores))])
    return mask[:rows, :columns]


def alternating_matrices(
    height: int, width: int, rule: Alternating, phase: int = 0
) -> tuple[Tensor, Tensor]:
    """The kept positions and the matrix ``T`` of FST, Eq. 7 to 10.

    ``height`` x ``width`` is the output map, P x Q. Returns ``kept`` bool (P*Q,), True for the rows
    of Xᵀ that S(Xᵀ) keeps, and ``shift`` float64 (P*Q, P*Q) such that
    ``grad_output @ shift`` brings to each kept position the sum of the dropped ones it stands for.
    On the kept positions of an even width and phase 0 this is the paper's left shift by one.
    """
    size = height * width
    if rule.pairing == "flat":
        height, width = 1, size
    block_height, block_width = rule.block
    if (height if block_height == 2 else width) == 1:
        phase = 0
    kept = torch.zeros(size, dtype=torch.bool)
    shift = torch.zeros(size, size, dtype=torch.float64)
    for p, q in itertools.product(range(height), range(width)):
        first_p, first_q = p - p % block_height, q - q % block_width
        keeper_p, keeper_q = first_p, first_q
        if phase == 1 and rule.block == (2, 1):
            keeper_p = first_p + 1
            if keeper_p == height:  # the odd last row joins the last kept one
                keeper_p -= 2
        elif phase == 1:
            keeper_q = first_q + 1
            if keeper_q == width:  # the odd last column joins the last kept one
                keeper_q -= 2
        position, keeper = p * width + q, keeper_p * width + keeper_q
        if position == keeper:
            kept[position] = True
        else:
            shift[position, keeper] = 1.0
    return kept, shift


def _part(sample: int, batch: int, parts: int) -> int:
    """In which of ``parts`` equal shares of the batch, in order, a sample is."""
    return next(part for part in range(parts) if sample < batch * (part + 1) // parts)


def reference_sample(grads: Tensor, keep: float, start: float) -> Tensor:
    """What grad_output (N, Cout, P, Q) is multiplied by at each position (N, P, Q); 0: dropped.

    Probabilities proportional to the norm over the channels, 1 at most, are laid end to end, in
    units of 2**-31; those positions are drawn in which one of n points falls, 1 apart.
    """
    unit = 2**31
    samples, _, height, width = grads.shape
    rows = exact(grads).permute(0, 2, 3, 1).reshape(samples * height * width, -1).tolist()
    scores = [math.sqrt(math.fsum(v * v for v in row)) for row in rows]
    total, count = len(scores), math.ceil(keep * len(scores) - 1e-9)
    if count >= total:
        return torch.ones(samples, height, width, dtype=torch.float64)
    sure = {i for i, score in enumerate(scores) if not math.isfinite(score)}
    sure = set(sorted(sure)[:count])
    scores = [score if math.isfinite(score) else 0.0 for score in scores]
    least = math.fsum(scores) / total * 2**-20
    scores = [score + least if least else 1.0 for score in scores]
    while count > len(sure):
        rest = math.fsum(score for i, score in enumerate(scores) if i not in sure)
        left = count - len(sure)
        more = {i for i, s in enumerate(scores) if i not in sure and s * left >= rest}
        if not more:
            break
        sure |= more
    ends, passed, full = [], 0.0, 0
    rest = sum(score for i, score in enumerate(scores) if i not in sure)
    last = max((i for i in range(total) if i not in sure), default=-1)
    share = (count - len(sure)) * unit
    for i, score in enumerate(scores):
        full += i in sure
        passed += 0.0 if i in sure else score
        ends.append(
            full * unit + (share if i >= last else min(share, int(passed * (share / rest))))
        )
    weights = [0.0] * total
    for j in range(count):
        point = j * unit + int(start * unit)
        i = next(i for i, end in enumerate(ends) if end > point)
        weights[i] = unit / (ends[i] - (ends[i - 1] if i else 0))
    return torch.tensor(weights, dtype=torch.float64).reshape(samples, height, width)


def reference_top_k_mask(tensor: Tensor, density: float) -> Tensor:
    """meProp: the max(1, round(density * L)) largest of each sample's L elements.

    ``tensor`` is (N, ...); ties keep the lower index of the flattened sample. Returns a bool mask.
    """
    samples = exact(tensor).abs().flatten(1).tolist()
    kept = [_kept(sample, max(1, round(density * len(sample)))) for sample in samples]
    return torch.tensor(kept, dtype=torch.bool).reshape(tensor.shape)


def reference_unstructured_mask(weight: Tensor, sparsity: float) -> Tensor:
    """All but the round(sparsity * L) smallest of ``weight``'s L elements; one at least stays."""
    values = exact(weight).abs().flatten().tolist()
    kept = _kept(values, max(1, len(values) - round(sparsity * len(values))))
    return torch.tensor(kept).reshape(weight.shape)


def reference_kernel_mask(weight: Tensor, rule: KernelPatterns) -> Tensor:
    """ClickTrain: whole kernels of small norm pruned; of others the pattern of largest norm."""
    kernels = exact(weight).square().flatten(2).flatten(0, 1).tolist()
    pruned = round(rule.connectivity * len(kernels))
    strong = _kept([math.fsum(kernel) for kernel in kernels], max(1, len(kernels) - pruned))
    rows = []
    for kernel, keep in zip(kernels, strong, strict=True):
        row = [keep] * len(kernel)
        if keep and weight.shape[2:] == (3, 3):
            sums = [
                math.fsum(
                    value for value, entry in zip(kernel, pattern, strict=True) if entry == "1"
                )
                for pattern in KERNEL_PATTERNS[: rule.patterns]
            ]
            row = [entry == "1" for entry in KERNEL_PATTERNS[sums.index(max(sums))]]
        rows.append(row)
    return torch.tensor(rows).reshape(weight.shape)


def _weight_mask(rule: NM | Transposable, gemm: str, weight: Tensor, groups: int) -> Tensor:
    """Mask of ``weight`` (Cout, Cin/groups, kh, kw), groups along the GEMM's reduction axis."""
    outputs = weight.shape[0] // groups
    parts = []
    for part in weight.split(outputs):
        flat = part.reshape(outputs, -1)
        if isinstance(rule, Transposable):
            if rule.group_order == "im2col":
                mask = reference_transposable_mask(flat).reshape(part.shape)
            else:
                mask = torch.zeros(part.shape, dtype=torch.bool)
                for i, j in itertools.product(range(part.shape[2]), range(part.shape[3])):
                    mask[:, :, i, j] = reference_transposable_mask(part[:, :, i, j])
        elif gemm == "grad_input":
            mask = reference_nm_mask(part, rule.n, rule.m, 0)
        elif rule.group_order == "im2col":
            mask = reference_nm_mask(flat, rule.n, rule.m, 1).reshape(part.shape)
        else:
            mask = reference_nm_mask(part, rule.n, rule.m, 1)
        parts.append(mask)
    return torch.cat(parts)


def _rescaled(rule: NM, tensor: Tensor, mask: Tensor, dim: int, conv_groups: int) -> Tensor:
    """SDGP's rescaled magnitude: S(tensor) scaled to the L1 norm of tensor; zero norms scale by 1.

    ``tensor`` is grad_output as (N, Cout, P*Q). ``rescale="sample_channel"`` takes the norms per
    (n, cout), ``"channel"`` per cout over batch and positions, ``"group"`` per group along ``dim``.
    """
    pruned = torch.where(mask, tensor, 0.0)

    def scaled(whole: Tensor, kept: Tensor, over: int | tuple[int, ...]) -> Tensor:
        norm, kept_norm = (t.abs().sum(over, keepdim=True) for t in (whole, kept))
        return kept * torch.where(kept_norm == 0, 1.0, norm / kept_norm)

    if rule.rescale == "sample_channel":
        return scaled(tensor, pruned, 2)
    if rule.rescale == "channel":
        return scaled(tensor, pruned, (0, 2))
    length = tensor.shape[dim] // (conv_groups if dim == 1 else 1)  # ends with the conv group
    groups = [
        scaled(whole, kept, dim)
        for whole_part, kept_part in zip(
            tensor.split(length, dim), pruned.split(length, dim), strict=True
        )
        for whole, kept in zip(
            whole_part.split(rule.m, dim), kept_part.split(rule.m, dim), strict=True
        )
    ]
    return torch.cat(groups, dim)


def draw(draws: Mapping[str, Tensor | int], key: str, why: str) -> Tensor:
    """``draws[key]``.

    Raises:
        ValueError: it is missing.
    """
    if key not in draws:
        raise ValueError(f"draws must have the key {key!r} ({why}), got the keys {sorted(draws)}")
    return torch.as_tensor(draws[key], device="cpu")


def pruned_operand(
    rule: Rule,
    gemm: str,
    tensor: Tensor,
    draws: Mapping[str, Tensor | int],
    groups: int,
) -> Tensor:
    """S(tensor), ``tensor`` being weight or grad_output as they are, or input as columns."""
    if methods.is_method(rule):
        return methods.operand(rule, gemm, tensor, draws, groups)
    if isinstance(rule, TopK):
        return torch.where(reference_top_k_mask(tensor, rule.density), tensor, 0.0)
    if isinstance(rule, Reuse):
        return _reused(tensor, draws)
    if isinstance(rule, Unstructured):
        return torch.where(reference_unstructured_mask(tensor, rule.sparsity), tensor, 0.0)
    if isinstance(rule, KernelPatterns):
        return torch.where(reference_kernel_mask(tensor, rule), tensor, 0.0)
    by_position = rule.operand == "grad_output" and rule.group_order == "position"
    literal = isinstance(rule, Transposable) and (rule.n, rule.m) == (2, 4)
    literal = literal or (isinstance(rule, NM) and rule.rule != "random")
    if gemm in draws or not literal:
        mask = draw(draws, gemm, f"the mask of {rule.operand} under {rule}").to(torch.bool)
    elif rule.operand == "weight":
        mask = _weight_mask(rule, gemm, tensor, groups)
    elif rule.operand == "input":
        mask = reference_nm_mask(tensor, rule.n, rule.m, 2)
    elif gemm == "grad_input" and not by_position:
        parts = tensor.chunk(groups, dim=1)  # groups of m end with the convolution group
        mask = torch.cat([reference_nm_mask(part, rule.n, rule.m, 1) for part in parts], dim=1)
    else:
        mask = reference_nm_mask(tensor.flatten(2), rule.n, rule.m, 2).reshape(tensor.shape)
    if isinstance(rule, NM) and rule.rule == "magnitude_rescaled":  # of grad_output only
        dim = 1 if gemm == "grad_input" and not by_position else 2
        flat = _rescaled(rule, tensor.flatten(2), mask.flatten(2), dim, groups)
        return flat.reshape(tensor.shape)
    return torch.where(mask, tensor, 0.0)


def _reused(grads: Tensor, draws: Mapping[str, Tensor | int]) -> Tensor:
    """ReSprop: prev + P(dY - prev), or dY without a previous step."""
    if "previous" not in draws:
        return grads
    previous, threshold = exact(draws["previous"]), float(draws["threshold"])
    samples = []
    for sample in grads:
        difference = sample - previous
        samples.append(previous + difference * (difference.abs() > threshold))
    return torch.stack(samples)
