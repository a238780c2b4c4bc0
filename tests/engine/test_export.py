"""`fst export` from end to end."""

import pytest
import torch

import fst
from fst.engine import cli
from fst.engine.export import main
from fst.export.formats import FORMATS

pytest.importorskip("onnxruntime")


def test_a_run_is_exported(train, write_config, tmp_path, capsys):
    config, checkpoint = write_config(), str(train() / "epoch_2.pth")
    folded = str(tmp_path / "folded.pth")
    cli.fold([config, checkpoint, folded])
    found = {}
    for number, source in enumerate((checkpoint, folded)):
        out = tmp_path / f"model{number}.onnx"
        capsys.readouterr()
        assert main([config, source, str(out), "--size", "16"]) == 0
        said = capsys.readouterr().out
        assert "images: (x - [78.0]) / [96.0], x in 0..255" in said
        images = torch.ones(3, 1, 16, 16)
        (found[number],) = FORMATS[".onnx"].outputs(out, (images,))
    assert torch.equal(found[0], found[1]) and found[0].shape == (3, 10)
    plain = tmp_path / "model.safetensors"
    assert main([config, checkpoint, str(plain)]) == 0
    assert fst.verify(plain).ok


def test_mistakes_end_in_one_line(train, write_config, tmp_path, capsys):
    checkpoint = str(train() / "epoch_1.pth")
    for config, out, expected in (
        (write_config(), "m.onnx", "needs --size"),
        (write_config(), "m.txt", "needs --size"),
        (write_config("None"), "m.onnx", "has no `sparsity`"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main([config, checkpoint, str(tmp_path / out)])
        assert stopped.value.code == 2 and expected in capsys.readouterr().err
