"""What two ranks do with `fully_shard`: cases of `test_fsdp`, run in one pair of processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

import fst
from fst.integrations.distributed_checkpoint import SparsityState
from fst.rules.strategy import Strategy
from tests.digests import ROWS as ALL_ROWS
from tests.digests import digest

STEPS, SAVED_AT, SEED = 5, 2, 1
# With phases of one step, as so short a training needs them.
SHORT = {
    "acdc": lambda: fst.get_strategy("acdc", warmup=0.2, period=0.2, last_sparse=0.2),
    "acdc-1:4-im2col": lambda: fst.get_strategy(
        "acdc", n=1, group_order="im2col", warmup=0.2, period=0.2, last_sparse=0.2
    ),
}
ROWS = {**ALL_ROWS, **SHORT}
Case = Callable[[int, Path], None]
CASES: dict[str, Case] = {}
MORE: dict[str, Case] = {}  # of the exhaustive test

# What two ranks compute: what one process computes on both batches, or, where a rule looks at a
# rank's batch as a whole or remembers it, what two ranks of DistributedDataParallel compute.
ONE, DDP, REFUSED = "one process", "two ranks of DDP", "refused"
TABLE = {
    **dict.fromkeys(("dense", "srste", "fst", "fst_w", "sdgp", "wg", "gg", "wx", "gx", "tsm"), ONE),
    **dict.fromkeys(("meprop", "sparsetrain", "asp", "dpf", "rigl", "clicktrain", "asfp"), ONE),
    **dict.fromkeys(("acdc", "sdgf", "mdgf", "maxq"), ONE),
    **dict.fromkeys(("mvue", "sste", "tsrste"), DDP),
    **dict.fromkeys(("sampled", "fst_sampled", "resprop"), DDP),
    **dict.fromkeys(("prunetrain", "step"), REFUSED),
}
# Rows that do something within so few steps and in so small a network; others by their default.
TRAINED = {
    **dict.fromkeys(TABLE),
    "srste": "srste-decay_large",
    "fst": "fst-decay_large",
    "tsm": "tsm-interval2",
    "dpf": "dpf-interval2",
    "rigl": "rigl-interval2",
    "resprop": "resprop-threshold",
}


def row_of(name: str) -> str:
    return TRAINED[name] or name


def case(found: dict[str, Case]) -> Callable[[Case], Case]:
    return lambda function: found.setdefault(function.__name__, function)


def network(strategy: Strategy | None, seed: int | None = SEED, rank: int = 0) -> nn.Sequential:
    """Channels that two ranks cannot share evenly; all layers converted."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(4, 10, 3, padding=1), nn.ReLU(), nn.Conv2d(10, 9, 3), nn.ReLU()),
        *(nn.Conv2d(9, 8, 1), nn.Flatten(), nn.Linear(72, 4)),
    ).double()
    if strategy is not None:
        fst.convert(model, strategy, include=[nn.Conv2d, nn.Linear])
        if seed is not None:
            fst.seed_random_rules(model, seed, rank)
    return model


def shard(model: nn.Sequential, **options: Any) -> nn.Sequential:
    """Two groups of one layer, and the root's."""
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def batch(step: int, part: slice) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(8, 4, 5, 5, generator=generator, dtype=torch.float64)
    return images[part], torch.randn(8, 4, generator=generator, dtype=torch.float64)[part]


def part_of(rank: int) -> slice:
    return slice(4 * rank, 4 * rank + 4)


ALL = slice(None)


class Training:
    """A loop; ``called`` is what computes the output, if it is not the model itself."""

    def __init__(
        self, model: nn.Module, part: slice, called: nn.Module | None = None, momentum: float = 0.9
    ) -> None:
        self.model, self.part, self.called = model, part, called or model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
        self.attachment = fst.attach(model, self.optimizer, total_steps=STEPS, steps_per_epoch=2)
        self.done = 0

    def train(self, until: int = STEPS) -> Training:
        for step in range(self.done, until):
            images, targets = batch(step, self.part)
            loss = (self.called(images) - targets).square().mean()
            self.attachment.report_loss(loss)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.done = until
        return self


