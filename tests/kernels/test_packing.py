"""benchmarks/gpu/packing.py: 2:4 weights as values and metadata, against slow references."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.sparse import _semi_structured_conversions as conversions

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def packing(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("packing")


def _matrix(rows: int, columns: int) -> torch.Tensor:
    """Random numbers with ties, and groups that hold one number or none besides zeros."""
    matrix = torch.randn(rows, columns, dtype=torch.bfloat16)
    matrix[:, ::7], matrix[:, 3::11] = 1, -1
    matrix[::5, 4:12], matrix[::5, 6] = 0, 2
    return matrix


def test_each_group_keeps_its_two_largest_in_their_order(packing):
    matrix = _matrix(8, 32)
    values, metadata = packing.pack(matrix)
    for row in range(8):
        for group in range(8):
            of = matrix[row, 4 * group : 4 * group + 4].tolist()
            low, high = sorted(sorted(range(4), key=lambda place: -abs(of[place]))[:2])
            assert values[row, 2 * group : 2 * group + 2].tolist() == [of[low], of[high]]
            word = int(metadata[row, group // 4]) & 0xFFFF
            assert word >> 4 * (group % 4) & 15 == low + 4 * high


def test_unpacking_returns_what_was_kept(packing):
    matrix = _matrix(64, 192)
    groups = matrix.unflatten(1, (-1, 4))
    order = groups.abs().sort(dim=2, descending=True, stable=True).indices[..., :2]
    kept = torch.zeros_like(groups).scatter(2, order, groups.gather(2, order))
    assert torch.equal(packing.unpack(packing.pack(matrix)), kept.flatten(1))


def test_the_metadata_are_those_of_torchs_compressor(packing):
    """Whose order of rows and columns, CUTLASS's for sm_80, is undone."""
    matrix = torch.randn(64, 128, dtype=torch.bfloat16)
    packed = packing.pack(matrix)
    dense = packing.unpack(packed)
    values, reordered = conversions.sparse_semi_structured_from_dense_cutlass(dense)
    offsets = conversions._calculate_meta_reordering_scatter_offsets(
        *reordered.shape, reordered.dtype, reordered.device
    )
    assert torch.equal(values, packed.values)
    assert torch.equal(reordered.flatten()[offsets].view_as(reordered), packed.metadata)


def test_the_matrices_are_those_of_a_convolution_and_of_its_gradient(packing):
    weight = torch.randn(8, 16, 3, 3, dtype=torch.float64)
    images = torch.randn(2, 16, 5, 6, dtype=torch.float64, requires_grad=True)
    output = F.conv2d(images, weight, padding=1)
    columns = F.unfold(images, 3, padding=1).unflatten(1, (16, 9)).transpose(1, 2).flatten(1, 2)
    product = packing.matrix_of(weight) @ columns
    torch.testing.assert_close(product.view_as(output), output)
    grad_output = torch.randn_like(output)
    (grad_input,) = torch.autograd.grad(output, images, grad_output)
    columns = F.unfold(grad_output, 3, padding=1).unflatten(1, (8, 9)).transpose(1, 2).flatten(1, 2)
    product = packing.matrix_of_gradient(weight) @ columns
    torch.testing.assert_close(product.view_as(grad_input), grad_input)


def test_other_widths_are_refused(packing):
    with pytest.raises(ValueError, match=r"matrix has shape \(4, 24\): 16 must divide the length"):
        packing.pack(torch.zeros(4, 24))
