"""One hook in a config of MMDetection does what FST's own Runner does."""

from pathlib import Path

import mmdet
import mmengine.runner
import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from fst.cli import main
from fst.files.checkpoint import load_checkpoint_safely
from tests.programs import python

TRAIN_SCRIPT = Path(mmdet.__file__).parent / ".mim" / "tools" / "train.py"

# What a user of mmdet adds to a config; nothing else in it is FST's.
HOOK = """
custom_imports = dict(imports=["fst.training.engine"])
custom_hooks = [dict(type="SparsityHook", {arguments}), *{others}]
"""
OWN = """
sparsity = dict({arguments})
custom_hooks = {others}
"""


@HOOKS.register_module(force=True)
class SeedEveryIteration(Hook):
    """mmdet draws the regions to train on from torch's generator, from which mmengine's loader also
    takes a number per epoch; the loaders of FST's Runner have generators of their own.
    """

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        torch.manual_seed(runner.iter)


SEED = '[dict(type="mmengine.SeedEveryIteration")]'


def weights(work_dir):
    return load_checkpoint_safely(work_dir / "epoch_2.pth")


def assert_same(one, other):
    for key in ("state_dict", "sparsity"):
        assert one[key].keys() == other[key].keys()
    for name, value in one["state_dict"].items():
        assert torch.equal(value, other["state_dict"][name]), name
    momenta = [checkpoint["optimizer"]["state"] for checkpoint in (one, other)]
    for index, state in momenta[0].items():
        assert torch.equal(state["momentum_buffer"], momenta[1][index]["momentum_buffer"])


@pytest.mark.parametrize(
    ("detector", "arguments", "others"),
    [
        ("ssd", 'strategy="fst", n=1, m=4', "[]"),
        *(
            pytest.param(*case, marks=pytest.mark.system)
            for case in (
                ("ssd", 'strategy="sdgp", rule="random"', "[]"),
                ("faster-rcnn", 'strategy="fst", exclude=["rpn_head"]', SEED),
                ("faster-rcnn", 'strategy="srste", decay_mode="decoupled"', SEED),
            )
        ),
    ],
    ids=["ssd-fst", "ssd-sdgp", "rcnn-fst", "rcnn-srste"],
)
def test_in_mmengines_runner(write_config, train, tmp_path, detector, arguments, others):
    path = write_config(detector, extra=HOOK.format(arguments=arguments, others=others))
    config = Config.fromfile(path)
    config.work_dir = str(tmp_path / "hook")
    mmengine.runner.Runner.from_cfg(config).train()
    own = train("own", detector, extra=OWN.format(arguments=arguments, others=others))
    assert_same(weights(tmp_path / "hook"), weights(own))


@pytest.mark.system
def test_in_mmdets_own_train_script(write_config, train, tmp_path):
    arguments = 'strategy="fst"'
    path = write_config("ssd", extra=HOOK.format(arguments=arguments, others="[]"))
    words = ("-m", "fst.training.detection", TRAIN_SCRIPT, path, "--work-dir", tmp_path / "script")
    assert "backbone.layer2.0.downsample.0" in python(*words).stdout  # the report
    own = train("own", "ssd", extra=OWN.format(arguments=arguments, others="[]"))
    assert_same(weights(tmp_path / "script"), weights(own))
    # and tools/fold.py takes the checkpoint
    config = write_config("ssd", sparsity=f"dict({arguments})")
    main(["fold", config, str(tmp_path / "script" / "epoch_2.pth"), str(tmp_path / "folded.pth")])
    assert main(["verify", str(tmp_path / "folded.pth")]) == 0
