"""The image classifier: any model of timm, torchvision or `fst.models`, with its loss."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from timm.layers import BlurPool2d
from torch import nn

from fst.basics.values import one_of
from fst.training.architecture import build_architecture
from fst.training.engine.recipe import build_loss

PREFIX = "architecture."
LEAST_BLURRED = 16  # input channels


@MODELS.register_module()
class Classifier(BaseModel):
    """Training and prediction around an ``architecture``.

    Args:
        architecture: dict(source="timm" | "torchvision" | "fst", name=..., num_classes=..., and any
            other argument of the model's constructor).
        loss: Arguments of torch's cross entropy, such as label_smoothing, or with a ``type``
            those of one of timm's losses: see `fst.training.engine.recipe.build_loss`.
        data_preprocessor: Normally dict(type="ImagePreprocessor", mean=..., std=...).
        test_time_augmentation: "flip" averages the probabilities with those of the mirrored image.
        channels_last: Keep weights and activations in NHWC memory.
        initialisation: "kaiming_uniform" draws the convolutions' weights anew before a training,
            see `initialise_convolutions`; None leaves them as the architecture makes them.
        blur_pool: Blur in front of strided convolutions, see `blur_strided_convolutions`.
    """

    def __init__(
        self,
        architecture: dict[str, Any],
        loss: dict[str, Any] | None = None,
        data_preprocessor: dict[str, Any] | nn.Module | None = None,
        test_time_augmentation: str | None = None,
        channels_last: bool = False,
        initialisation: str | None = None,
        blur_pool: bool = False,
    ) -> None:
        self.num_classes = architecture.get("num_classes")
        super().__init__(data_preprocessor=_with_classes(data_preprocessor, self.num_classes))
        mixup = getattr(self.data_preprocessor, "mixup", None)
        self.loss = build_loss(loss, mixed=mixup is not None)
        one_of("test_time_augmentation", test_time_augmentation, (None, "flip"))
        one_of("initialisation", initialisation, (None, "kaiming_uniform"))
        one_of("blur_pool", blur_pool, (False, True))
        self.test_time_augmentation = test_time_augmentation
        self.initialisation = initialisation
        self.channels_last = channels_last
        self.architecture = build_architecture(**architecture)
        if blur_pool:
            blur_strided_convolutions(self.architecture)
        if channels_last:
            self.architecture.to(memory_format=torch.channels_last)

    def init_weights(self) -> None:
        """Called once before a training, and before weights are loaded."""
        is_first = not self.is_init
        super().init_weights()
        if is_first and self.initialisation:
            initialise_convolutions(self.architecture)

    @property
    def sparse_root(self) -> nn.Module:
        """The module that sparsity is about, so that layers go by the architecture's own names."""
        return self.architecture

    def forward(
        self, inputs: torch.Tensor, labels: torch.Tensor | None = None, mode: str = "tensor"
    ) -> torch.Tensor | dict[str, torch.Tensor] | list[dict[str, torch.Tensor]]:
        """Logits ("tensor"), a dict with the loss ("loss") or with ``scores`` ("predict")."""
        if self.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        logits = self.architecture(inputs)
        if mode == "tensor":
            return logits
        if mode == "loss":
            return {"loss": self.loss(logits.float(), labels)}
        if mode != "predict":
            raise ValueError(f"mode={mode!r} is unknown; it is 'tensor', 'loss' or 'predict'.")
        scores = logits.float().softmax(1)
        if self.test_time_augmentation == "flip":
            scores = (scores + self.architecture(inputs.flip(-1)).float().softmax(1)) / 2
        return [{"scores": scores, "labels": labels}]

    def adopted(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """``state_dict`` for this module, also if it is one of the architecture alone."""
        if not state_dict or any(key.startswith(PREFIX) for key in state_dict):
            return state_dict
        return {PREFIX + key: value for key, value in state_dict.items()}


def _with_classes(preprocessor: Any, num_classes: int | None) -> Any:
    """A preprocessor's config, whose mixup needs to know how many classes there are."""
    if not isinstance(preprocessor, Mapping) or not preprocessor.get("mixup"):
        return preprocessor
    return {**preprocessor, "mixup": {"num_classes": num_classes, **preprocessor["mixup"]}}


def initialise_convolutions(model: nn.Module) -> None:
    """Draw the weights of convolutions with more than three input channels from U(−b, b), b² = 6 /
    fan-in (He et al. 2015 for ReLU).

    So does SDGP's conversion (McDanel et al. 2022, `convert_model` of the official code), which
    makes these layers anew. PyTorch's own default has b² = 1 / fan-in.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.in_channels > 3:
            nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")


def blur_strided_convolutions(model: nn.Module) -> None:
    """Put a binomial 3×3 filter in front of each strided convolution of 16 input channels or more.

    As ffcv's ImageNet training and SDGP's do (after Zhang, "Making Convolutional Networks
    Shift-Invariant Again", ICML 2019): the filter has stride 1 and zero padding. The convolution
    at "NAME" becomes "NAME.conv".
    """
    for name, module in list(model.named_modules()):
        strided = isinstance(module, nn.Conv2d) and max(module.stride) > 1
        if strided and module.in_channels >= LEAST_BLURRED:
            blur = BlurPool2d(module.in_channels, filt_size=3, stride=1, pad_mode="constant")
            model.set_submodule(name, nn.Sequential(OrderedDict(blur=blur, conv=module)))
