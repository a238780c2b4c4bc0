"""`fst export` from end to end."""

import json

import pytest
import torch

import fst
from fst.cli import main
from fst.files.formats import FORMATS

pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")


@pytest.mark.system
def test_a_run_is_exported(train, write_config, tmp_path, capsys):
    config, checkpoint = write_config(), str(train() / "epoch_2.pth")
    folded = str(tmp_path / "folded.pth")
    main(["fold", config, checkpoint, folded])
    found = {}
    for number, source in enumerate((checkpoint, folded)):
        out = tmp_path / f"model{number}.onnx"
        capsys.readouterr()
        assert main(["export", config, source, str(out), "--size", "16"]) == 0
        said = capsys.readouterr().out
        assert "images: grey, (x - [78.0]) / [96.0], x in 0..255" in said
        assert "of 3 weights 1 is 2:4, 1 exempt, 1 not pruned to N:M" in said
        assert fst.verify(out).ok and len(fst.verify(out).layers) == 2
        file = onnx.load(out)
        held = {entry.key: json.loads(entry.value) for entry in file.metadata_props}
        assert (held["channels"], held["mean"], held["std"]) == ("grey", [78.0], [96.0])
        assert held["classes"] == ([str(digit) for digit in range(10)] if number == 0 else [])
        assert [output.name for output in file.graph.output] == ["logits"]
        images = torch.ones(3, 1, 16, 16)
        (found[number],) = FORMATS[".onnx"].outputs(out, (images,))
    assert torch.equal(found[0], found[1]) and found[0].shape == (3, 10)
    plain = tmp_path / "model.safetensors"
    assert main(["export", config, checkpoint, str(plain)]) == 0
    assert fst.verify(plain).ok
    small, old = tmp_path / "small.safetensors", tmp_path / "old.onnx"
    assert main(["export", config, checkpoint, str(small), "--compressed"]) == 0
    state = fst.load(small)
    assert state.keys() == fst.load(plain).keys()
    assert all(torch.equal(value, fst.load(plain)[name]) for name, value in state.items())
    assert main(["export", config, checkpoint, str(old), "--size", "16", "--opset", "13"]) == 0
    assert onnx.load(old).opset_import[0].version == 13
    any_size = [str(tmp_path / "m.pt2"), "--size", "16", "--dynamic-size"]
    assert main(["export", config, checkpoint, *any_size]) == 0


def test_mistakes_end_in_one_line(train, write_config, tmp_path, error_of):
    checkpoint = str(train() / "epoch_1.pth")
    for config, out, expected in (
        (write_config(), "m.onnx", "needs --size"),
        (write_config(), "m.txt", "the suffix '.txt' is unknown. Did you mean"),
        (write_config("None"), "m.safetensors", "has no `sparsity`"),
    ):
        assert expected in error_of("export", config, checkpoint, tmp_path / out)
