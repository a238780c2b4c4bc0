"""Two processes through torchrun, on gloo."""

import json

import pytest

pytestmark = pytest.mark.system

SCRIPT = """
import gc, hashlib, json, os, sys
import torch
import fst, fst.training.detection
from fst.training.engine import cli
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
runs = []


@HOOKS.register_module()
class DetectorProbe(Hook):
    stops = False

    def before_train(self, runner):
        runs.append(dict(images=[], states=[], masks=[]))

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if self.stops and (runner.epoch, batch_idx) == (1, 1):
            raise KeyboardInterrupt

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        model = runner.model.module
        runs[-1]["images"] += [sample.img_id for sample in data_batch["data_samples"]]
        for name, tensors in (
            ("states", [p for p in model.parameters()]),
            ("masks", [x.output_mask() for x in fst.sparse_layers(model).values()]),
        ):
            bits = b"".join(t.detach().numpy().tobytes() for t in tensors if t is not None)
            runs[-1][name].append(hashlib.sha256(bits).hexdigest())


def train(config, name, *arguments):
    work_dir = os.path.join({out!r}, name)
    cli.train([config, "--work-dir", work_dir, "--launcher", "pytorch", *arguments])


for index, (whole, first, second) in enumerate({configs!r}):
    train(whole, f"whole{{index}}")
    DetectorProbe.stops = True
    try:
        train(first, f"parts{{index}}")
    except SystemExit:
        pass
    DetectorProbe.stops = False
    torch.distributed.barrier()
    train(second, f"parts{{index}}", "--resume")
with open(os.path.join({out!r}, f"rank{{rank}}.json"), "w") as file:
    json.dump(runs, file)
torch.distributed.barrier()
gc.collect()
torch.distributed.destroy_process_group()
"""

PROBE = 'custom_hooks = [dict(type="mmengine.DetectorProbe")]\n'


def test_two_ranks(write_config, run_python, tmp_path, assert_same_state):
    runs = (("ssd", 'dict(strategy="fst")'), ("faster-rcnn", 'dict(strategy="sdgp")'))
    configs = [[write_config(d, sparsity=s, extra=PROBE) for _ in range(3)] for d, s in runs]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(out=str(tmp_path), configs=configs))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    run_python(*torchrun, script, timeout=280)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for zero, one in zip(*ranks, strict=True):
        assert zero["states"] == one["states"] and zero["masks"] == one["masks"]
        assert len(set(zero["states"])) == len(zero["states"])
    for index in (0, 3):
        seen = ranks[0][index]["images"], ranks[1][index]["images"]
        assert [len(images) for images in seen] == [8, 8]  # two epochs of two steps of two images
        for epoch in (slice(0, 4), slice(4, 8)):
            assert len({*seen[0][epoch], *seen[1][epoch]}) == 8
    for index in range(len(runs)):
        whole, parts = tmp_path / f"whole{index}", tmp_path / f"parts{index}"
        assert_same_state(whole / "epoch_2.pth", parts / "epoch_2.pth")
