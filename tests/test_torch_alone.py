"""The library's commands and its export, where PyTorch and what it requires are all there is."""

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[1]
FOLDED = """
import torch, fst
model = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3))
fst.convert(model, "fst")
model(torch.randn(2, 4, 6, 6)).sum().backward()
plain = fst.fold(model)
torch.save(plain.state_dict(), "folded.pth")
print(fst.export(plain, "model.pt2", torch.randn(2, 4, 6, 6)))
"""


def distributions(name: str) -> Iterator[importlib.metadata.Distribution]:
    """A distribution, and those that it requires."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:  # of another platform
        return
    yield found
    for requirement in found.requires or ():
        if "extra ==" not in requirement:
            yield from distributions(re.match(r"[\w.-]+", requirement)[0])


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """A folder of links to the packages that an installation of PyTorch consists of."""
    folder = tmp_path_factory.mktemp("packages")
    for found in distributions("torch"):
        for file in found.files or ():
            top = file.parts[0]
            if top != ".." and not (folder / top).exists():
                (folder / top).symlink_to(found.locate_file(top))
    return folder


def test_what_needs_torch_alone(packages, tmp_path):
    path = os.pathsep.join((str(packages), str(ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}

    def run(*words: str, status: int = 0) -> str:
        command = [sys.executable, "-S", *words]  # without this environment's other packages
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert "mmengine" not in run("-c", "import importlib.util as u; print(u.find_spec('mmengine'))")
    assert "1 is 2:4" in run("-c", FOLDED)
    assert "1 weight is 2:4" in run("-m", "fst", "verify", "folded.pth")
    assert "pip install 'fst-train[train]'" in run("-m", "fst", "env")
    (tmp_path / "config.py").touch()
    said = run("-m", "fst", "fold", "config.py", "folded.pth", "out.pth", status=2)
    assert said.endswith("error: mmengine is not installed: pip install 'fst-train[train]'\n")
