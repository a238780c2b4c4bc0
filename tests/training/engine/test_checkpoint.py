"""Loading never runs code; saving is atomic; stock mmengine checkpoints can still be read."""

import os
import shutil
import zipfile
from argparse import Namespace

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer
from mmengine.runner import CheckpointLoader
from torch import nn

from fst.cli import main
from fst.files.checkpoint import load_checkpoint_safely, state_dict_of
from fst.training.engine import Runner  # MMEngine's loader runs no code from here on
from tests.campaign.payloads import CANARY, PAYLOADS


@pytest.fixture
def malicious(tmp_path):
    """One file that would run code; tests/campaign has many more for the function that reads."""
    (tmp_path / "a.pth").write_bytes(PAYLOADS["system"](tmp_path))
    yield tmp_path / "a.pth"
    assert not (tmp_path / CANARY).exists()


def test_downloaded_checkpoints_run_no_code(malicious, tmp_path, monkeypatch):
    """MMEngine finds the address, and the file is there already or is fetched."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda url, to, **_: fetched.append(url))
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(malicious, tmp_path / "checkpoints")
    fetched: list[str] = []
    for address in (str(malicious), "https://example.org/a.pth"):
        with pytest.raises(ValueError, match="so that no code from the file can run"):
            CheckpointLoader.load_checkpoint(address)
    torch.save({"weight": torch.ones(1)}, tmp_path / "checkpoints" / "resnet18-f37072fd.pth")
    assert CheckpointLoader.load_checkpoint("torchvision://resnet18")["weight"] == 1
    with pytest.raises(FileNotFoundError, match="resnet50"):
        CheckpointLoader.load_checkpoint("torchvision://resnet50")
    assert len(fetched) == 1 and "resnet50" in fetched[0]


def test_malicious_checkpoints_are_refused_by_every_tool(malicious, write_config, tmp_path, capsys):
    path, config = str(malicious), write_config()
    work_dir = ["--work-dir", str(tmp_path / "w")]
    for command in (
        ["verify", path],
        ["fold", config, path, str(tmp_path / "out.pth")],
        ["test", config, path, *work_dir],
        ["train", config, "--resume", path, *work_dir],
    ):
        with pytest.raises(SystemExit):
            main(command)
        assert "no code from the file can run" in capsys.readouterr().err


def test_compressed_files_are_bounded(tmp_path):
    torch.save({"weight": torch.zeros(10**6)}, tmp_path / "a.pth")
    with (
        zipfile.ZipFile(tmp_path / "a.pth") as whole,
        zipfile.ZipFile(tmp_path / "small.pth", "w", zipfile.ZIP_DEFLATED) as small,
    ):
        for record in whole.infolist():
            small.writestr(record.filename, whole.read(record))
    with pytest.raises(ValueError, match="larger than the file"):
        load_checkpoint_safely(tmp_path / "small.pth")


def test_files_without_checksums_are_readable(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"weight": torch.ones(3)}, tmp_path / "a.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    torch.save({"weight": torch.ones(3)}, tmp_path / "b.pth", _use_new_zipfile_serialization=False)
    for name in ("a.pth", "b.pth"):
        assert load_checkpoint_safely(tmp_path / name)["weight"].sum() == 3


def test_checkpoints_of_stock_mmengine_are_readable(tmp_path):
    stock = {
        "meta": {"epoch": 3, "time": "now"},
        "state_dict": nn.Linear(2, 2).state_dict(),
        "message_hub": {"log_scalars": {"loss": HistoryBuffer([1.0, 2.0], [1, 1])}},
        "best": np.float64(0.5),
        "steps": np.int32(1000),
        "is_best": np.bool_(True),
    }
    torch.save(stock, tmp_path / "stock.pth")
    loaded = load_checkpoint_safely(tmp_path / "stock.pth")
    assert loaded["meta"] == stock["meta"] and loaded["best"] == 0.5
    assert (loaded["steps"], loaded["is_best"]) == (1000, True)
    assert not isinstance(loaded["message_hub"]["log_scalars"]["loss"], HistoryBuffer)


def test_checkpoints_of_other_trainers_are_read(train, write_config, tmp_path):
    """Those of PyTorch's ImageNet example under DataParallel, with the arguments of the script."""
    trained = load_checkpoint_safely(train("run", sparsity="None") / "epoch_2.pth")["state_dict"]
    names = {name: f"module.{name.removeprefix('architecture.')}" for name in trained}
    state_dict = {names[name]: value for name, value in trained.items()}
    path = str(tmp_path / "other.pth")
    torch.save({"state_dict": state_dict, "args": Namespace(lr=0.1), "epoch": 3}, path)
    main(["test", write_config("None"), path, "--work-dir", str(tmp_path / "test"), "--traceback"])
    start = f"load_from = {path!r}\noptim_wrapper['optimizer']['lr'] = 0.0\n"
    tuned = train("tuned", sparsity="None", extra=start)
    found = load_checkpoint_safely(tuned / "epoch_2.pth")["state_dict"]
    assert torch.equal(found["architecture.3.weight"], trained["architecture.3.weight"])


@pytest.mark.parametrize("name", ["model.pt2", "model.onnx"])
def test_exported_programs_are_no_checkpoints(name, tmp_path):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=f"{name}' is an exported program"):
        load_checkpoint_safely(tmp_path / name)


def test_outdated_checkpoints_go_after_the_new_one_is_complete(train, monkeypatch):
    present = []
    save = Runner.save_checkpoint

    def spy(self, out_dir, filename, *args, **kwargs):
        save(self, out_dir, filename, *args, **kwargs)
        present.append(sorted(p for p in os.listdir(out_dir) if p.endswith(".pth")))

    monkeypatch.setattr(Runner, "save_checkpoint", spy)
    work_dir = train(
        extra='default_hooks["checkpoint"] = dict(type="CheckpointHook", interval=1, '
        'max_keep_ckpts=1, save_best="accuracy/top1", rule="greater")\n'
        "train_cfg = dict(by_epoch=True, max_epochs=4)\n"
    )
    assert ["epoch_1.pth", "epoch_2.pth"] in [[n for n in p if n[0] == "e"] for p in present]
    left = sorted(p.name for p in work_dir.glob("*.pth"))
    assert left == ["best_accuracy_top1.pth", "epoch_4.pth"]
    assert not list(work_dir.glob(".fst-*"))


def test_foreign_checkpoint(train, tmp_path):
    with pytest.raises(ValueError, match="holds no weights"):
        state_dict_of({"epoch": 3}, "none.pth")
    torch.save({"state_dict": {"backbone.weight": torch.ones(3)}}, tmp_path / "foreign.pth")
    with pytest.raises(ValueError, match="belongs to another model"):
        train(extra=f'load_from = "{tmp_path / "foreign.pth"}"\n')
