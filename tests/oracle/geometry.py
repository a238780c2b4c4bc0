"""Windows of the literal reference: where a convolution's windows lie, im2col and col2im."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.oracle.rules import exact

Pair = int | Sequence[int]


def _pair(value: Pair) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


class Windows:
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

    def evened(self) -> Windows:
        """The same for an image that has the uneven part of the padding in it."""
        even = copy.copy(self)
        even.size = tuple(n + b - a for n, (a, b) in zip(self.size, self.padding, strict=True))
        even.padding = [(before, before) for before, _ in self.padding]
        return even

    def widened(self, height: int, width: int) -> Windows:
        """The same with an output map of at least that size: zeros follow the image."""
        wide = copy.copy(self)
        wide.output = (height, width)
        wide.padding = [
            (pad[0], max(pad[1], (n - 1) * step + d * (k - 1) + 1 - length - pad[0]))
            for pad, n, step, d, k, length in zip(
                self.padding,
                wide.output,
                self.stride,
                self.dilation,
                self.kernel,
                self.size,
                strict=True,
            )
        ]
        return wide

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
    return Windows(input_size, kernel_size, stride, padding, dilation).output


def reference_im2col(
    input: Tensor,
    kernel_size: Sequence[int],
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
) -> Tensor:
    """Columns (N, Cin*kh*kw, P*Q) of ``input`` (N, Cin, H, W), float64."""
    geometry = Windows(input.shape[2:], kernel_size, stride, padding, dilation)
    return geometry.im2col(exact(input))
