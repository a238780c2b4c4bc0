"""FST in a training loop of your own: scikit-learn's digits, a CPU, a few seconds.

    python examples/own_loop.py --strategy fst

Only two lines differ from a dense loop: `fst.convert` and `fst.attach`; `prunetrain` needs a third,
`report_loss`.
"""

import argparse
import math

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import fst
from fst.models import digits_net

BATCH = 64


def load() -> tuple[torch.Tensor, ...]:
    """1,797 real 8x8 images in [0, 1], every fifth one held out."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    held_out = torch.arange(len(labels)) % 5 == 4
    return images[~held_out], labels[~held_out], images[held_out], labels[held_out]


@torch.no_grad()
def accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Top-1 accuracy in per cent."""
    return 100 * (model.eval()(images).argmax(1) == labels).float().mean().item()


def main() -> None:
    """Train, check the pattern, fold the masks into plain convolutions, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="srste", choices=fst.list_strategies())
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()

    torch.manual_seed(0)
    images, labels, test_images, test_labels = load()
    model = digits_net()
    print(fst.convert(model, args.strategy))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    steps = math.ceil(len(labels) / BATCH)
    handle = fst.attach(model, optimizer, total_steps=args.epochs * steps, steps_per_epoch=steps)
    for epoch in range(args.epochs):
        model.train()
        for batch in torch.randperm(len(labels)).split(BATCH):
            optimizer.zero_grad()
            loss = cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            handle.report_loss(loss)
            optimizer.step()
        schedule.step()
        test_accuracy = accuracy(model, test_images, test_labels)
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, test accuracy {test_accuracy:.1f} %")

    plain = fst.fold(model)
    if fst.get_strategy(args.strategy).output is not None:
        print(fst.verify(plain))
    print(f"folded: {accuracy(plain, test_images, test_labels):.1f} %, plain torch.nn modules")


if __name__ == "__main__":
    main()