def whole(tensor: Tensor) -> Tensor:
    """All ranks must call it."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def assert_equal(model: nn.Module, expected: nn.Module, tolerance: float = 1e-12) -> None:
    """Weights and masks; nothing of it was left at its start."""
    before = dict(network(None).named_parameters())
    wanted, layers = dict(expected.named_parameters()), fst.sparse_layers(expected)
    for name, parameter in model.named_parameters():
        found, right = whole(parameter), whole(wanted[name])
        assert (found - right).abs().max() <= tolerance, name
        assert (right - before[name]).abs().max() > 1e-4, f"{name} did not train"
    for name, layer in fst.sparse_layers(model).items():
        mask = layer.output_mask()
        assert mask is None or torch.equal(mask, layers[name].output_mask()), name


def compare(rank: int, strategy: Strategy, to: str, **options: Any) -> None:
    """A sharded training with the same on one process, or with DDP."""
    sharded, other = network(strategy), network(strategy)
    Training(shard(sharded, **options), part_of(rank)).train()
    if to == DDP:
        called = nn.parallel.DistributedDataParallel(other)
        Training(other, part_of(rank), called).train()
    else:
        Training(other, ALL).train()
    assert_equal(sharded, other)


def _strategies(name: str) -> Case:
    return lambda rank, folder: compare(rank, ROWS[row_of(name)](), TABLE[name])


def _against_ddp(row: str) -> Case:
    return lambda rank, folder: compare(rank, ROWS[row](), DDP)


CASES.update({n: _strategies(n) for n, what in TABLE.items() if what != REFUSED})
MORE.update({row: _against_ddp(row) for row in ROWS if not ROWS[row]().replaces_parameters})

# ------------------------------------------------------------------ options of fully_shard


@case(CASES)
def gathered_until_backward(rank: int, folder: Path) -> None:
    compare(rank, ROWS["asp"](), ONE, reshard_after_forward=False)
    compare(rank, ROWS["srste-decay_large"](), ONE, reshard_after_forward=False)


@case(CASES)
def resharded_after_forward(rank: int, folder: Path) -> None:
    compare(rank, ROWS["asp"](), ONE, reshard_after_forward=True)
    compare(rank, ROWS["srste-decay_large"](), ONE, reshard_after_forward=True)


@case(CASES)
def sharded_along_input_channels(rank: int, folder: Path) -> None:
    model, one = network(ROWS["srste-decay_large"]()), network(ROWS["srste-decay_large"]())
    fully_shard(model[2], shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 else None)
    Training(fully_shard(model), part_of(rank)).train()
    Training(one, ALL).train()
    assert_equal(model, one)


@case(CASES)
def bfloat16(rank: int, folder: Path) -> None:
    """Masks are those of the gathered bfloat16 weight, also of the decay; weights are float32."""
    layer = nn.Conv2d(4, 6, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 1.001, 1.002, 1.003]).view(1, 4, 1, 1))
    fst.convert(layer, fst.get_strategy("srste", decay=0.5))
    before, kept = layer.weight.detach().clone(), layer.weight.detach() < 1.0015
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(nn.Sequential(layer), mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images = batch(0, part_of(rank))[0].float()
    model(images).float().square().mean().backward()
    gradient = whole(layer.weight.grad).clone()
    optimizer.step()
    expected = before - 0.1 * (gradient + 0.5 * before * ~kept)
    assert layer.weight.dtype == torch.float32 and gradient.any()
    torch.testing.assert_close(whole(layer.weight), expected, rtol=1e-6, atol=0)


@case(MORE)
def replicated_and_sharded(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    compare(rank, ROWS["asp"](), ONE, mesh=mesh)


@case(MORE)
def offloaded(rank: int, folder: Path) -> None:
    policy = CPUOffloadPolicy(pin_memory=False)
    compare(rank, ROWS["srste-decay_large"](), ONE, offload_policy=policy)


@case(MORE)
def compiled(rank: int, folder: Path) -> None:
    model, one = network(ROWS["srste-decay_large"]()), network(ROWS["srste-decay_large"]())
    for layer in (model[0], model[2], model[4], model[6]):
        layer.compile(backend="aot_eager")
    Training(shard(model), part_of(rank)).train()
    Training(one, ALL).train()
    assert_equal(model, one)


# ------------------------------------------------------------------ loops


@case(CASES)
def accumulated_and_frozen(rank: int, folder: Path) -> None:
    """Gradients are exchanged after the second micro-batch; S(W) is computed once for both."""
    sharded, one = shard(network(ROWS["srste-decay_large"]())), network(ROWS["srste-decay_large"]())
    for model, part in ((sharded, part_of(rank)), (one, ALL)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(0, 4, 2):
            with fst.frozen(model):
                for number in (step, step + 1):
                    if model is sharded:
                        model.set_requires_gradient_sync(number % 2 == 1)
                    model(batch(number, part)[0]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(sharded, one)


@case(CASES)
def evaluated_before_the_first_step(rank: int, folder: Path) -> None:
    """It leaves the root's weights gathered; schedules start on shards all the same."""
    model, one = shard(network(ROWS["asp"]())), network(ROWS["asp"]())
    training = Training(model, part_of(rank))
    with torch.no_grad():
        model.eval()(batch(0, ALL)[0])
    model.train()
    training.train()
    Training(one, ALL).train()
    assert_equal(model, one)


