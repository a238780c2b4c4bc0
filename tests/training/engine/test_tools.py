"""The commands of `fst` that train and check, from end to end."""

import argparse
import os
import platform
import shlex
import signal
import sys

import pytest
import torch
import yapf.yapflib.yapf_api
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from timm.layers import StdConv2d
from torch import nn

import fst
import fst.models
from fst.basics.arguments import user_errors
from fst.cli import main
from fst.files.checkpoint import load_checkpoint_safely
from fst.lab.ablation import runs
from fst.training.engine import Runner
from fst.training.engine.config import load_config
from tests.programs import python


def test_fold_verify_and_test(train, write_config, tmp_path, capsys):
    work_dir = train()
    checkpoint, folded = str(work_dir / "epoch_2.pth"), str(tmp_path / "folded.pth")
    config = write_config()
    assert main(["fold", config, checkpoint, folded]) == 0
    assert "folded 2 layers" in capsys.readouterr().out

    model = fst.models.tiny_net()
    model.load_state_dict(torch.load(folded, weights_only=True))
    assert fst.verify(folded).ok

    assert main(["verify", folded]) == 0
    assert "1 weight is 2:4, 1 exempt" in capsys.readouterr().out
    assert main(["verify", folded, "--min-coverage", "0.59"]) == 0  # 576 of 968 weights
    assert main(["verify", folded, "--min-coverage", "0.6"]) == 1
    assert "coverage 59.5%, less than min_coverage=0.6" in capsys.readouterr().out
    assert main(["verify", folded, "--n", "1"]) == 1
    assert main(["verify", checkpoint]) == 1
    out = capsys.readouterr().out
    assert "keeps dense weights" in out and f"fst fold CONFIG {checkpoint} OUT" in out
    assert main(["verify", checkpoint, "--include", "architecture.0.weight"]) == 0

    logs = []
    for number, path in enumerate((checkpoint, folded)):
        main(["test", write_config(), path, "--work-dir", str(tmp_path / f"test{number}")])
        text = next((tmp_path / f"test{number}").glob("*/*.log")).read_text()
        logs.append(text.rpartition("accuracy/top1:")[2].split()[0])
    assert logs[0] == logs[1]


def test_a_folded_file_is_evaluated_as_it_is(train, write_config, tmp_path):
    """rigl's layers have other densities than its rule, which would prune the first one again."""
    sparsity = 'dict(strategy="rigl", sparsity=0.8)'
    checkpoint, folded = train(sparsity=sparsity) / "epoch_2.pth", tmp_path / "folded.pth"
    main(["fold", write_config(sparsity), str(checkpoint), str(folded)])
    images, outputs = torch.rand(2, 1, 8, 8), []
    for number, path in enumerate((checkpoint, folded)):
        config = load_config(write_config(sparsity))
        config.update(work_dir=str(tmp_path / f"run{number}"), load_from=str(path))
        runner = Runner.from_cfg(config)
        runner.val()
        outputs.append(runner.model.architecture(images))
    assert torch.equal(*outputs)


def test_tsm_is_folded_with_its_kept_mask(train, write_config, tmp_path):
    sparsity = 'dict(strategy="tsm", interval=100)'
    work_dir = train(sparsity=sparsity)
    folded = tmp_path / "folded.pth"
    main(["fold", write_config(sparsity), str(work_dir / "epoch_2.pth"), str(folded)])
    mask = load_checkpoint_safely(work_dir / "epoch_2.pth")["sparsity"]["3"]["kept_mask"]
    weight = torch.load(folded, weights_only=True)["3.weight"]
    assert torch.equal(weight != 0, mask.view(weight.shape))


def test_errors(train, write_config, tmp_path, error_of):
    work_dir = train(sparsity="None")
    dense = str(work_dir / "epoch_1.pth")
    config = write_config()
    for arguments, message in (
        ([config, dense, "out.pth"], "comes from a dense training"),
        ([write_config("None"), dense, "out.pth"], "nothing to fold"),
        ([config, "absent.pth", "out.pth"], "absent.pth"),
    ):
        assert message in error_of("fold", *arguments)
    for arguments in (
        *(["absent.pth"], [dense, "--n", "5"], [dense, "--include", "x*"]),
        [dense, "--min-coverage", "60"],
    ):
        error_of("verify", *arguments)


