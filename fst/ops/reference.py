"""Slow, literal float64 reference of the sparse convolution, to test every fast path against.

Nothing here is shared with the fast implementation: the masks are made group by group with Python's
``sorted``, the convolution is im2col and one matrix product per sample and convolution group, and
the alternating rule multiplies with the explicit matrix T of FST (Xu et al., AAAI 2022), Eq. 10.

Shapes, throughout: ``input`` (N, Cin, H, W), ``weight`` (Cout, Cin/groups, kh, kw), ``grad_output``
(N, Cout, P, Q), columns (N, Cin*kh*kw, P*Q) with the row order (cin, kh, kw), kw fastest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fst.strategy import NM, Alternating, SameAsOutput, Strategy, Transposable

Pair = int | Sequence[int]


class ReferenceResult(NamedTuple):
    """The output and the three gradients, float64, on the CPU; grad_bias is None without a bias."""

    output: Tensor
    grad_input: Tensor
    grad_weight: Tensor
    grad_bias: Tensor | None


def _exact(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)


# ---------------------------------------------------------------- masks


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
    moved = _exact(tensor).abs().movedim(dim, -1)
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

    The matrix is padded with zeros to 4x4 tiles; in each the pattern of largest kept L1 norm wins,
    the first one of `transposable_patterns` among equals. Returns a bool (rows, columns).
    """
    rows, columns = matrix.shape
    padded = torch.zeros(-(-rows // 4) * 4, -(-columns // 4) * 4, dtype=torch.float64)
    padded[:rows, :columns] = _exact(matrix).abs()
    mask = torch.zeros(padded.shape, dtype=torch.bool)
    patterns = transposable_patterns()
    for top, left in itertools.product(range(0, len(padded), 4), range(0, padded.shape[1], 4)):
        tile = padded[top : top + 4, left : left + 4].tolist()
        scores = [
            sum(tile[i][j] for i in range(4) for j in range(4) if pattern[i][j])
            for pattern in patterns
        ]
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
    if width == 1:
        phase = 0
    block_height, block_width = rule.block
    kept = torch.zeros(size, dtype=torch.bool)
    shift = torch.zeros(size, size, dtype=torch.float64)
    for p, q in itertools.product(range(height), range(width)):
        first_p, first_q = p - p % block_height, q - q % block_width
        keeper_p, keeper_q = first_p, first_q
        if phase == 1:
            keeper_q = first_q + 1
            if keeper_q == width:  # the odd last column joins the last kept one
                keeper_q -= 2
        position, keeper = p * width + q, keeper_p * width + keeper_q
        if position == keeper:
            kept[position] = True
        else:
            shift[position, keeper] = 1.0
    return kept, shift


# ---------------------------------------------------------------- convolution geometry


def _pair(value: Pair) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


class _Geometry:
    """Where the windows lie: the padding on each side, the output map, im2col and col2im."""

    def __init__(
        self,
        input_size: Sequence[int],
        kernel_size: Sequence[int],
        stride: Pair,
        padding: Pair | str,
        dilation: Pair,
    ) -> None:
        self.size = tuple(int(length) for length in input_size)
        self.kernel = tuple(int(length) for length in kernel_size)
        self.stride, self.dilation = _pair(stride), _pair(dilation)
        reach = [d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True)]
        if padding == "same":  # an odd total puts the extra row or column at the end, as torch does
            self.padding = [(total // 2, total - total // 2) for total in reach]
        else:
            self.padding = [(p, p) for p in ((0, 0) if padding == "valid" else _pair(padding))]
        self.output = tuple(
            (length + sum(pad) - extent - 1) // step + 1
            for length, pad, extent, step in zip(
                self.size, self.padding, reach, self.stride, strict=True
            )
        )

    def _windows(self, padded: Tensor) -> list[Tensor]:
        """The view (N, C, P, Q) of what each kernel position touches, kw fastest."""
        views = []
        for i, j in itertools.product(range(self.kernel[0]), range(self.kernel[1])):
            rows = slice(i * self.dilation[0], None, self.stride[0])
            columns = slice(j * self.dilation[1], None, self.stride[1])
            views.append(padded[:, :, rows, columns][:, :, : self.output[0], : self.output[1]])
        return views

    def _zeros(self, batch: int, channels: int) -> Tensor:
        height, width = (n + sum(pad) for n, pad in zip(self.size, self.padding, strict=True))
        return torch.zeros(batch, channels, height, width, dtype=torch.float64)

    def _inside(self, padded: Tensor) -> Tensor:
        (top, _), (left, _) = self.padding
        return padded[:, :, top : top + self.size[0], left : left + self.size[1]]

    def im2col(self, tensor: Tensor) -> Tensor:
        """(N, C, H, W) to columns (N, C*kh*kw, P*Q)."""
        padded = self._zeros(*tensor.shape[:2])
        self._inside(padded).copy_(tensor)
        columns = torch.stack(self._windows(padded), dim=2)
        rows = tensor.shape[1] * math.prod(self.kernel)
        return columns.reshape(len(tensor), rows, math.prod(self.output))

    def col2im(self, columns: Tensor, channels: int) -> Tensor:
        """Columns (N, C*kh*kw, P*Q) to (N, C, H, W), overlaps added: the adjoint of `im2col`."""
        padded = self._zeros(len(columns), channels)
        parts = columns.reshape(len(columns), channels, math.prod(self.kernel), *self.output)
        for index, window in enumerate(self._windows(padded)):
            window += parts[:, :, index]
        return self._inside(padded).clone()


def output_size(
    input_size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
) -> tuple[int, int]:
    """The output map (P, Q) of a convolution over an (H, W) input."""
    return _Geometry(input_size, kernel_size, stride, padding, dilation).output


def reference_im2col(
    input: Tensor,
    kernel_size: Sequence[int],
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
) -> Tensor:
    """Columns (N, Cin*kh*kw, P*Q) of ``input`` (N, Cin, H, W), float64."""
    geometry = _Geometry(input.shape[2:], kernel_size, stride, padding, dilation)
    return geometry.im2col(_exact(input))


# ---------------------------------------------------------------- rules


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


def _draw(draws: Mapping[str, Tensor | int], key: str, why: str) -> Tensor:
    if key not in draws:
        raise ValueError(f"draws must have the key {key!r} ({why}), got the keys {sorted(draws)}")
    return torch.as_tensor(draws[key], device="cpu")


def _pruned(
    rule: NM | Transposable,
    gemm: str,
    tensor: Tensor,
    draws: Mapping[str, Tensor | int],
    groups: int,
) -> Tensor:
    """S(tensor), ``tensor`` being weight or grad_output as they are, or input as columns."""
    literal = isinstance(rule, Transposable) and (rule.n, rule.m) == (2, 4)
    literal = literal or (isinstance(rule, NM) and rule.rule != "random")
    if gemm in draws or not literal:
        mask = _draw(draws, gemm, f"the mask of {rule.operand} under {rule}").to(torch.bool)
    elif rule.operand == "weight":
        mask = _weight_mask(rule, gemm, tensor, groups)
    elif rule.operand == "input":
        mask = reference_nm_mask(tensor, rule.n, rule.m, 2)
    elif gemm == "grad_input":
        parts = tensor.chunk(groups, dim=1)  # groups of m end with the convolution group
        mask = torch.cat([reference_nm_mask(part, rule.n, rule.m, 1) for part in parts], dim=1)
    else:
        mask = reference_nm_mask(tensor.flatten(2), rule.n, rule.m, 2).reshape(tensor.shape)
    if isinstance(rule, NM) and rule.rule == "magnitude_rescaled":  # of grad_output only
        dim = 1 if gemm == "grad_input" else 2
        flat = _rescaled(rule, tensor.flatten(2), mask.flatten(2), dim, groups)
        return flat.reshape(tensor.shape)
    return torch.where(mask, tensor, 0.0)


# ---------------------------------------------------------------- the three GEMMs


class ReferenceOperands(NamedTuple):
    """Both operands of each of the three GEMMs, pruned as the strategy says, float64.

    Each weight is (Cout, Cin/groups, kh, kw), grad_output (N, Cout, P, Q), columns
    (N, Cin*kh*kw, P*Q).
    """

    output_weight: Tensor
    output_columns: Tensor
    grad_input_weight: Tensor
    grad_input_grad_output: Tensor
    grad_weight_grad_output: Tensor
    grad_weight_columns: Tensor


def reference_operands(
    input: Tensor,
    weight: Tensor,
    grad_output: Tensor,
    *,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
    strategy: Strategy,
    draws: Mapping[str, Tensor | int] | None = None,
) -> ReferenceOperands:
    """What `reference_conv2d`, which has the same arguments, multiplies in each GEMM."""
    draws = draws or {}
    inputs, weights, grads = map(_exact, (input, weight, grad_output))
    geometry = _Geometry(inputs.shape[2:], weights.shape[2:], stride, padding, dilation)
    expected = (len(inputs), len(weights), *geometry.output)
    if tuple(grads.shape) != expected:
        raise ValueError(
            f"grad_output must have the output's shape {expected}, got {tuple(grads.shape)}"
        )
    columns = geometry.im2col(inputs)
    forward_weight, backward_weight, backward_grads = weights, weights, grads
    weight_grads, weight_columns = grads, columns

    if strategy.output is not None:
        forward_weight = _pruned(strategy.output, "output", weights, draws, groups)
    rule = strategy.grad_input
    if isinstance(rule, SameAsOutput | Transposable):
        backward_weight = forward_weight
    elif rule is not None and rule.operand == "weight":
        backward_weight = _pruned(rule, "grad_input", weights, draws, groups)
    elif rule is not None:
        backward_grads = _pruned(rule, "grad_input", grads, draws, groups)
    rule = strategy.grad_weight
    if isinstance(rule, Alternating):
        phase = rule.phase
        if phase == "random":
            phase = int(_draw(draws, "phase", "0 or 1, the phase drawn in this step"))
        kept, shift = alternating_matrices(*geometry.output, rule, phase)
        weight_columns = torch.where(kept, columns, 0.0)
        if rule.restore:
            flat = grads.flatten(2)
            weight_grads = (flat + flat @ shift).reshape(grads.shape)
    elif rule is not None and rule.operand == "input":
        weight_columns = _pruned(rule, "grad_weight", columns, draws, groups)
    elif rule is not None:
        weight_grads = _pruned(rule, "grad_weight", grads, draws, groups)
    return ReferenceOperands(
        forward_weight, columns, backward_weight, backward_grads, weight_grads, weight_columns
    )


def reference_conv2d(
    input: Tensor,
    weight: Tensor,
    grad_output: Tensor,
    *,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
    strategy: Strategy,
    draws: Mapping[str, Tensor | int] | None = None,
) -> ReferenceResult:
    """Output and gradients of a sparse convolution, computed in float64 as the papers write them.

    For each sample and convolution group, with X the im2col columns (FST, Eq. 1 to 3, each with at
    most one operand pruned, as ``strategy`` says)::

        output      Y  = S(W) X
        grad_input  dX = col2im(S(Wᵀ) dY)  or  col2im(Wᵀ S(dY))  or  col2im(S(W)ᵀ dY)
        grad_weight dW = S(dY) Xᵀ  or  dY S(Xᵀ)  or  (dY + dY T) S(Xᵀ),  + λ (W - S(W)) (SR-STE)
        grad_bias   db = Σ dY, never pruned

    Args:
        input: (N, Cin, H, W).
        weight: (Cout, Cin/groups, kh, kw).
        grad_output: (N, Cout, P, Q).
        bias: (Cout,) or None.
        stride, padding, dilation, groups: as in ``torch.nn.functional.conv2d``, with "same" and
            "valid".
        strategy: what is pruned in each GEMM; its decay is added if ``decay_mode="gradient"``.
        draws: what a rule cannot compute by itself, by GEMM name: the mask of a random rule or of a
            transposable one other than 2:4 (key "output"), shaped like weight or grad_output, or
            like the columns for input; ``"phase"``: 0 or 1 for ``Alternating(phase="random")``. A
            mask given for any other N:M rule replaces its own.
    """
    x = reference_operands(
        input,
        weight,
        grad_output,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        strategy=strategy,
        draws=draws,
    )
    geometry = _Geometry(input.shape[2:], weight.shape[2:], stride, padding, dilation)
    outputs, rows = len(weight) // groups, x.output_columns.shape[1] // groups
    output = torch.zeros(grad_output.shape, dtype=torch.float64)
    grad_columns = torch.zeros_like(x.output_columns)
    grad_weight = torch.zeros(weight.shape, dtype=torch.float64)
    for sample, group in itertools.product(range(len(input)), range(groups)):
        o = slice(group * outputs, (group + 1) * outputs)
        r = slice(group * rows, (group + 1) * rows)
        product = x.output_weight[o].flatten(1) @ x.output_columns[sample, r]
        output[sample, o] = product.reshape(outputs, *geometry.output)
        grads = x.grad_input_grad_output[sample, o].flatten(1)
        grad_columns[sample, r] = x.grad_input_weight[o].flatten(1).T @ grads
        grads = x.grad_weight_grad_output[sample, o].flatten(1)
        product = grads @ x.grad_weight_columns[sample, r].T
        grad_weight[o] += product.reshape(outputs, *weight.shape[1:])
    grad_input = geometry.col2im(grad_columns, input.shape[1])

    if strategy.decay and strategy.decay_mode == "gradient":
        grad_weight = grad_weight + strategy.decay * (_exact(weight) - x.output_weight)
    grad_bias = None
    if bias is not None:
        output = output + _exact(bias).reshape(1, -1, 1, 1)
        grad_bias = _exact(grad_output).sum((0, 2, 3))
    return ReferenceResult(output, grad_input, grad_weight, grad_bias)


def reference_linear(
    input: Tensor,
    weight: Tensor,
    grad_output: Tensor,
    *,
    bias: Tensor | None = None,
    strategy: Strategy,
    draws: Mapping[str, Tensor | int] | None = None,
) -> ReferenceResult:
    """The same for a fully connected layer, as a 1x1 convolution over the positions of each sample.

    ``input`` (N, *, in), ``weight`` (out, in), ``grad_output`` (N, *, out); the middle dimensions
    are flattened to one row of P*Q positions, of which a 2-D input has a single one. Masks in
    ``draws`` are shaped like the convolution's operands: (out, in, 1, 1), (N, out, 1, P*Q) and
    (N, in, P*Q).
    """

    def as_map(tensor: Tensor) -> Tensor:
        return tensor.reshape(len(tensor), -1, tensor.shape[-1]).movedim(-1, 1).unsqueeze(2)

    result = reference_conv2d(
        as_map(input),
        weight[:, :, None, None],
        as_map(grad_output),
        bias=bias,
        strategy=strategy,
        draws=draws,
    )

    def as_features(tensor: Tensor, features: int) -> Tensor:
        return tensor.squeeze(2).movedim(1, -1).reshape(*input.shape[:-1], features)

    return ReferenceResult(
        as_features(result.output, weight.shape[0]),
        as_features(result.grad_input, weight.shape[1]),
        result.grad_weight.reshape(weight.shape),
        result.grad_bias,
    )
