"""timm's losses, mixing and erasing in a classifier; torchvision's transforms, v2 as v1."""

import numpy as np
import pytest
import torch
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from torch.nn import functional as F

from fst.training.engine import Classifier, ImagePreprocessor
from fst.training.engine.preprocessor import _seed
from fst.training.engine.random_state import isolated, mixed_seed, seed_all

ARCHITECTURE = dict(source="fst", name="tiny_net", num_classes=10)
PLAIN = dict(type="ImagePreprocessor", mean=[100.0], std=[50.0])
MIXUP = dict(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1)


def batch(size=8, epoch=0):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 256, (size, 1, 8, 8), generator=generator, dtype=torch.uint8)
    keys = torch.tensor([mixed_seed(0, epoch, index) for index in range(size)])
    return dict(inputs=inputs, labels=torch.arange(size) % 10, keys=keys)


@pytest.mark.parametrize(
    ("loss", "mixup"),
    [
        (None, None),
        (dict(label_smoothing=0.1), None),
        (dict(type="LabelSmoothingCrossEntropy", smoothing=0.1), None),
        (dict(type="BinaryCrossEntropy", smoothing=0.1), None),
        (None, MIXUP),
        (dict(type="SoftTargetCrossEntropy"), MIXUP),
        (dict(type="BinaryCrossEntropy", smoothing=0), MIXUP),
    ],
)
def test_losses_of_indices_and_of_probabilities(loss, mixup):
    model = Classifier(ARCHITECTURE, loss, dict(PLAIN, mixup=mixup)).eval()
    data = model.data_preprocessor(batch(), training=True)
    loss, targets, logits = loss or {}, data["labels"], model(**data)
    if not mixup:
        smoothing = sum(value for key, value in loss.items() if "smoothing" in key)
        targets = F.one_hot(targets, 10) * (1 - smoothing) + smoothing / 10
    torch.testing.assert_close(targets.sum(1), torch.ones(8))
    expected = -(targets * logits.log_softmax(1)).sum(1).mean()
    if loss.get("type") == "BinaryCrossEntropy":
        expected = F.binary_cross_entropy_with_logits(logits, targets)
    torch.testing.assert_close(model(**data, mode="loss")["loss"], expected)


def test_mixing_depends_on_the_keys():
    preprocessor = ImagePreprocessor([100.0], [50.0], mixup=dict(MIXUP, num_classes=10))
    first, same, other = (preprocessor(batch(epoch=e), training=True) for e in (0, 0, 1))
    assert all(torch.equal(first[name], same[name]) for name in ("inputs", "labels"))
    assert not torch.equal(other["labels"], first["labels"])
    assert preprocessor(batch())["labels"].tolist() == list(range(8))  # validation


def test_mixing_and_erasing_are_drawn_as_timm_draws():
    """Both, one after the other, under one seed: the same as timm's objects called by hand."""
    erasing = dict(probability=0.7, mode="pixel", max_count=2)
    options = dict(MIXUP, num_classes=10)
    preprocessor = ImagePreprocessor([100.0], [50.0], mixup=options, random_erasing=erasing)
    data = batch()
    found = preprocessor(data, training=True)
    plain = preprocessor(data)["inputs"]
    with isolated():
        seed_all(_seed(data["keys"]))
        expected = RandomErasing(**erasing, device="cpu")(plain.clone())
        assert not torch.equal(expected, plain)
        expected, labels = Mixup(**options)(expected, data["labels"])
    assert torch.equal(found["inputs"], expected) and torch.equal(found["labels"], labels)
    torch.manual_seed(3)
    state = np.random.get_state()[1].copy(), torch.get_rng_state()
    preprocessor(data, training=True)
    assert (np.random.get_state()[1] == state[0]).all()
    assert torch.equal(torch.get_rng_state(), state[1])


@pytest.mark.parametrize(
    ("loss", "preprocessor", "message"),
    [
        (dict(type="CrossEntropy"), {}, "loss type 'CrossEntropy' is unknown. Did you mean 'Cr"),
        (dict(smoothing=0.1), {}, "loss key 'smoothing' is unknown. .*'label_smoothing'"),
        (dict(label_smoothing=2), {}, r"loss label_smoothing=2 must be a number in \[0, 1\]"),
        (dict(reduction="sum"), {}, "loss key 'reduction' is unknown"),
        (dict(type="SoftTargetCrossEntropy"), {}, "the data is not mixed .*; use CrossEntropyLoss"),
        (dict(type="LabelSmoothingCrossEntropy"), dict(mixup=MIXUP), "is mixed by mixup; use Cro"),
        (dict(label_smoothing=0.1), dict(mixup=MIXUP), "labels are smoothed there; set data_prep"),
        ({}, dict(mixup=dict(alpha=1)), "mixup key 'alpha' is unknown"),
        ({}, dict(mixup=dict(prob=2)), r"mixup prob=2 must be a number in \[0, 1\]"),
        ({}, dict(mixup=dict(mode="half")), "mixup mode='half' is unknown"),
        ({}, dict(mixup=dict(cutmix_minmax=[0.1])), r"mixup: Mixup\(num_classes=10, cutmix_minmax"),
        ({}, dict(random_erasing=dict(prob=1)), "random_erasing key 'prob' is unknown"),
        ({}, dict(random_erasing=dict(probability=3)), "random_erasing probability=3 must be"),
        ({}, dict(random_erasing=dict(mode="noise")), "random_erasing: RandomErasing.* is refused"),
        ({}, dict(random_erasing=dict(device="cuda")), "random_erasing key 'device' is unknown"),
    ],
)
def test_what_is_refused(loss, preprocessor, message):
    with pytest.raises(ValueError, match=message):
        Classifier(ARCHITECTURE, loss, dict(PLAIN, **preprocessor))


def test_mixing_needs_an_even_batch():
    preprocessor = ImagePreprocessor([100.0], [50.0], mixup=dict(MIXUP, num_classes=10))
    with pytest.raises(AssertionError, match="Batch size should be even"):
        preprocessor(batch(7), training=True)