@case(CASES)
def draws(rank: int, folder: Path) -> None:
    """Masks of weights are drawn alike on all ranks, of gradients not."""
    strategy = ROWS["srste-random"]()
    model, one = network(strategy, rank=rank), network(strategy)
    Training(shard(model), part_of(rank)).train()
    Training(one, ALL).train()
    assert_equal(model, one)
    strategy = ROWS["sdgp-random"]()
    models = [network(strategy, rank=number) for number in (rank, rank, 0)]
    Training(shard(models[0]), part_of(rank)).train()
    for other in models[1:]:
        called = nn.parallel.DistributedDataParallel(other)
        Training(other, part_of(rank), called).train()
    assert_equal(models[0], models[1])
    with pytest.raises(AssertionError):
        assert_equal(models[0], models[2])


@case(CASES)
def draws_without_a_seed(rank: int, folder: Path) -> None:
    """Masks of weights are drawn alike on all ranks, whatever each rank's own seed is."""
    for row in ("srste-random", "rigl-interval2"):
        model = shard(network(ROWS[row](), seed=None))
        torch.manual_seed(rank)
        Training(model, part_of(rank)).train()
        layers = fst.sparse_layers(model)
        masks = {name: layer.output_mask() for name, layer in layers.items()}
        ranks = [None, None]
        drawn = digest({"masks": masks, "state": fst.sparsity_state(model)})
        torch.distributed.all_gather_object(ranks, drawn)
        assert ranks[0] == ranks[1], row
        assert any(not mask.all() for mask in masks.values()), row  # ERK leaves some layers whole


@case(CASES)
def looked_at(rank: int, folder: Path) -> None:
    strategy = ROWS["srste-decay_large"]()
    sharded, one = shard(network(strategy)), network(strategy)
    seen = []
    for model, part in ((sharded, part_of(rank)), (one, ALL)):
        Training(model, part).train()
        (model(batch(0, part)[0]) - batch(0, part)[1]).square().mean().backward()
        seen.append((fst.metrics(model), str(fst.verify(model))))
    assert seen[0][0] == pytest.approx(seen[1][0], abs=1e-12) and seen[0][1] == seen[1][1]
    assert any(name.startswith("sparsity/grad_norm/") for name in seen[0][0])


# ------------------------------------------------------------------ checkpoints


def _saved(training: Training) -> dict[str, Any]:
    model, optimizer = states.get_state_dict(training.model, training.optimizer)
    return {"model": model, "optimizer": optimizer, "sparsity": SparsityState(training.model)}


def load(training: Training, folder: Path) -> None:
    state = _saved(training)
    dcp.load(state, checkpoint_id=folder)
    states.set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    training.done = SAVED_AT


RESUMED = {
    "srste-decoupled": lambda: fst.get_strategy("srste", decay=0.5, decay_mode="decoupled"),
    **{row: ROWS[row] for row in ("tsm-interval2", "rigl-interval2", "resprop-threshold")},
}


def _resumed(row: str) -> Case:
    def check(rank: int, folder: Path) -> None:
        """As if it had not ended, bit for bit; SGD without momentum has no state of its own."""
        strategy = RESUMED[row]()
        momentum = 0.9 if row == "rigl-interval2" else 0.0
        made = [
            Training(shard(network(strategy)), part_of(rank), momentum=momentum) for _ in range(3)
        ]
        uninterrupted, saved, resumed = made
        uninterrupted.train()
        _saved(saved)  # with an optimizer that has no state yet
        saved.train(SAVED_AT)
        dcp.save(_saved(saved), checkpoint_id=folder / row)
        load(resumed, folder / row)
        for training in (saved, resumed):
            training.train()
            assert_equal(training.model, uninterrupted.model, tolerance=0)
            found, right = training.model, uninterrupted.model
            assert digest(fst.sparsity_state(found)) == digest(fst.sparsity_state(right))

    return check


CASES.update({f"resumed {row}": _resumed(row) for row in RESUMED})


@case(CASES)
def folded(rank: int, folder: Path) -> None:
    """The whole state of a sharded model, in a model that is not, can be folded and exported."""
    strategy = ROWS["asp"]()
    sharded, one = network(strategy), network(strategy)
    Training(shard(sharded), part_of(rank)).train()
    Training(one, ALL).train()
    for function in (fst.fold, lambda model: fst.export(model, folder / "model.safetensors")):
        with pytest.raises(ValueError, match="is sharded .*full_state_dict=True"):
            function(sharded)
    options = states.StateDictOptions(full_state_dict=True)
    state = states.get_model_state_dict(sharded, options=options)
    plain = network(strategy)
    plain.load_state_dict(state)
    fst.load_sparsity_state(plain, fst.sparsity_state(sharded))
    images = batch(0, ALL)[0]
    torch.testing.assert_close(fst.fold(plain)(images), one.eval()(images))
    assert fst.verify(fst.fold(plain)).ok
