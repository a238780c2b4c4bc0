"""tools/*.py from end to end, on the command line."""

import pytest
import torch

import fst
import fst.models
from fst.checkpoint import load_checkpoint_safely
from fst.engine import cli


def test_fold_verify_and_test(train, write_config, tmp_path, capsys):
    work_dir = train()
    checkpoint, folded = str(work_dir / "epoch_2.pth"), str(tmp_path / "folded.pth")
    config = write_config()
    assert cli.fold([config, checkpoint, folded]) == 0
    assert "folded 2 layers" in capsys.readouterr().out

    model = fst.models.tiny_net()
    model.load_state_dict(torch.load(folded, weights_only=True))
    assert fst.verify(folded).ok

    assert cli.verify([folded]) == 0
    assert "2 weights are 2:4" in capsys.readouterr().out
    assert cli.verify([folded, "--n", "1"]) == 1
    assert cli.verify([checkpoint]) == 1
    out = capsys.readouterr().out
    assert "holds the dense weights" in out and f"tools/fold.py CONFIG {checkpoint} OUT" in out
    assert cli.verify([checkpoint, "--include", "architecture.0.weight"]) == 0

    logs = []
    for number, path in enumerate((checkpoint, folded)):
        cli.test([write_config(), path, "--work-dir", str(tmp_path / f"test{number}")])
        text = next((tmp_path / f"test{number}").glob("*/*.log")).read_text()
        logs.append(text.rpartition("accuracy/top1:")[2].split()[0])
    assert logs[0] == logs[1]


def test_tsm_is_folded_with_its_kept_mask(train, write_config, tmp_path):
    sparsity = 'dict(strategy="tsm", interval=100)'
    work_dir = train(sparsity=sparsity)
    folded = tmp_path / "folded.pth"
    cli.fold([write_config(sparsity), str(work_dir / "epoch_2.pth"), str(folded)])
    mask = load_checkpoint_safely(work_dir / "epoch_2.pth")["sparsity"]["3"]["kept_mask"]
    weight = torch.load(folded, weights_only=True)["3.weight"]
    assert torch.equal(weight != 0, mask.view(weight.shape))


def test_errors(train, write_config, tmp_path, capsys):
    work_dir = train(sparsity="None")
    dense = str(work_dir / "epoch_1.pth")
    config = write_config()
    for arguments, message in (
        ([config, dense, "out.pth"], "no sparsity state"),
        ([write_config("None"), dense, "out.pth"], "nothing to fold"),
        ([config, "absent.pth", "out.pth"], "absent.pth"),
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.fold(arguments)
        assert stopped.value.code == 2 and message in capsys.readouterr().err
    for arguments in (["absent.pth"], [dense, "--n", "5"], [dense, "--include", "x*"]):
        with pytest.raises(SystemExit) as stopped:
            cli.verify(arguments)
        assert stopped.value.code == 2


def test_testing_takes_the_strategy_of_the_checkpoint_only(train, write_config, tmp_path):
    work_dir = train()
    other = write_config('dict(strategy="tsm")')
    with pytest.raises(ValueError, match="tsm"):
        cli.test([other, str(work_dir / "epoch_1.pth"), "--work-dir", str(tmp_path / "t")])


def test_command_line(repo, run_python, tmp_path):
    config = tmp_path / "config.py"
    base = repo / "configs" / "demo_digits.py"
    if not base.exists():
        pytest.skip("configs/demo_digits.py is missing")
    config.write_text(f'_base_ = "{base}"\ntrain_cfg = dict(by_epoch=True, max_epochs=1)\n')
    options = ("--work-dir", tmp_path / "w", "--seed", 1, "--cfg-options")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
    command = (*torchrun, repo / "tools" / "train.py", config, "--launcher", "pytorch")
    run_python(*command, *options, "train_dataloader.dataset.subset=128")
    assert (tmp_path / "w" / "epoch_1.pth").exists()
