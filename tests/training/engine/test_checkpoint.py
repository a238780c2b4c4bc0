"""Loading never runs code; saving is atomic; stock mmengine checkpoints can still be read."""

import os
import pickle
import zipfile
from argparse import Namespace

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer
from mmengine.runner import CheckpointLoader
from torch import nn

from fst.cli import main
from fst.files.checkpoint import load_checkpoint_safely, save_atomically, state_dict_of


class Payload:
    """Pickles as a call that creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def malicious(tmp_path):
    weights = {"state_dict": {"weight": torch.ones(1)}, "meta": Payload(tmp_path / "executed")}
    torch.save(weights, tmp_path / "zip.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(weights["meta"]))
    torch.save(weights, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    yield [tmp_path / name for name in ("zip.pth", "plain.pth", "old.pth")]
    assert not (tmp_path / "executed").exists()


def test_malicious_checkpoints_are_refused(malicious):
    for path in malicious:
        with pytest.raises(ValueError, match=rf"{path.name}.* was not loaded"):
            load_checkpoint_safely(path)
        with pytest.raises(ValueError, match="so that no code from the file can run"):
            CheckpointLoader.load_checkpoint(str(path))


def test_downloaded_checkpoints_run_no_code(malicious, tmp_path, monkeypatch):
    """MMEngine finds the address, and the file is there already or is fetched."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda url, to, **_: fetched.append(url))
    (tmp_path / "checkpoints").mkdir()
    malicious[0].rename(tmp_path / "checkpoints" / "zip.pth")
    fetched: list[str] = []
    with pytest.raises(ValueError, match="so that no code from the file can run"):
        CheckpointLoader.load_checkpoint("https://example.org/zip.pth")
    torch.save({"weight": torch.ones(1)}, tmp_path / "checkpoints" / "resnet18-f37072fd.pth")
    assert CheckpointLoader.load_checkpoint("torchvision://resnet18")["weight"] == 1
    with pytest.raises(FileNotFoundError, match="resnet50"):
        CheckpointLoader.load_checkpoint("torchvision://resnet50")
    assert len(fetched) == 1 and "resnet50" in fetched[0]


def test_malicious_checkpoints_are_refused_by_every_tool(malicious, write_config, tmp_path, capsys):
    path, config = str(malicious[0]), write_config()
    for command in (
        lambda: main(["verify", path]),
        lambda: main(["fold", config, path, str(tmp_path / "out.pth")]),
        lambda: main(["test", config, path, "--work-dir", str(tmp_path / "w")]),
        lambda: main(["train", config, "--resume", path, "--work-dir", str(tmp_path / "w")]),
    ):
        with pytest.raises((ValueError, SystemExit)):
            command()
    assert "no code from the file can run" in capsys.readouterr().err


def test_getattr_in_a_checkpoint_reaches_nothing(tmp_path):
    class Reach:
        def __reduce__(self):
            return getattr, (np.ndarray, "tofile")

    torch.save({"found": Reach(), "weight": torch.ones(1)}, tmp_path / "a.pth")
    assert load_checkpoint_safely(tmp_path / "a.pth")["found"] is None


def test_files_build_no_pointers(tmp_path):
    class Call:
        def __init__(self, function, *arguments):
            self.reduced = function, arguments

        def __reduce__(self):
            return self.reduced

    addresses = torch.arange(64).numpy().tobytes()
    built = Call(np._core.multiarray._reconstruct, np.ndarray, (0,), b"b")
    built.reduced = *built.reduced, (1, (64,), np.dtype(object), False, addresses)
    called = Call(np.ndarray, (64,), np.dtype(object), addresses)
    for content in (called, built, Call(np.ndarray, (10**9,))):
        torch.save({"found": content}, tmp_path / "a.pth")
        found = load_checkpoint_safely(tmp_path / "a.pth")["found"]
        assert type(found).__module__ == "fst.files.checkpoint"
    scalar = Call(np._core.multiarray.scalar, np.dtype(object), addresses[:8])
    torch.save({"found": scalar}, tmp_path / "a.pth")
    with pytest.raises(ValueError, match="a.pth' is corrupt.*OBJECT"):
        load_checkpoint_safely(tmp_path / "a.pth")


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


def test_a_flipped_byte_is_noticed(tmp_path):
    weights = {f"{i}": torch.rand(50) for i in range(4)}
    save_atomically(weights, tmp_path / "a.pth")
    whole = (tmp_path / "a.pth").read_bytes()
    for weight in weights.values():
        start = whole.index(weight.numpy().tobytes())
        for place in (start, start + 101, start + 199):
            flipped = bytearray(whole)
            flipped[place] ^= 4
            (tmp_path / "a.pth").write_bytes(flipped)
            with pytest.raises(ValueError, match="a.pth' is corrupt.*CRC"):
                load_checkpoint_safely(tmp_path / "a.pth")


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


def test_corrupt_and_missing_files(tmp_path):
    save_atomically({"weight": torch.ones(1000)}, tmp_path / "good.pth")
    whole = (tmp_path / "good.pth").read_bytes()
    for name, content in {
        "empty.pth": b"",
        "text.pth": b"hello",
        "half.pth": whole[: len(whole) // 2],
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            load_checkpoint_safely(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"absent\.pth"):
        load_checkpoint_safely(tmp_path / "absent.pth")
    torch.save({"epoch": 3}, tmp_path / "none.pth")
    with pytest.raises(ValueError, match="holds no weights"):
        state_dict_of(load_checkpoint_safely(tmp_path / "none.pth"), "none.pth")


@pytest.mark.parametrize("name", ["model.pt2", "model.onnx"])
def test_exported_programs_are_no_checkpoints(name, tmp_path):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=f"{name}' is an exported program"):
        load_checkpoint_safely(tmp_path / name)


def test_outdated_checkpoints_go_after_the_new_one_is_complete(train, monkeypatch):
    from fst.training.engine.runner import Runner

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
    torch.save({"state_dict": {"backbone.weight": torch.ones(3)}}, tmp_path / "foreign.pth")
    with pytest.raises(ValueError, match="belongs to another model"):
        train(extra=f'load_from = "{tmp_path / "foreign.pth"}"\n')
