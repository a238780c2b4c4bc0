"""accelerate saves and loads the state of masks: a loaded run goes on as if it had not ended."""

import pytest
import torch
from torch import nn

import fst
from fst.integrations.accelerate import SparsityState

accelerate = pytest.importorskip("accelerate")


TSM = fst.get_strategy("tsm", interval=3)


class Training:
    """A loop with `Accelerator`, as a user writes it."""

    def __init__(self, strategy=TSM):
        torch.manual_seed(0)
        self.accelerator = accelerate.Accelerator(cpu=True)
        sparse = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        fst.convert(sparse, strategy)
        sgd = torch.optim.SGD(sparse.parameters(), lr=0.1, momentum=0.9)
        fst.attach(sparse, sgd)
        self.sparse = sparse
        self.accelerator.register_for_checkpointing(SparsityState(sparse))
        self.model, self.optimizer = self.accelerator.prepare(sparse, sgd)

    def steps(self, numbers):
        for number in numbers:
            images = torch.randn(4, 4, 6, 6, generator=torch.Generator().manual_seed(number))
            self.optimizer.zero_grad()
            self.accelerator.backward(self.model(images).square().mean())
            self.optimizer.step()
        return self


def test_a_loaded_run_goes_on(tmp_path):
    whole = Training().steps(range(7))
    begun = Training().steps(range(4))
    begun.accelerator.save_state(str(tmp_path))
    loaded = Training()
    loaded.accelerator.load_state(str(tmp_path))
    loaded.steps(range(4, 7))
    for ours, theirs in zip(loaded.sparse.parameters(), whole.sparse.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for name, layer in fst.sparse_layers(loaded.sparse).items():
        assert layer.state.step == 7
        assert torch.equal(layer.output_mask(), fst.sparse_layers(whole.sparse)[name].output_mask())


def test_the_state_of_another_strategy_is_refused():
    state = SparsityState(Training().sparse).state_dict()
    with pytest.raises(ValueError, match="was saved with strategy"):
        SparsityState(Training("srste").sparse).load_state_dict(state)


def test_the_optimizer_of_prepare_is_refused_and_the_one_inside_is_taken():
    training = Training("asp")
    other = nn.Sequential(nn.Conv2d(4, 8, 3))
    fst.convert(other, "asp")
    optimizer = training.accelerator.prepare(torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="is a AcceleratedOptimizer; .* of a wrapper, the one insi"):
        fst.attach(other, optimizer)
    fst.attach(other, optimizer.optimizer)
