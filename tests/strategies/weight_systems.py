"""A training of the systems that prune weights between optimizer steps, step by step."""

import io

import pytest
import torch

import fst
from tests.networks import batch, small_net

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
}
# Gradients to which nothing can be added: (what is done to the optimizer, what the error says)
for_gradients_that_are_not_plain = pytest.mark.parametrize(
    ("change", "message"),
    [
        # as GradScaler sets it on fused ones
        (lambda sgd: setattr(sgd, "grad_scale", torch.tensor(1024.0)), r"scaler\.unscale_"),
        (lambda sgd: sgd.param_groups[0].update(maximize=True), "maximize=True"),
    ],
    ids=["scaled", "climbed"],
)
SYSTEMS = ("asp", "asfp", "dpf", "rigl", "clicktrain")
PHASED = {  # since 2021, with phases that fit into 20 steps
    "sste": dict(dense_tail=0.25),
    "tsrste": dict(dense_tail=0.25, interval=3),
    "acdc": dict(period=0.1),
    "sdgf": dict(n=1),
    "mdgf": {},
    "maxq": dict(ramp=0.5),
    "fst_w": dict(grad_input="double", permutations=4, interval=3),
    "rigl": dict(n=2, m=4, interval=3),
    "mvue": {},
}


class Training:
    """A converted `small_net` and its optimizer, one step at a time."""

    def __init__(self, strategy, optimizer="sgd", total=20, epoch=5, include=None, **options):
        self.net = small_net()
        fst.convert(self.net, fst.get_strategy(strategy, **options), include=include)
        fst.seed_random_rules(self.net, 3)
        self.optimizer = OPTIMIZERS[optimizer](self.net.parameters())
        lengths = {"total_steps": total, "steps_per_epoch": epoch}
        self.attachment = fst.attach(self.net, self.optimizer, **lengths)
        self.layers = list(fst.sparse_layers(self.net).values())

    def backward(self, seed):
        self.optimizer.zero_grad()
        self.net(batch(seed)).square().mean().backward()

    def step(self, seed):
        self.backward(seed)
        self.optimizer.step()

    def steps(self, *seeds):
        for seed in range(*seeds):
            self.step(seed)

    def saved(self):
        """A file of the model, the optimizer and the strategy's state."""
        file = io.BytesIO()
        states = self.net.state_dict(), self.optimizer.state_dict(), fst.sparsity_state(self.net)
        torch.save(states, file)
        file.seek(0)
        return file

    def load(self, file):
        model, optimizer, sparsity = torch.load(file, weights_only=True)
        self.net.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        fst.load_sparsity_state(self.net, sparsity)

    def masks(self):
        return [layer.state.kept_mask.clone() for layer in self.layers]

    def tensors_of(self, layer):
        """The weight and what the optimizer keeps for each of its elements."""
        state = self.optimizer.state[layer.weight].values()
        return [layer.weight, *(t for t in state if t.shape == layer.weight.shape)]


def assert_resumes(build, stop, end=20):
    """Saved after ``stop`` steps it goes on in another model, bit for bit."""
    whole = build()
    whole.steps(stop)
    file, generator = whole.saved(), torch.get_rng_state()
    whole.steps(stop, end)
    again = build()
    again.load(file)
    torch.set_rng_state(generator)
    again.steps(stop, end)
    for (key, p), q in zip(whole.net.named_parameters(), again.net.parameters(), strict=True):
        assert torch.equal(p, q), key
    assert str(fst.sparsity_state(whole.net)) == str(fst.sparsity_state(again.net))


def assert_held_at_zero(training: Training) -> None:
    """Pruned weights, and their momentum, are zero."""
    for layer in training.layers:
        pruned = ~layer.state.kept_mask
        tensors = training.tensors_of(layer)
        assert pruned.any() and len(tensors) > 1
        for tensor in tensors:
            assert (tensor[pruned] == 0).all()
