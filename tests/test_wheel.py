"""What a user installs: the wheel, built from the sdist, works in a folder with nothing in it."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

# it compiles the kernels, once
pytestmark = [pytest.mark.system, pytest.mark.timeout(1500), pytest.mark.xdist_group("wheel")]

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("cpu.h", "prune.cpp", "prune.h", "positions_draw.cpp")
LEFT_OUT = shutil.ignore_patterns(
    *(".git", ".venv", "build", "dist", "work_dirs", "out", "*.egg-info", "__pycache__", ".*_cache")
)
CHILD = """
_base_ = "fst::configs/demo_digits.py"
train_cfg = dict(by_epoch=True, max_epochs=1)
optim_wrapper = dict(optimizer=dict(lr=0.05))
"""


PRUNED = """
import torch
from fst.ops import cpp, prune
from fst.ops.positions.draw import measure_positions
assert cpp.missing() == "", cpp.missing()
one, none = (1, 1), (0, 0)
scores, _ = measure_positions(torch.ones(1, 4, 3, 3), (3, 3), one, one, none, one, False)
print(scores.tolist())
"""


def run(*command: str | Path, folder: Path, **variables: str) -> str:
    """The output of a command, in an environment without PYTHONPATH."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= variables
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    source = folder / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=LEFT_OUT)
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, folder, folder=source)
    (file,) = folder.glob("*.tar.gz")
    return file


def build_wheel(sdist: Path, folder: Path, **variables: str) -> Path:
    pip = (sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--no-build-isolation")
    run(*pip, sdist, "--wheel-dir", folder, folder=folder, **variables)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    """Compiled without optimization, in a quarter of the time that a user's takes."""
    folder = tmp_path_factory.mktemp("wheel")
    compiler = folder / "c++"
    compiler.write_text(f'#!/bin/sh\nexec "{shutil.which("c++")}" "$@" -O0\n')
    compiler.chmod(0o755)
    return build_wheel(sdist, folder, CXX=str(compiler))


def install(wheel: Path, folder: Path) -> Path:
    """The programs of an environment that holds the wheel and sees this one's dependencies."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, folder=folder)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip = (sys.executable, "-m", "pip", "--quiet", "--python", python)
    run(*pip, "install", "--no-deps", wheel, folder=folder)
    return folder / "bin"


@pytest.fixture(scope="module")
def binaries(wheel, tmp_path_factory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("environment"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler is installed")
def test_the_wheel_holds_compiled_kernels_that_work(wheel, binaries, tmp_path):
    libraries = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert "fst/kernels/cpu_base.so" in libraries
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    assert run(binaries / "python", "-c", PRUNED, folder=tmp_path) == f"{[2.0] * 9}\n"
    assert re.search(r"C\+\+ kernels +cpu_\w+\.so", run(binaries / "fst", "env", folder=tmp_path))


@pytest.mark.slow
def test_without_a_compiler_fst_is_installed_and_says_what_is_missing(sdist, tmp_path):
    wheel = build_wheel(sdist, tmp_path, CC="/bin/false", CXX="/bin/false")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not any(name.endswith(".so") for name in zipfile.ZipFile(wheel).namelist())
    folder = tmp_path / "environment"
    folder.mkdir()
    said = run(install(wheel, folder) / "fst", "env", folder=tmp_path)
    sentence = "not compiled: install GCC or Clang, then install FST again"
    assert re.search(rf"C\+\+ kernels +{sentence}", said)
    assert re.search(rf"prune_weight +cpp +{sentence}", said)


def test_the_wheel_holds_configs_and_sources(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "configs").rglob("*"):
        if path.suffix in (".py", ".yaml"):
            assert f"fst/.mim/configs/{path.relative_to(ROOT).as_posix()}" in names
    assert {"fst/.mim/model-index.yml", *(f"fst/kernels/{name}" for name in SOURCES)} <= names
    assert not any(name.startswith(("tests/", "configs/", "tools/")) for name in names)


def test_the_index_shows_no_link_into_the_repository(wheel):
    """A package index has the README alone: paths are text there, and pages on the web links."""
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
    shown = archive.read(name).decode()
    assert "Description-Content-Type: text/markdown" in shown
    targets = re.findall(r"\]\(([^)\s]+)\)", shown)
    assert targets and all(target.startswith("https://") for target in targets)
    for target in re.findall(r"\((docs/[^)#]+)", shown):
        assert (ROOT / target).exists(), target
    assert "(docs/choose.md)" in shown


@pytest.mark.slow
def test_the_demo_trains_in_an_empty_folder(binaries, tmp_path):
    start = (binaries / "fst", "train", "fst::configs/demo_digits")
    quick = ("train_cfg.max_epochs=1", "train_dataloader.dataset.subset=128")
    run(*start, "--seed", "0", "--cfg-options", *quick, folder=tmp_path)
    checkpoint = tmp_path / "work_dirs" / "demo_digits" / "epoch_1.pth"
    assert checkpoint.is_file()

    (tmp_path / "child.py").write_text(CHILD)
    fold = (binaries / "fst", "fold", "child.py", checkpoint, "folded.pth")
    assert "folded " in run(*fold, folder=tmp_path)
    assert "weights are 2:4" in run(binaries / "fst", "verify", "folded.pth", folder=tmp_path)

    said = run(binaries / "fst", "env", folder=tmp_path)
    assert str(binaries.parent) in said and f"{ROOT}{os.sep}" not in said


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git names the files, in a checkout")
def test_the_sdist_is_complete(sdist):
    names = {name.partition("/")[2] for name in tarfile.open(sdist).getnames()}
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    wanted = (".github/", "fst/", "kernels/", "configs/", "tools/", "tests/", "docs/", "examples/")
    top = {"CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "constraints.txt"}
    missing = [
        name
        for name in listed
        if (name.startswith(wanted) or name in top)
        and (ROOT / name).is_file()
        and name not in names
    ]
    assert not missing