@pytest.mark.parametrize("command", ["fold", "export"])
def test_no_output_replaces_the_checkpoint_or_a_folder(write_config, tmp_path, command, error_of):
    checkpoint, folder = tmp_path / "epoch_1.pth", tmp_path / "folder"
    checkpoint.write_bytes(b"trained for days")
    folder.mkdir()
    for out, message in ((checkpoint, "is the checkpoint"), (folder, "is a folder")):
        assert message in error_of(command, write_config(), checkpoint, out)
    assert checkpoint.read_bytes() == b"trained for days"
    assert not list(tmp_path.glob(".fst-*"))


def test_fold_refuses_what_the_dense_model_would_standardise_again(
    write_config, tmp_path, monkeypatch, error_of
):
    def net(num_classes=10):
        return nn.Sequential(StdConv2d(1, 8, 3), nn.Flatten(), nn.Linear(288, num_classes))

    monkeypatch.setattr(fst.models, "tiny_net", net)
    model, checkpoint = net(), tmp_path / "epoch_1.pth"
    fst.convert(model, "fst")
    sparsity = fst.sparsity_state(model)
    torch.save({"state_dict": model.state_dict(), "sparsity": sparsity}, checkpoint)
    line = error_of("fold", write_config(), checkpoint, tmp_path / "out.pth")
    assert "1 from StdConv2d to Conv2d" in line and "fst export" in line
    assert not (tmp_path / "out.pth").exists()


def test_every_command_ends_in_one_line(tmp_path, error_of):
    absent = tmp_path / "absent.yaml"
    for command, arguments in (
        ("train", [absent]),
        ("test", [absent, "a.pth"]),
        ("fold", [absent, "a.pth", tmp_path / "out.pth"]),
        ("fold", [absent, "a.pth", absent / "out.pth"]),
        ("verify", [absent]),
        ("ablate", [absent]),
        ("bench", ["--model", absent]),
    ):
        assert "absent.yaml" in error_of(command, *arguments)
        with pytest.raises(FileNotFoundError):
            main([command, *map(str, arguments), "--traceback"])


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (
            'optim_wrapper["optimizer"]["type"] = "SDG"\n',
            "type 'SDG' is unknown. Did you mean 'SGD'",
        ),
        ('optim_wrapper["optimizer"]["lrr"] = 0\n', "argument 'lrr' (--traceback shows where)"),
        ('train_dataloader["batchsize"] = 7\n', "argument 'batchsize' (--traceback shows where)"),
        ('model["architecture"].pop("source")\n', "source"),
        ("optim_wrapper = None\n", "has no optim_wrapper"),
        ("randomness = dict(seed=nothing)\n", "cannot be read: NameError"),
        ("optim_wrapper['optimizer']['maximize'] = True\n", "maximize=True turns round"),
        ("optim_wrapper['accumulative_counts'] = 0\n", "greater than or equal to 1 (--traceback"),
    ],
)
def test_mistakes_in_a_config_end_in_one_line(write_config, tmp_path, extra, expected, error_of):
    config = write_config(extra=extra)
    assert expected in error_of("train", config, "--work-dir", tmp_path / "w")


def test_the_demo_ends_in_one_line(tmp_path, capsys, monkeypatch, error_of):
    options = ["--strategies", "dense", "--epochs", "2", "--seeds", "0", "--out"]
    (tmp_path / "file").touch()
    assert "file/dense" in error_of("demo", *options, tmp_path / "file")
    press_ctrl_c = f"import os, signal; os.kill({os.getpid()}, signal.SIGINT)"
    monkeypatch.setattr(runs, "TRAIN", ["-c", press_ctrl_c])
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *options, str(tmp_path / "demo")])
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "stopped; the same command goes on from here\n"


def test_a_missing_key_is_named(capsys):
    with pytest.raises(SystemExit), user_errors(argparse.Namespace(traceback=False)):
        {}["lr"]
    assert capsys.readouterr().err == "error: key 'lr' is missing (--traceback shows where)\n"


@HOOKS.register_module(force=True)
class PressCtrlC(Hook):
    """Presses Ctrl-C in an iteration, once in a process."""

    pressed = False

    def __init__(self, iteration):
        self.iteration = iteration

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == self.iteration and not PressCtrlC.pressed:
            PressCtrlC.pressed = True
            raise KeyboardInterrupt


