"""Every kernel compiles for sm_80 and sm_90a without a GPU, without spills and with wide loads."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from fst.backends import ops, sources

ROOT = Path(__file__).parents[2]
TARGETS = ("80", "90a")


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    values = torch.empty(shape, dtype=dtype, device="meta")
    return values.contiguous(memory_format=torch.channels_last)


def _prune_weights():
    kernels = sources.load("prune_weight")
    weight = _meta(64, 64, 3, 3, dtype=torch.float32)
    results = [torch.empty_like(weight, dtype=torch.bfloat16) for _ in range(2)]
    (launch,) = kernels.launches([kernels.Job(weight, 1, *results)], (2, 4), (2, 4))
    return launch


def _add_decay():
    kernels = sources.load("prune_weight")
    weight = _meta(64, 64, 3, 3, dtype=torch.float32)
    job = kernels.Job(weight, 1, gradient=torch.empty_like(weight))
    (launch,) = kernels.launches([job], (2, 4), None, decay=2e-4)
    return launch


def _prune_gradient(rule: str = "magnitude", n: int = 2, m: int = 4):
    grad_output = _meta(256, 64, 56, 56)
    seed = torch.empty(1, dtype=torch.int64, device="meta")
    return sources.load("prune_gradient").prune_launch(
        grad_output, torch.empty_like(grad_output), n, m, rule, "", 1, seed, None
    )


def _sums():
    return sources.load("prune_gradient").sums_launch(
        _meta(256, 64, 56, 56), 2, 4, 1, by_sample=True
    )[0]


def _fold():
    grad_output, lattice = _meta(256, 64, 56, 56), (0, 1, 0, 2)
    (result,) = ops._folded(grad_output, lattice)
    return sources.load("fold").fold_launch(grad_output, result, (1, 2), lattice)


LAUNCHES = {
    "prune_weights": _prune_weights,
    "add_decay": _add_decay,
    "prune_gradient": _prune_gradient,
    "prune_gradient random": lambda: _prune_gradient("random"),
    "prune_gradient 4:8": lambda: _prune_gradient("magnitude", 4, 8),
    "sums": _sums,
    "fold": _fold,
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_triton(name, triton_compiler):
    launch = LAUNCHES[name]()
    for capability in (80, 90):
        made = sources.load("inspect_triton").compile_for(launch, capability)
        assert made.stack == 0
        assert made.registers <= 128
        assert any(kind.startswith("ld.global.v4") for kind in made.memory)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "source", ["kernels/prune_baseline_sm80.cu", "benchmarks/gpu/instructions.cu"]
)
def test_cuda(source, target, tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    made = subprocess.run(
        [
            *("nvcc", "-O3", "-std=c++17", "-Xptxas", "-v", "-c", str(ROOT / source)),
            f"-gencode=arch=compute_{target},code=sm_{target}",
            *("-o", str(tmp_path / "object.o")),
        ],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    spills = re.findall(r"(\d+) bytes spill", made.stderr)
    assert spills
    assert not any(int(count) for count in spills)
