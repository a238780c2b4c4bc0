"""The classifier, its preprocessor and its metric."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn import functional as F

from fst.training.engine import Accuracy, Classifier, ImagePreprocessor
from fst.training.engine.classifier import build_architecture

PREPROCESSOR = dict(type="ImagePreprocessor", mean=[100.0], std=[50.0])
TINY = dict(source="fst", name="tiny_net", num_classes=10)


def batch(size=6, side=8, channels=1):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(
        256, (size, channels, side, side), generator=generator, dtype=torch.uint8
    )
    return dict(inputs=inputs, labels=torch.arange(size), keys=torch.arange(size))


@pytest.mark.parametrize("source", ["timm", "torchvision"])
def test_architectures(source):
    assert build_architecture(source, "resnet18", num_classes=7).fc.out_features == 7
    with pytest.raises(ValueError, match=f"{source} has no model 'resnet81'.* 'resnet18'"):
        build_architecture(source, "resnet81")


def test_architecture_errors():
    with pytest.raises(ValueError, match="Did you mean 'timm'"):
        build_architecture("tim", "resnet18")
    with pytest.raises(ValueError, match="Did you mean 'resnet9'"):
        build_architecture("fst", "resnet_9")
    with pytest.raises(ValueError, match="wrong"):
        build_architecture("fst", "tiny_net", wrong=1)
    with pytest.raises(ValueError, match="label_smoothing"):
        Classifier(TINY, loss=dict(label_smooting=0.1), data_preprocessor=PREPROCESSOR)
    with pytest.raises(ValueError, match="test_time_augmentation='both'"):
        Classifier(TINY, test_time_augmentation="both", data_preprocessor=PREPROCESSOR)


def test_modes():
    model = Classifier(TINY, dict(label_smoothing=0.1), PREPROCESSOR, "flip").eval()
    data = model.data_preprocessor(batch())
    logits = model(**data)
    loss = F.cross_entropy(logits, data["labels"], label_smoothing=0.1)
    assert torch.equal(model(**data, mode="loss")["loss"], loss)
    (sample,) = model(**data, mode="predict")
    mirrored = model(data["inputs"].flip(-1)).softmax(1)
    torch.testing.assert_close(sample["scores"], (logits.softmax(1) + mirrored) / 2)
    with pytest.raises(ValueError, match="mode='train'"):
        model(**data, mode="train")


def test_channels_last():
    model = Classifier(TINY, data_preprocessor=PREPROCESSOR, channels_last=True).eval()
    assert model.architecture[3].weight.is_contiguous(memory_format=torch.channels_last)
    plain = Classifier(TINY, data_preprocessor=PREPROCESSOR).eval()
    plain.load_state_dict(model.state_dict())
    data = model.data_preprocessor(batch())
    torch.testing.assert_close(model(**data), plain(**data), rtol=1e-4, atol=1e-5)


def test_normalisation():
    preprocessor = ImagePreprocessor([100.0], [50.0], random_erasing=dict(probability=1.0))
    data = batch()
    found = preprocessor(data, training=False)
    assert torch.equal(found["inputs"], (data["inputs"].float() - 100) / 50)
    assert found.keys() == {"inputs", "labels"}
    listed = {"inputs": list(data["inputs"]), "labels": data["labels"].tolist()}
    assert torch.equal(preprocessor(listed)["inputs"], found["inputs"])
    with pytest.raises(ValueError, match="3 channels, but mean and std 1"):
        preprocessor(batch(channels=3))


@pytest.mark.parametrize(("std", "message"), [([1.0, 1.0], "equal lengths"), ([0.0], "positive")])
def test_preprocessor_errors(std, message):
    with pytest.raises(ValueError, match=message):
        ImagePreprocessor(mean=[0.0], std=std)


def test_accuracy():
    metric = Accuracy(topk=(1, 2))
    scores = torch.eye(4)[[0, 1, 2, 3, 0, 1, 2]] + 0.5 * torch.eye(4)[[1, 2, 3, 0, 3, 3, 3]]
    labels = torch.tensor([0, 1, 3, 0, 3, 2, 2])
    for part in (slice(0, 5), slice(5, 7)):
        metric.process(None, [dict(scores=scores[part], labels=labels[part])])
    found = metric.evaluate(7)
    assert found == pytest.approx({"accuracy/top1": 300 / 7, "accuracy/top2": 600 / 7})
    metric.process(None, [dict(scores=scores[:1], labels=labels[:1])])
    assert metric.evaluate(1)["accuracy/top1"] == 100
    with pytest.raises(ValueError, match="exceeds the model's 4 classes"):
        Accuracy(topk=5).process(None, [dict(scores=scores, labels=labels)])
    for topk in (0, True):
        with pytest.raises(ValueError, match=f"topk={topk} must be"):
            Accuracy(topk=topk)
    with pytest.raises(ValueError, match="no image was evaluated"):
        Accuracy().evaluate(3)


@pytest.mark.system
def test_compiled_architecture(train):
    torch._dynamo.reset()
    counters.clear()
    train(extra='compile = dict(backend="eager")\n')
    assert counters["stats"]["unique_graphs"]