@pytest.mark.parametrize("iteration", [1, 6])
def test_ctrl_c_says_how_to_continue(write_config, tmp_path, capsys, monkeypatch, iteration):
    monkeypatch.setattr(PressCtrlC, "pressed", False)
    config = write_config(extra=f'custom_hooks = [dict(type="PressCtrlC", iteration={iteration})]')
    with pytest.raises(SystemExit) as stopped:
        main(["train", config, "--work-dir", str(tmp_path / "a run")])
    assert stopped.value.code == 130
    message = capsys.readouterr().err
    if iteration == 1:
        assert message == "stopped. No checkpoint was saved yet: the same command starts anew.\n"
        return
    options = shlex.split(message.partition("the same command with ")[2])
    assert options == ["--work-dir", str(tmp_path / "a run"), "--resume"]
    assert main(["train", config, *options]) == 0
    assert (tmp_path / "a run" / "epoch_2.pth").is_file()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_the_config_is_printed(
    write_config, tmp_path, capsys, monkeypatch, number, status
):
    """MMEngine catches every exception there and says that the config is wrong."""
    laid_out = yapf.yapflib.yapf_api.FormatCode

    def signalled(text, **options):
        os.kill(os.getpid(), number)
        return laid_out(text, **options)

    monkeypatch.setattr(yapf.yapflib.yapf_api, "FormatCode", signalled)
    with pytest.raises(SystemExit) as stopped:
        main(["train", write_config(), "--work-dir", str(tmp_path / "run")])
    assert stopped.value.code == status
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "stopped. No checkpoint was saved yet: the same command starts anew."


def test_safetensors_are_verified(tmp_path, monkeypatch, error_of):
    save_file = pytest.importorskip("safetensors.torch").save_file
    path = tmp_path / "model.safetensors"
    save_file({"conv.weight": torch.eye(8).view(8, 8, 1, 1), "bias": torch.ones(8)}, path)
    assert fst.verify(path, 1).ok and main(["verify", str(path), "--n", "1"]) == 0
    save_file({"conv.weight": torch.ones(8, 8, 1, 1)}, path)
    assert main(["verify", str(path)]) == 1
    path.write_bytes(b"none")
    assert "is no .safetensors file" in error_of("verify", path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    message = error_of("verify", path)
    assert "pip install 'fst-train[export]'" in message


def test_testing_takes_the_strategy_of_the_checkpoint_only(train, write_config, tmp_path):
    work_dir = train()
    other = write_config('dict(strategy="tsm")')
    arguments = [other, str(work_dir / "epoch_1.pth"), "--work-dir", str(tmp_path / "t")]
    with pytest.raises(ValueError, match="tsm"):
        main(["test", *arguments, "--traceback"])
    dense = write_config("None")
    with pytest.raises(ValueError, match="comes from a sparse training, but the config has no"):
        main(["test", dense, *arguments[1:], "--traceback"])
    arguments[1] = str(train("dense", sparsity="None") / "epoch_1.pth")
    with pytest.raises(ValueError, match="comes from a dense training, but the config has"):
        main(["test", *arguments, "--traceback"])
    main(["test", *arguments, "--cfg-options", "sparsity=None"])


@pytest.mark.parametrize("sparsity", ['dict(strategy="tsm", interval=3)', "None"])
def test_one_runner_trains_validates_and_tests(write_config, tmp_path, sparsity):
    config = load_config(write_config(sparsity, "test_dataloader = dict(**val_dataloader)\n"))
    config.work_dir = str(tmp_path / "run")
    config.test_cfg, config.test_evaluator = {}, config.val_evaluator
    runner = Runner.from_cfg(config)
    runner.train()
    assert runner.val() == runner.test()


@pytest.mark.system
def test_command_line(tmp_path):
    config = tmp_path / "config.py"
    config.write_text(
        '_base_ = "fst::configs/demo_digits.py"\ntrain_cfg = dict(by_epoch=True, max_epochs=1)\n'
    )
    options = ("--work-dir", tmp_path / "w", "--seed", 1, "--cfg-options")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
    command = (*torchrun, "tools/train.py", config, "--launcher", "pytorch")
    python(*command, *options, "train_dataloader.dataset.subset=128")
    assert (tmp_path / "w" / "epoch_1.pth").exists()


AFTERWARDS = """
import resource, sys, torch
from fst.cli.commands import main

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

main(sys.argv[1:])
print("pages", pages(), pages())
"""


@pytest.mark.system
def test_a_training_keeps_freed_memory(tmp_path):
    """Large tensors are not paged in anew, as they are with glibc's own settings."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("another C library's allocator")
    program = tmp_path / "train.py"
    program.write_text(AFTERWARDS)
    command = ("train", "configs/demo_digits.py", "--work-dir", tmp_path / "w")
    options = ("train_cfg.max_epochs=1", "train_dataloader.dataset.subset=128")
    words = (program, *command, "--cfg-options", *options)
    output = python(*words, CUDA_VISIBLE_DEVICES="").stdout
    first, later = map(int, output.split()[-2:])
    assert later < 20 * 2**14 / 4 and later <= first
