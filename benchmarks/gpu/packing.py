"""2:4 weights as sparse tensor cores read them, packed by PyTorch's operators, and what that takes.

    python benchmarks/gpu/packing.py --out benchmarks/out/packing.json

Packs S(W) and S(Wᵀ) of ResNet-18's convolutions in bfloat16, unpacks them again, and times a step's
packing of all of them: eager, and on a GPU as a CUDA graph. A step gains what its products gain,
less this time.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import torch
from captured import captured
from torch import Tensor, nn

from fst.backends.timing import compare
from fst.basics.arguments import add_traceback, positive, user_errors
from fst.cli.environment import surroundings
from fst.rules.masks import nm_mask
from fst.training.architecture import build_architecture

ALIGNED = 16  # columns whose metadata fill 16 bits
SHIFTS = (0, 4, 8, 12)


class Packed(NamedTuple):
    """A matrix (rows, K) that is 2:4 along its rows, as mma.sp, wgmma.sp and CUTLASS number it.

    Attributes:
        values: (rows, K / 2), the two kept values of each group in their order, zeros too.
        metadata: (rows, K / 16), int16: four bits for each group, the first group in the lowest:
            the first kept place, and the second one times 4. Other numbers of places are undefined.
    """

    values: Tensor
    metadata: Tensor


def matrix_of(weight: Tensor) -> Tensor:
    """(Cout, Cin, kh, kw) as (Cout, kh·kw·Cin), in which groups of channels lie side by side."""
    return weight.permute(0, 2, 3, 1).flatten(1)


def matrix_of_gradient(weight: Tensor) -> Tensor:
    """The matrix (Cin, kh·kw·Cout) of dX, which at stride 1 is a convolution of dY."""
    return matrix_of(weight.transpose(0, 1).flip(2, 3))


def pack(matrix: Tensor) -> Packed:
    """Prune (rows, K) to 2:4 by magnitude, and pack it.

    Raises:
        ValueError: K is no multiple of `ALIGNED`.
    """
    rows, columns = matrix.shape
    if columns % ALIGNED:
        raise ValueError(
            f"matrix has shape {tuple(matrix.shape)}: {ALIGNED} must divide the length of rows."
        )
    groups = matrix.reshape(rows, -1, 4)
    first, second, third, fourth = nm_mask(groups, 2, 4, dim=2).long().unbind(2)
    low, high = (1 - first) * (2 - second), 3 * fourth + (1 - fourth) * (1 + third)
    values = groups.gather(2, torch.stack((low, high), 2))
    indices = (low | high << 2).unflatten(1, (-1, 4)).unbind(2)
    words = sum(index << shift for index, shift in zip(indices, SHIFTS, strict=True))
    return Packed(values.flatten(1), words.to(torch.int16))  # which wraps: the bits count


def unpack(packed: Packed) -> Tensor:
    """The matrix (rows, K), with its zeros."""
    values, metadata = packed
    indices = torch.stack([metadata.long() >> shift & 15 for shift in SHIFTS], 2).flatten(1)
    places = torch.stack((indices & 3, indices >> 2), 2)
    groups = values.new_zeros((*indices.shape, 4))
    return groups.scatter(2, places, values.unflatten(1, (-1, 2))).flatten(1)


def main() -> None:
    """Pack, unpack, time, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="resnet18", help="of torchvision (resnet18)")
    parser.add_argument("--repeats", type=positive, default=15, help="rounds (15)")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/out/packing.json"), help="JSON to write"
    )
    add_traceback(parser)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with user_errors(options):
        model = build_architecture("torchvision", options.model, num_classes=1000)
    matrices = [
        to_matrix(layer.weight.detach().to(device, torch.bfloat16))
        for layer in model.modules()
        if isinstance(layer, nn.Conv2d) and layer.groups == 1 and layer.in_channels % ALIGNED == 0
        for to_matrix in (matrix_of, matrix_of_gradient)
    ]
    for matrix in matrices:
        groups = matrix.unflatten(1, (-1, 4))
        assert torch.equal(unpack(pack(matrix)), (groups * nm_mask(groups, 2, 4, dim=2)).flatten(1))
    candidates = {"eager": lambda: [pack(matrix) for matrix in matrices]}
    if device.type == "cuda":
        candidates["captured"] = captured(candidates["eager"])
    times = compare(candidates, options.repeats, device)
    for name, timing in times.items():
        print(f"{options.model}: S(W) and S(Wt) of a step packed in {timing} ms, {name}")
    written = {
        "model": options.model,
        "weights": sum(matrix.numel() for matrix in matrices) // 2,
        "ms": {name: list(timing) for name, timing in times.items()},
        **surroundings(device),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(written, indent=1, default=str) + "\n")
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
