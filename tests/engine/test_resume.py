"""Two epochs equal one epoch, a stop, and one more: bit for bit."""

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from fst.checkpoint import load_checkpoint_safely
from fst.engine.checkpoint import newest_checkpoint


class Stopped(Exception):
    pass


@HOOKS.register_module(force=True)
class StopInSecondEpoch(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.epoch == 1 and batch_idx == 2:
            raise Stopped


STOP = 'custom_hooks = [dict(type="StopInSecondEpoch")]\n'

STRATEGIES = [
    'dict(strategy="fst", log_interval=2)',
    'dict(strategy="fst", phase="random", decay_mode="decoupled", log_interval=3)',
    'dict(strategy="sdgp", rule="random", log_interval=1)',
    'dict(strategy="tsm", interval=3, log_interval=1)',
    'dict(strategy="asp", from_scratch="allow", log_interval=1)',
    'dict(strategy="asfp", goal=0.5)',
    'dict(strategy="dpf", interval=2, log_interval=2)',
    'dict(strategy="rigl", interval=2, sparsity=0.8, log_interval=2)',
    'dict(strategy="clicktrain", include="*", choose=0.2, enforce=0.7)',
    'dict(strategy="resprop", threshold=1e-4, warmup=6, log_interval=3)',
    'dict(strategy="sparsetrain", log_interval=3)',
    "None",
]


@pytest.mark.parametrize("sparsity", STRATEGIES)
def test_resume_is_bit_exact(train, assert_same_state, sparsity):
    whole = train("whole", sparsity=sparsity)
    with pytest.raises(Stopped):
        train("parts", sparsity=sparsity, extra=STOP)
    assert newest_checkpoint(whole.parent / "parts").endswith("epoch_1.pth")
    parts = train("parts", "--resume", sparsity=sparsity)
    assert_same_state(whole / "epoch_2.pth", parts / "epoch_2.pth")


def test_epochs_differ_and_seed_matters(train):
    one, same, other = (train(f"r{i}", "--seed", s) for i, s in enumerate(("1", "1", "2")))
    states = [load_checkpoint_safely(r / "epoch_2.pth")["state_dict"] for r in (one, same, other)]
    name = "architecture.3.weight"
    assert torch.equal(states[0][name], states[1][name])
    assert not torch.equal(states[0][name], states[2][name])


def test_resume_takes_an_unset_seed_from_the_checkpoint(train, assert_same_state):
    unset = "randomness = dict()\n"
    whole = train("whole", "--seed", "11")
    with pytest.raises(Stopped):
        train("parts", "--seed", "11", extra=STOP)
    parts = train("parts", "--resume", extra=unset)
    assert_same_state(whole / "epoch_2.pth", parts / "epoch_2.pth")


def test_resume_from_a_named_checkpoint(train, assert_same_state):
    whole = train("whole")
    again = train("again", "--resume", str(whole / "epoch_1.pth"))
    assert_same_state(whole / "epoch_2.pth", again / "epoch_2.pth")


def test_validation_leaves_no_trace(train, assert_same_state):
    often, never = (
        train("often"),
        train("never", extra="train_cfg = dict(by_epoch=True, max_epochs=2, val_begin=9)\n"),
    )
    for epoch in (1, 2):
        assert_same_state(often / f"epoch_{epoch}.pth", never / f"epoch_{epoch}.pth")


def test_resume_skips_broken_files_and_says_so(train, caplog):
    work_dir = train("run")
    newest = work_dir / "epoch_2.pth"
    newest.write_bytes(newest.read_bytes()[:2000])
    (work_dir / "last_checkpoint").write_text("")
    assert newest_checkpoint(work_dir) == str(work_dir / "epoch_1.pth")
    train("run", "--resume")
    log = "".join(path.read_text() for path in work_dir.glob("*/*.log"))
    assert f"Resuming from {work_dir / 'epoch_1.pth'} instead of a newer file" in log
    assert str(newest) in log


def test_nothing_readable_to_resume(train):
    work_dir = train("run")
    for path in work_dir.glob("*.pth"):
        path.write_bytes(b"no checkpoint")
    with pytest.raises(ValueError, match="no checkpoint in .* can be read"):
        train("run", "--resume")


def test_resume_with_another_strategy(train):
    train("run")
    with pytest.raises(ValueError, match=r"fst_w(.|\n)*fst|fst(.|\n)*fst_w"):
        train("run", "--resume", sparsity='dict(strategy="fst_w")')
    with pytest.raises(ValueError, match="cannot resume without sparsity"):
        train("run", "--resume", sparsity="None")
    train("dense", sparsity="None")
    with pytest.raises(ValueError, match="cannot resume with strategy 'fst'"):
        train("dense", "--resume")


def test_resume_from_weights_alone(train, tmp_path):
    work_dir = train("run")
    state = load_checkpoint_safely(work_dir / "epoch_1.pth")["state_dict"]
    torch.save(state, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match="weights alone"):
        train("run", "--resume", str(tmp_path / "weights.pth"))
    train("tuned", extra=f'load_from = "{tmp_path / "weights.pth"}"\n')


def test_iteration_based_resume(train, assert_same_state):
    loop = """
train_dataloader["sampler"] = dict(type="InfiniteSampler", shuffle=True)
train_cfg = dict(by_epoch=False, max_iters=9, val_interval=100)
default_hooks["checkpoint"] = dict(type="CheckpointHook", by_epoch=False, interval=3)
param_scheduler = dict(type="CosineAnnealingLR", by_epoch=False)
log_processor = dict(by_epoch=False)
"""
    whole = train("whole", extra=loop)
    again = train("again", "--resume", str(whole / "iter_6.pth"), extra=loop)
    assert_same_state(whole / "iter_9.pth", again / "iter_9.pth")
