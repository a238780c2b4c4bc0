"""The machine code of the 2:4 kernels: sparse instructions, wide loads, nothing spilled."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fst.ops import __main__ as command

pytestmark = pytest.mark.system

FOLDER = Path(__file__).resolve().parents[2] / "kernels" / "sparse24"
EIGHTS = 4  # of positions that a warp multiplies its rows with


def disassembler() -> Path | None:
    """CUDA's own, or the one that comes with Triton."""
    found = shutil.which("cuobjdump")
    if found:
        return Path(found)
    triton = importlib.util.find_spec("triton")
    inside = triton and Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return inside if inside and inside.is_file() else None


@pytest.fixture(scope="module", params=["80", "90a"])
def compiled(request, tmp_path_factory) -> tuple[str, dict[str, str]]:
    """What the compiler said, and kernel -> machine code."""
    tool = disassembler()
    if shutil.which("nvcc") is None or tool is None:
        pytest.skip("nvcc or cuobjdump is not installed")
    made = tmp_path_factory.mktemp("compiled") / "kernels.o"
    architecture = f"-gencode=arch=compute_{request.param},code=sm_{request.param}"
    options = ("-O3", "-std=c++17", "-Xptxas", "-v", architecture)
    source = str(FOLDER / "sparse24_sm80.cu")
    done = subprocess.run(
        ["nvcc", *options, "-c", source, "-o", made], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    dumped = subprocess.run([tool, "-sass", made], capture_output=True, text=True, check=True)
    _, *functions = re.split(r"Function : (\S+)", dumped.stdout)
    return done.stderr, dict(zip(functions[::2], functions[1::2], strict=True))


def test_nothing_is_spilled_and_nothing_is_warned_of(compiled):
    said, kernels = compiled
    spills = re.findall(r"(\d+) bytes spill", said)
    assert len(spills) == 2 * len(kernels) and not any(map(int, spills))
    assert "warning" not in said.lower()
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", said)]
    assert max(registers) <= 128  # so that a multiprocessor has room for two blocks
    assert not any(re.search(r"\b(LDL|STL)\b", code) for code in kernels.values())


def test_every_product_is_a_sparse_instruction(compiled):
    _, kernels = compiled
    for scalar, suffix in (("Half", r"F32 "), ("Bfloat", r"F32\.BF16 ")):
        (code,) = (c for name, c in kernels.items() if f"convolveI{len(scalar)}{scalar}" in name)
        sparse = re.findall(rf"HMMA\.SP\.16832\.{suffix}", code)
        assert len(sparse) == len(re.findall(r"\bHMMA\.", code)) == 2 * 4 * EIGHTS
        assert len(re.findall(r"LDSM\.16\.M88\.4", code)) == 2 * EIGHTS
        assert re.search(r"LDGSTS\.E\.BYPASS\.128", code)
        assert re.search(r"STG\.E\.128", code)
        assert len(re.findall(r"LDS\.128", code)) >= 9  # eight of weights, one of metadata


def test_help_and_bad_arguments_of_the_build_command(capsys):
    with pytest.raises(SystemExit) as done:
        command.main(["build", "--help"])
    assert done.value.code == 0 and "--arch" in capsys.readouterr().out
    for bad in ("7.5", "sm_80", "9"):
        with pytest.raises(SystemExit):
            command.main(["build", "--arch", bad])
        assert bad in capsys.readouterr().err
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            command.main(["build"])
        assert "--arch is needed" in capsys.readouterr().err
    command.main([])
    assert "mma_sp" in capsys.readouterr().out


def _build(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: torch reads the folder and the architectures when imported."""
    command_line = [sys.executable, "-m", "fst.ops", "build", *arguments]
    return subprocess.run(command_line, capture_output=True, text=True, cwd=FOLDER.parents[1])


@pytest.mark.slow
def test_the_extension_builds_as_torch_builds_it(monkeypatch, tmp_path):
    if shutil.which("nvcc") is None or shutil.which("ninja") is None:
        pytest.skip("nvcc or ninja is not installed")
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
    major = str(torch.version.cuda).split(".")[0]
    if f"release {major}." not in version:
        pytest.skip(f"torch is built for CUDA {torch.version.cuda}, nvcc is of another one")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    done = _build("--arch", "9.0a")
    assert done.returncode == 0, done.stderr
    built = re.findall(r"^(\w+): \d+ s, (\S+)$", done.stdout, re.MULTILINE)
    assert [name for name, _ in built] == ["fst_sparse24"]
    assert all(Path(file).is_file() for _, file in built)


def test_a_failed_build_says_what_is_needed(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    done = _build("--arch", "8.0")
    assert done.returncode == 1
    assert "fst_sparse24 could not be built for 8.0" in done.stderr and "nvcc" in done.stderr
