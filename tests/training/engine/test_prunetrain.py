"""A run that loses channels: it gets smaller, resumes, is tested and folded as what it is."""

import pytest
import torch
from torch import nn

import fst
import fst.models
from fst.baselines.channel_removal import channel_groups, fit_channels, remove_channels
from fst.cli import main
from fst.files.checkpoint import load_checkpoint_safely
from fst.training.engine.config import load_config
from fst.training.engine.trained import trained_model

SPARSITY = 'dict(strategy="prunetrain", interval=1, ratio=0.7, threshold=0.27, log_interval=2)'


def _sizes(checkpoint):
    state = load_checkpoint_safely(checkpoint)["state_dict"]
    return {k: tuple(v.shape) for k, v in state.items()}


def test_resume_is_bit_exact(train, assert_same_state):
    whole = train("whole", sparsity=SPARSITY)
    first, second = _sizes(whole / "epoch_1.pth"), _sizes(whole / "epoch_2.pth")
    full = fst.models.tiny_net()[0].weight.shape[0]
    channels = [sizes["architecture.0.weight"][0] for sizes in (first, second)]
    assert full > channels[0] > channels[1], "channels go at the end of both epochs"
    momentum = load_checkpoint_safely(whole / "epoch_1.pth")["optimizer"]["state"][0]
    assert tuple(momentum["momentum_buffer"].shape) == first["architecture.0.weight"]
    log = "".join(path.read_text() for path in whole.glob("*/*.log"))
    assert log.count("parameters after the epoch") == 2

    again = train("again", "--resume", str(whole / "epoch_1.pth"), sparsity=SPARSITY)
    assert_same_state(whole / "epoch_2.pth", again / "epoch_2.pth")


@pytest.mark.parametrize("kernel", [1, 3])
def test_one_input_channel_keeps_the_layout(kernel):
    """An uninterrupted run comes to one channel in steps, a resumed one at once."""

    def build():
        layers = (nn.Conv2d(c, 8, kernel) for c in (4, 8, 8))
        model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = build()
    for left in (4, 1):
        groups = channel_groups(model, torch.ones(1, 4, 8, 8), list(model))
        free = [group for group in groups if not group.obstacle]
        remove_channels(model, [(g, torch.arange(g.size) >= left) for g in free], optimizer)
    resumed, optimizer = build()
    fit_channels(resumed, model.state_dict(), optimizer)
    assert [layer.in_channels for layer in resumed] == [4, 1, 1]
    for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert one.shape == other.shape and one.stride() == other.stride()


def test_the_smaller_model_is_tested_and_folded(train, write_config, tmp_path, capsys):
    whole = train("whole", sparsity=SPARSITY)
    config, checkpoint = write_config(SPARSITY), str(whole / "epoch_2.pth")
    out = str(tmp_path / "folded.pth")
    assert main(["fold", config, checkpoint, out]) == 0
    folded = load_checkpoint_safely(out)
    model = fst.models.tiny_net()
    assert fit_channels(model, folded)
    model.load_state_dict(folded)
    assert model[3].in_channels == model[0].out_channels < 8
    for path in (checkpoint, out):
        assert main(["test", config, path, "--work-dir", str(tmp_path / "test")]) == 0
        loaded = trained_model(load_config(config), path).architecture  # to be exported
        assert torch.equal(loaded[3].weight, folded["3.weight"])
    state = load_checkpoint_safely(checkpoint)["state_dict"]
    assert torch.equal(folded["0.weight"], state["architecture.0.weight"])
