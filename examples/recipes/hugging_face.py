"""A 2:4 image classifier by Hugging Face's Trainer. python examples/recipes/hugging_face.py

Scikit-learn's digits and a small ResNet (or ConvNeXT, ViT) stand for a model of the hub; convert
what `from_pretrained` returns. `save_pretrained` of a folded model writes a usual model folder.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForImageClassification, Trainer, TrainingArguments

import fst

SMALL = {
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]},
    "convnext": {"hidden_sizes": [32, 64], "depths": [1, 1], "num_stages": 2, "patch_size": 2},
    "vit": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"intermediate_size": 128, "image_size": 32, "patch_size": 4},
}


class Digits(Dataset):
    """Images (3, 32, 32) and labels, as the models' arguments."""

    def __init__(self, indices: slice) -> None:
        data = load_digits()
        images = torch.tensor(data.images[indices]).float().div(16).sub(0.5).unsqueeze(1)
        self.images = images.repeat_interleave(4, 2).repeat_interleave(4, 3).expand(-1, 3, -1, -1)
        self.labels = torch.tensor(data.target[indices])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images[i], "labels": self.labels[i]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet", choices=SMALL)
    parser.add_argument("--strategy", default="srste")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--out", default="work_dirs/hugging_face")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = AutoConfig.for_model(options.model, num_labels=10, **SMALL[options.model])
    model = AutoModelForImageClassification.from_config(config)
    # ConvNeXT's and ViT's work is in linear layers
    print(fst.convert(model, options.strategy, layers="all"))
    arguments = TrainingArguments(
        options.out,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=64,
        learning_rate=2e-3,
        save_strategy="no",
        report_to=[],
    )
    train, test = Digits(slice(1400)), Digits(slice(1400, None))
    Trainer(model, arguments, train_dataset=train).train()
    folded = fst.fold(model)
    folded.save_pretrained(options.out)
    plain = AutoModelForImageClassification.from_pretrained(options.out).eval()
    with torch.no_grad():
        found = plain(pixel_values=test.images).logits.argmax(1)
    accuracy = 100 * (found == test.labels).float().mean().item()
    print(f"{fst.verify(folded)}\nfolded: {accuracy:.1f} %")
