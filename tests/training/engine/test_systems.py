"""Systems that act around optimizer steps, in runs from a configuration."""

import logging
import warnings
from types import SimpleNamespace

import pytest
import torch
from mmengine.optim import OptimWrapper
from torch import nn

import fst
from fst.cli import main
from fst.files.checkpoint import load_checkpoint_safely
from fst.layers.modules import STEP
from fst.training.engine.config import load_config
from fst.training.engine.hooks.sparsity import SparsityHook
from fst.training.engine.model import build_model, sparse_root
from tests.oracle.conv import reference_nm_mask

ALLOWED = 'dict(strategy="asp", from_scratch="allow")'
LAYERS = ("0", "3")


def weights_of(path):
    state = load_checkpoint_safely(path)["state_dict"]
    return [state[f"architecture.{layer}.weight"] for layer in LAYERS]


def test_asp_retrains_a_dense_checkpoint(train):
    dense = train("dense", sparsity='dict(strategy="dense")') / "epoch_2.pth"
    options = dict(extra=f'load_from = "{dense}"\n', sparsity='dict(strategy="asp")')
    work_dir = train("asp", **options)
    for before, after in zip(weights_of(dense), weights_of(work_dir / "epoch_2.pth"), strict=True):
        mask = reference_nm_mask(before, 2, 4, 1)
        assert (after[~mask] == 0).all() and not torch.equal(after[mask], before[mask])
    assert fst.verify(work_dir / "epoch_2.pth").ok
    log = "".join(path.read_text() for path in work_dir.glob("*/*.log"))
    assert "prunes a trained model" not in log


def test_asp_from_scratch_is_told(train):
    work_dir = train(sparsity='dict(strategy="asp")')
    log = "".join(path.read_text() for path in work_dir.glob("*/*.log"))
    assert "'asp' prunes a trained model once, but load_from=None" in log
    work_dir = train("allowed", sparsity=ALLOWED)
    log = "".join(path.read_text() for path in work_dir.glob("*/*.log"))
    assert "prunes a trained model" not in log
    with pytest.raises(ValueError, match=r"load_from=None"):
        train("refused", sparsity='dict(strategy="asp", from_scratch="error")')
    with pytest.raises(ValueError, match="from_scratch='never'"):
        train("unknown", sparsity='dict(strategy="asp", from_scratch="never")')


