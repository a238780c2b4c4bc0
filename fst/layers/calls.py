"""Observe the inputs of a model's layers, and put a model into eval mode for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fst.layers.weights import PrunableWeight


class LayerCall(NamedTuple):
    """One call of a layer: its name in the model, its arguments, and what it returns."""

    name: str
    layer: nn.Module
    given: tuple[Any, ...]
    named: dict[str, Any]
    output: Any

    @property
    def input(self) -> Tensor:
        """The first argument, or the one of that name."""
        return self.given[0] if self.given else self.named["input"]


@contextmanager
def each_call(
    model: nn.Module, kinds: tuple[type[nn.Module], ...], act: Callable[[LayerCall], object]
) -> Iterator[None]:
    """Call ``act`` after each call of a layer of these kinds, while the block runs."""

    def recorder(name: str) -> Callable[..., None]:
        def record(
            layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any
        ) -> None:
            act(LayerCall(name, layer, given, named, output))

        return record

    hooks = [
        layer.register_forward_hook(recorder(name), with_kwargs=True)
        for name, layer in model.named_modules()
        if isinstance(layer, kinds)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def called_on(model: nn.Module, example: tuple[Any, ...]) -> Any:
    """Call the model on a user's example.

    Raises:
        ValueError: it cannot.
    """
    try:
        return model(*example)
    except Exception as error:  # a model is code that can fail in any way
        kinds = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in example]
        raise ValueError(
            f"example_input: {type(model).__name__} cannot be called on inputs of "
            f"{', '.join(map(str, kinds))}: {error}"
        ) from error


class SeenInput(NamedTuple):
    """An input of a layer without its values: a tensor on "meta", and the share of zeros."""

    like: Tensor
    zeros: float


def try_calls(layer: PrunableWeight, inputs: Sequence[SeenInput]) -> None:
    """Call a layer forwards and backwards on random tensors like ``inputs``, without its hooks.

    Its operations then know their backends, as after a training step. Neither gradients, counts nor
    the random state change.

    Args:
        inputs: of a pass of the model, in its order.
    """
    weight = layer.weight
    devices = [weight.device] if weight.is_cuda else []
    with in_eval_mode(layer), torch.enable_grad(), torch.random.fork_rng(devices):
        for like, zeros in reversed(inputs):  # as a backward pass goes
            input = torch.randn_like(like, device=weight.device)
            input[torch.rand_like(input) < zeros] = 0
            input.requires_grad_(like.requires_grad)
            output = layer.forward(input)
            wanted = [tensor for tensor in (input, weight) if tensor.requires_grad]
            if wanted:
                torch.autograd.grad(output, wanted, torch.randn_like(output))
    layer.state.record.shares.clear()
    layer.transient.plans.clear()


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode for the block; afterwards restore the mode of each module."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
