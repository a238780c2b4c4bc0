"""The record of what must be N:M, in every form of a model."""

import copy

import pytest
import torch
from torch import nn

import fst
from fst.files.records import records_in, records_of
from fst.rules.schedule import DENSE
from tests.programs import python

GROUPS = {"n": 2, "m": 4, "group_order": "channel"}


def _partly_converted():
    """A stem and a transposed convolution that stay dense, a linear layer that is 2:4."""
    net = nn.Sequential(
        *(nn.Conv2d(3, 8, 4, 4), nn.ConvTranspose2d(8, 8, 1), nn.Conv2d(8, 8, 1)),
        *(nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 4)),
    )
    fst.convert(net, "srste", include=["2", "3", "5"])
    return net


def _files(net, folder):
    """Every form that a folded model is kept in."""
    plain, images = fst.fold(net), torch.randn(2, 3, 12, 12)
    state = plain.state_dict()
    torch.save(state, folder / "state.pth")
    torch.save({"state_dict": nn.DataParallel(plain).state_dict()}, folder / "nested.pth")
    targets = {"converted": net, "folded": plain, "copied": copy.deepcopy(plain), "state": state}
    targets |= {name: folder / name for name in ("state.pth", "nested.pth")}
    for suffix in (".safetensors", ".onnx", ".pt2"):
        targets[suffix] = folder / f"model{suffix}"
        fst.export(net, targets[suffix], images)
        targets[f"folded{suffix}"] = folder / f"folded{suffix}"
        fst.export(plain, targets[f"folded{suffix}"], images)
    return targets


def test_what_was_converted_is_known_of_every_form_of_a_model(tmp_path):
    pytest.importorskip("onnxscript")
    net = _partly_converted()
    for form, target in _files(net, tmp_path).items():
        report = fst.verify(target)
        assert report.ok, f"{form}: {report}"
        found = {check.name: check.is_exempt for check in report.layers}
        assert found == {"2.weight": False, "3.weight": True, "5.weight": False}, form
        assert report.not_pruned == 3, form
    plain = nn.Sequential(*(copy.deepcopy(layer) for layer in fst.fold(net)))
    again = _partly_converted()
    again.load_state_dict(plain.state_dict())  # of the same names, so any model loads it


def test_a_layer_that_is_dense_in_its_phase_is_recorded_as_not_pruned():
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3))
    fst.convert(net, "acdc")
    net[1].set_phase(DENSE)
    plain = fst.fold(net)
    assert torch.equal(plain[1].weight, net[1].weight)
    for target in (net, plain, plain.state_dict()):
        report = fst.verify(target)
        assert report.ok and [check.name for check in report.layers] == ["0.weight"]


def test_a_weight_that_lost_its_zeros_is_named_in_every_form(tmp_path):
    pytest.importorskip("onnxscript")
    plain = fst.fold(_partly_converted())
    with torch.no_grad():
        plain[5].weight.fill_(1)
    assert not fst.verify(plain).ok
    with pytest.raises(RuntimeError, match="weight '5.weight' is not 2:4"):
        fst.export(plain, tmp_path / "m.safetensors")
    torch.save(plain.state_dict(), tmp_path / "m.pth")
    assert [c.name for c in fst.verify(tmp_path / "m.pth").layers if not c.ok] == ["5.weight"]


def test_a_folded_layer_that_is_converted_again_forgets_what_it_was():
    plain = fst.fold(_partly_converted())
    fst.convert(plain, "srste", include="2")
    assert len(records_of(plain)) == 2 and "version" in plain.state_dict()._metadata["2"]
    assert records_in(plain.state_dict()) == {k: v for k, v in records_of(plain).items()}


def test_a_folded_model_needs_no_fst(tmp_path):
    """Pickled whole, and its state_dict, in a process that cannot import fst."""
    plain = fst.fold(_partly_converted())
    torch.save(plain, tmp_path / "model.pth")
    torch.save(plain.state_dict(), tmp_path / "state.pth")
    code = (
        "import sys, torch; sys.modules['fst'] = None\n"
        f"model = torch.load({str(tmp_path / 'model.pth')!r}, weights_only=False)\n"
        f"model.load_state_dict(torch.load({str(tmp_path / 'state.pth')!r}, weights_only=True))\n"
        "print([type(layer).__name__ for layer in model])"
    )
    assert python("-c", code).stdout.split("'")[1::2] == [type(layer).__name__ for layer in plain]


@pytest.mark.parametrize("version", [{"fst": 3}, {"fst": {"n": 2}}, {"fst": {**GROUPS, "n": "2"}}])
def test_a_damaged_record_is_refused_by_name(version, tmp_path):
    state = fst.fold(_partly_converted()).state_dict()
    state._metadata["2"]["version"] = version
    torch.save(state, tmp_path / "m.pth")
    with pytest.raises(ValueError, match=r"m\.pth.*the record .* of the weight of '2' is damaged"):
        fst.verify(tmp_path / "m.pth")


def test_a_pattern_without_groups_leaves_no_record():
    net = nn.Sequential(nn.Conv2d(8, 8, 3))
    fst.convert(net, "sdgp")
    assert records_of(fst.fold(net)) == {"0.weight": None}
    assert not fst.verify(fst.fold(net)).ok  # nothing is known to be N:M: all are checked


@pytest.mark.parametrize("suffix", [".safetensors", ".onnx", ".pt2"])
def test_damaged_files_of_each_format_are_refused_by_name(suffix, tmp_path):
    pytest.importorskip("onnxscript")
    path = tmp_path / f"whole{suffix}"
    fst.export(_partly_converted(), path, torch.randn(2, 3, 12, 12))
    content = path.read_bytes()
    contents = {"empty": b"", "text": b"these are no weights", "cut": content[: len(content) // 2]}
    for name, data in contents.items():
        damaged = tmp_path / f"{name}{suffix}"
        damaged.write_bytes(data)
        with pytest.raises(ValueError, match=name):
            fst.verify(damaged)
    with pytest.raises(FileNotFoundError, match="absent"):
        fst.verify(tmp_path / f"absent{suffix}")
