"""SIGKILL, at a random moment and in the middle of a save, costs no more than the epoch."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fst.files.checkpoint import load_checkpoint_safely
from fst.training.engine.checkpoint import newest_checkpoint
from tests.programs import ROOT

pytestmark = pytest.mark.system

PRELUDE = """
import sys, torch
sys.path.insert(0, {tests!r})
import fst.models
from conftest import tiny_net
fst.models.tiny_net = tiny_net
torch.set_num_threads(1)
from fst.cli import main
"""

KILL_DURING_SAVE = """
import os, signal
from mmengine.fileio.backends import LocalBackend
put = LocalBackend.put

def put_half_of_the_second(self, obj, filepath):
    put(self, obj[: len(obj) // 2] if "epoch_2" in filepath else obj, filepath)
    if "epoch_2" in filepath:
        os.kill(os.getpid(), signal.SIGKILL)

LocalBackend.put = put_half_of_the_second
"""

THREE = "train_cfg = dict(by_epoch=True, max_epochs=3)\n"
SLOW = THREE + 'custom_imports = dict(imports=["slow_hook"])\ncustom_hooks = [dict(type="Slow")]\n'
SLOW_HOOK = """
import time
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

@HOOKS.register_module()
class Slow(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        time.sleep(0.2)
"""


def start(tmp_path, arguments, extra=""):
    script = tmp_path / "script.py"
    prelude = PRELUDE.format(tests=str(Path(__file__).parent))
    script.write_text(f"{prelude}{extra}\nmain({['train', *arguments]!r})\n")
    (tmp_path / "slow_hook.py").write_text(SLOW_HOOK)
    env = {
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
        "OMP_NUM_THREADS": "1",
        "FST_AUTOTUNE": "0",  # as in the runs that are not killed
        "PATH": "/usr/bin:/bin",
    }
    return subprocess.Popen([sys.executable, script], env=env, stdout=subprocess.DEVNULL)


def test_kill_during_a_save(train, write_config, tmp_path, assert_same_state):
    whole = train("whole", extra=THREE)
    work_dir = tmp_path / "parts"
    arguments = [write_config(extra=THREE), "--work-dir", str(work_dir)]
    process = start(tmp_path, arguments, KILL_DURING_SAVE)
    assert process.wait(timeout=90) == -signal.SIGKILL
    assert [path.name for path in work_dir.glob("epoch*.pth")] == ["epoch_1.pth"]
    (unfinished,) = work_dir.glob(".fst-*.unfinished")
    assert [path.name for path in unfinished.iterdir()] == ["epoch_2.pth"]
    assert newest_checkpoint(work_dir) == str(work_dir / "epoch_1.pth")
    train("parts", "--resume", extra=THREE)
    assert_same_state(whole / "epoch_3.pth", work_dir / "epoch_3.pth")
    assert not list(work_dir.glob(".fst-*"))


def test_kill_at_a_random_moment(train, write_config, tmp_path, assert_same_state):
    whole = train("whole", extra=THREE)
    work_dir = tmp_path / "parts"
    process = start(tmp_path, [write_config(extra=SLOW), "--work-dir", str(work_dir)])
    deadline = time.time() + 90
    while not list(work_dir.glob("epoch_*.pth")) and time.time() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert load_checkpoint_safely(newest_checkpoint(work_dir))["meta"]["epoch"] in (1, 2)
    train("parts", "--resume", extra=THREE)
    assert_same_state(whole / "epoch_3.pth", work_dir / "epoch_3.pth")