def test_a_new_training_with_the_weights_of_an_own_loop_needs_no_warning():
    """That loop's masks are not missing: the new training chooses its own. In MMEngine's Runner."""
    net = nn.Sequential(nn.Conv2d(8, 8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    runner = SimpleNamespace(
        model=net,
        optim_wrapper=OptimWrapper(optimizer),
        logger=logging.getLogger(),
        train_loop=SimpleNamespace(max_iters=4, dataloader=range(4)),
        _load_from="own.pth",
        _resume=False,
    )
    weights = net.state_dict()
    weights._metadata["0"][STEP] = 16
    hook = SparsityHook("tsm")
    hook.before_run(runner)
    hook.after_load_checkpoint(runner, {"state_dict": weights})
    net.load_state_dict(weights)
    net(torch.randn(1, 8, 2, 2)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_a_checkpoint_of_other_shapes_is_no_start(train, tmp_path):
    """Its biases would fit, and the weights stay random."""
    dense = load_checkpoint_safely(train("dense", sparsity="None") / "epoch_2.pth")["state_dict"]
    path, first, second = tmp_path / "other.pth", *(f"architecture.{n}.weight" for n in LAYERS)
    start = {"extra": f'load_from = "{path}"\n'}
    torch.save({**dense, second: dense[second][:, :4]}, path)
    log = next(train("part", **start).glob("*/*.log")).read_text()
    assert f"size mismatch for {second}" in log
    with pytest.raises(ValueError, match=f"'asp' .* has no fitting '{second}'"):
        train("asp", sparsity='dict(strategy="asp", from_scratch="error")', **start)
    torch.save({**dense, first: dense[first][:4], second: dense[second][:, :4]}, path)
    with pytest.raises(
        ValueError, match=rf"no layer that is .* '{first}' has shape \(4, 1, 3, 3\)"
    ):
        train("none", **start)


@pytest.mark.parametrize(
    ("extra", "zeros"),
    [
        ("", [3, 4]),
        ('optim_wrapper["accumulative_counts"] = 2\n', [3, 4]),
        ('optim_wrapper["accumulative_counts"] = 3\n', [0, 4]),  # no step yet since the epoch ended
        ("train_cfg = dict(by_epoch=True, max_epochs=4)\n", [3, 3, 3, 4]),
    ],
)
def test_asfp_knows_the_epochs_of_the_run(train, extra, zeros):
    """Of eight filters: after half of the epochs 3 (0.4999), in the end 4."""
    work_dir = train(sparsity='dict(strategy="asfp", goal=0.5)', extra=extra)
    for epoch, expected in enumerate(zeros, start=1):
        for weight in weights_of(work_dir / f"epoch_{epoch}.pth"):
            assert int((weight == 0).flatten(1).all(1).sum()) == expected


def test_rigl_counts_the_steps_of_an_accumulating_run(train):
    """Eight iterations are three optimizer steps; the first one replaces connections."""
    sparsity = 'dict(strategy="rigl", interval=1, end=0.3, sparsity=0.8, log_interval=1)'
    work_dir = train(sparsity=sparsity, extra='optim_wrapper["accumulative_counts"] = 3\n')
    state = load_checkpoint_safely(work_dir / "epoch_2.pth")["sparsity"]
    for layer in LAYERS:
        assert state[layer]["step"] == 3
    for layer, weight in zip(LAYERS, weights_of(work_dir / "epoch_2.pth"), strict=True):
        assert (weight[~state[layer]["kept_mask"]] == 0).all()


def test_an_iteration_based_run_has_a_length_too(train):
    loop = """
train_dataloader["sampler"] = dict(type="InfiniteSampler", shuffle=True)
train_cfg = dict(by_epoch=False, max_iters=8, val_interval=100)
default_hooks["checkpoint"] = dict(type="CheckpointHook", by_epoch=False, interval=4)
param_scheduler = dict(type="CosineAnnealingLR", by_epoch=False)
log_processor = dict(by_epoch=False)
"""
    work_dir = train(sparsity='dict(strategy="asfp", goal=0.5)', extra=loop)
    for iteration, expected in ((4, 3), (8, 4)):
        for weight in weights_of(work_dir / f"iter_{iteration}.pth"):
            assert int((weight == 0).flatten(1).all(1).sum()) == expected


@pytest.mark.parametrize(
    ("sparsity", "message"),
    [
        ('dict(strategy="acdc", period=0.01)', "total_steps=8: period=0.01 of them is less than"),
        ('dict(strategy="tsrste", dense_tail=0.99)', "total_steps=8: no step lies between"),
        ('dict(strategy="sdgf", n=1, m=8, settled=0.6)', "total_steps=8: 4 frames on the way"),
        ('dict(strategy="acdc", warmup=0.8)', "more than all of it"),
        ('dict(strategy="step")', "optimizer is a SGD: strategy 'step' holds the second moment"),
    ],
)
def test_what_cannot_train_is_refused_before_the_first_step(train, tmp_path, sparsity, message):
    with pytest.raises(ValueError, match=message):
        train("refused", sparsity=sparsity)
    assert not list((tmp_path / "refused").glob("*.pth"))
    logs = [path.read_text() for path in (tmp_path / "refused").glob("*/*.log")]
    assert not any("Epoch(train)" in log for log in logs)


def test_patterns_for_a_budget_of_a_configs_model(train, write_config, tmp_path):
    """As docs/configs.md says."""
    model = build_model(load_config(write_config('dict(strategy="srste")')))
    patterns = fst.patterns(sparse_root(model), 0.5, m=8)
    assert patterns == {"0": "8:8", "3": "2:8"}
    work_dir = train(sparsity=f'dict(strategy="srste", patterns={patterns})')
    saved = load_checkpoint_safely(work_dir / "epoch_2.pth")["sparsity"]
    assert "2:8" in saved["3"]["strategy"] and "8:8" in saved["0"]["strategy"]
    with pytest.raises(ValueError, match=r"patterns\['0'\]='8' must be a string 'n:m'"):
        train("bad", sparsity='dict(strategy="srste", patterns={"0": "8"})')
    path = write_config(f'dict(strategy="srste", patterns={patterns})')
    folded = tmp_path / "folded.pth"
    main(["fold", path, str(work_dir / "epoch_2.pth"), str(folded)])
    assert main(["verify", str(folded)]) == 0 and fst.verify(folded).pattern == "2:8, 8:8"
    assert main(["verify", str(folded), "--n", "1", "--m", "8"]) == 1
