"""N:M weights of a .safetensors file as values and positions: smaller, and exactly as they were."""

import json
import math
import re

import pytest
import torch
from torch import nn

import fst
from fst.files.safetensors_file import COMPRESSED, PARTS
from tests.programs import ROOT, python

safetensors = pytest.importorskip("safetensors.torch")
DOCS = ROOT / "docs" / "deploy.md"


def network(strategy="srste", **options) -> nn.Sequential:
    """Layers of whole and of broken groups, a depthwise one, a linear one, and a dense one."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 13, 3, bias=False)),
        *(nn.Conv2d(13, 13, 1, groups=13), nn.Conv2d(13, 8, 1), nn.Linear(8, 8), nn.Linear(8, 3)),
    )
    fst.convert(net, strategy, include=["0", "2", "3", "4", "5"], **options)
    return net


@pytest.mark.parametrize("n, m", [(2, 4), (1, 4), (2, 8), (3, 5), (1, 2), (4, 32), (4, 4)])
@pytest.mark.parametrize("strategy", ["srste", "fst-literal"])
def test_what_is_loaded_is_what_was_saved(strategy, n, m, tmp_path):
    """Along the channels, and along im2col."""
    options = dict(n=n, m=m)
    if strategy == "fst-literal":
        strategy, options = "fst", {**options, "literal": True}
    net = network(strategy, **options)
    plain = fst.fold(net)
    fst.export(net, tmp_path / "c.safetensors", compressed=True)
    state = fst.load(tmp_path / "c.safetensors")
    assert state.keys() == plain.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    for target in (state, tmp_path / "c.safetensors"):
        said = sorted(str(fst.verify(target)).splitlines())
        assert said == sorted(str(fst.verify(plain.state_dict())).splitlines())
    network().load_state_dict(state)


@pytest.mark.parametrize("dtype, share", [(torch.float32, 0.53), (torch.bfloat16, 0.56)])
def test_the_share_of_the_bytes(dtype, share, tmp_path):
    net = nn.Sequential(nn.Conv2d(256, 256, 3, bias=False)).to(dtype)
    fst.convert(net, "srste")
    for compressed in (False, True):
        report = fst.export(net, tmp_path / f"{compressed}.safetensors", compressed=compressed)
    small, large = ((tmp_path / f"{kind}.safetensors").stat().st_size for kind in (True, False))
    assert small / large == pytest.approx(share, abs=0.005)
    assert report.share == pytest.approx(share, abs=0.005) and f"{share} of the bytes" in str(
        report
    )


def test_weights_of_few_zeros_and_special_values(tmp_path):
    """Groups of fewer than n non-zero values, NaN excluded by export, and the largest ones."""
    net = nn.Sequential(nn.Conv2d(8, 4, 1, bias=False))
    fst.convert(net, "srste")
    plain = fst.fold(net)
    with torch.no_grad():
        plain[0].weight.zero_()
        plain[0].weight[1, 3], plain[0].weight[2, 4:6] = (
            3e38,
            torch.tensor([1e-45, -3e38])[:, None, None],
        )
    fst.export(plain, tmp_path / "m.safetensors", compressed=True)
    assert torch.equal(fst.load(tmp_path / "m.safetensors")["0.weight"], plain[0].weight)


def test_what_would_not_get_smaller_stays_as_it_is(tmp_path):
    fst.export(network(), tmp_path / "m.safetensors", compressed=True)
    with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as file:
        names, said = set(file.keys()), json.loads(file.metadata()[COMPRESSED])
    assert set(said) == {"0.weight", "2.weight", "4.weight", "5.weight"}
    assert {"3.weight", "6.weight"} <= names and "0.weight" not in names
    dense = nn.Sequential(nn.Conv2d(8, 8, 1))
    fst.export(dense, tmp_path / "d.safetensors", compressed=True)
    assert fst.load(tmp_path / "d.safetensors").keys() == dense.state_dict().keys()


def damages(tensors, layout):
    """Name -> (change, words of the error)."""
    values, positions = (f"0.weight{end}" for end in PARTS)

    def same(name):
        tensors[name] = torch.zeros_like(tensors[name])

    return {
        "no values": (lambda: tensors.pop(values), "'0.weight.values'"),
        "no positions": (lambda: tensors.pop(positions), "'0.weight.positions'"),
        "short": (lambda: tensors.update({positions: tensors[positions][:-1]}), "are no 144 bytes"),
        "equal positions": (lambda: same(positions), "not those of groups, in order"),
        "other shape": (lambda: layout.update(shape=[16, 80, 3, 3]), "have the shape"),
        "huge": (lambda: layout.update(shape=[1 << 40, 8, 3, 3]), "have the shape"),
        "no shape": (lambda: layout.update(shape=[16]), ""),
        "negative": (lambda: layout.update(shape=[-16, 8, 3, 3]), ""),
        "no m": (lambda: layout.pop("m"), "'m'"),
        "m of text": (lambda: layout.update(m="4"), ""),
        "m of zero": (lambda: layout.update(m=0), ""),
    }


@pytest.mark.parametrize("name", damages({}, {}))
def test_damaged_weights_are_refused_by_name(name, tmp_path):
    path = tmp_path / "m.safetensors"
    fst.export(network(), path, compressed=True)
    with safetensors.safe_open(path, "pt") as file:
        tensors, said = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()
    layouts = json.loads(said[COMPRESSED])
    change, words = damages(tensors, layouts["0.weight"])[name]
    change()
    safetensors.save_file(tensors, path, said | {COMPRESSED: json.dumps(layouts)})
    for read in (fst.load, fst.verify):
        with pytest.raises(ValueError, match=rf"m\.safetensors.*'0\.weight' is damaged: .*{words}"):
            read(path)


def test_what_fst_load_does_not_read_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="fst.load reads .safetensors; torch.load reads"):
        fst.load("model.pth")
    with pytest.raises(FileNotFoundError, match="absent"):
        fst.load(tmp_path / "absent.safetensors")
    with pytest.raises(ValueError, match="compressed=True: only .safetensors files have it"):
        fst.export(network(), tmp_path / "m.onnx", torch.randn(1, 8, 9, 9), compressed=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n, m, literal", [(2, 4, False), (3, 5, False), (2, 4, True)])
def test_the_documented_reader_needs_numpy_alone(n, m, literal, dtype, tmp_path):
    code = next(
        block
        for block in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
        if "def read(" in block
    )
    assert len(code.splitlines()) <= 30
    net = network("fst", n=n, m=m, literal=literal).to(dtype)
    fst.export(net, tmp_path / "m.safetensors", compressed=True)
    program = (
        "import sys; sys.modules['torch'] = sys.modules['safetensors'] = None\n"
        f"{code}\nstate = read(sys.argv[1])\nnp.savez(sys.argv[2], **state)\n"
    )
    made = [str(tmp_path / "m.safetensors"), str(tmp_path / "m.npz")]
    python("-c", program, *made)
    import numpy as np

    found, expected = np.load(made[1]), fst.fold(net).state_dict()
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(torch.from_numpy(found[name]).to(value.dtype), value), name
    assert math.prod(found["0.weight"].shape) == 16 * 8 * 9
