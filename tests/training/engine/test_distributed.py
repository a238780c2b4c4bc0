"""Two processes through torchrun, on gloo."""

import json

import pytest

pytestmark = pytest.mark.system

SCRIPT = """
import gc, hashlib, json, os, sys
sys.path.insert(0, {tests!r})
import torch
import fst, fst.models
from conftest import tiny_net, equal
fst.models.tiny_net = tiny_net
torch.set_num_threads(1)
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from fst.files.checkpoint import load_checkpoint_safely
from fst.training.engine import cli
from fst.training.engine.runner import Runner

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
runs = []


@HOOKS.register_module()
class Probe(Hook):
    stop_at = None

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if self.stop_at == (runner.epoch, batch_idx):
            raise KeyboardInterrupt

    def before_train(self, runner):
        runs.append(dict(keys=[], masks=[]))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        root = runner.model.module.architecture
        masks = [x.output_mask() for x in fst.sparse_layers(root).values()]
        bits = b"".join(m.numpy().tobytes() for m in masks if m is not None)
        runs[-1]["masks"].append(hashlib.sha256(bits).hexdigest())
        runs[-1]["keys"] += data_batch["keys"].tolist()

    def after_train(self, runner):
        state = runner.model.module.state_dict()
        bits = b"".join(v.numpy().tobytes() for v in state.values())
        runs[-1]["state"] = hashlib.sha256(bits).hexdigest()


def train(config, name, *arguments):
    work_dir = os.path.join({out!r}, name)
    cli.train([config, "--work-dir", work_dir, "--launcher", "pytorch", *arguments])


for index, config in enumerate({configs!r}):
    train(config[0], f"whole{{index}}")
    Probe.stop_at = (1, 1)
    try:
        train(config[1], f"parts{{index}}")
    except SystemExit:
        pass
    Probe.stop_at = None
    torch.distributed.barrier()
    train(config[2], f"parts{{index}}", "--resume")
with open(os.path.join({out!r}, f"rank{{rank}}.json"), "w") as file:
    json.dump(runs, file)
torch.distributed.barrier()
gc.collect()
torch.distributed.destroy_process_group()
"""

PROBE = 'custom_hooks = [dict(type="Probe")]\n'
AVERAGED = 'custom_hooks = [dict(type="Probe"), dict(type="EMAHook", momentum=0.4)]\n'


def test_two_ranks(write_config, run_python, repo, tmp_path, assert_same_state):
    strategies = (
        'dict(strategy="fst")',
        'dict(strategy="sdgp", rule="random")',
        'dict(strategy="resprop", threshold=1e-4)',
    )
    extras = (AVERAGED, PROBE, PROBE)
    settings = list(zip(strategies, extras, strict=True))
    configs = [[write_config(*setting) for _ in range(3)] for setting in settings]
    script = tmp_path / "script.py"
    tests = str(repo / "tests" / "training" / "engine")
    script.write_text(SCRIPT.format(tests=tests, out=str(tmp_path), configs=configs))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    run_python(*torchrun, script)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for zero, one in zip(*ranks, strict=True):
        assert zero["masks"] == one["masks"]
        assert zero.get("state") == one.get("state")
    whole = ranks[0][0], ranks[1][0]
    assert len(whole[0]["masks"]) == 4  # 128 images per step and rank
    for epoch in (slice(0, 128), slice(128, 256)):
        seen = whole[0]["keys"][epoch] + whole[1]["keys"][epoch]
        assert len(set(seen)) == 256
    for index in range(len(settings)):
        assert_same_state(
            tmp_path / f"whole{index}/epoch_2.pth", tmp_path / f"parts{index}/epoch_2.pth"
        )
