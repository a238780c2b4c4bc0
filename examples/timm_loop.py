"""FST in timm's loop: its mixup, EMA, optimizer and scheduler. python examples/timm_loop.py

The same lines go into timm's own train.py: `fst.convert` after `create_model`, `fst.attach` after
`create_optimizer_v2`, and `fst.sparsity_state` beside its checkpoint.
"""

import argparse

import timm
import torch
from own_loop import accuracy, load
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, random_seed

import fst

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--strategy", default="srste", choices=fst.list_strategies())
    options = parser.parse_args()
    random_seed(0)  # mixup draws from NumPy
    images, labels, test_images, test_labels = load()
    model = timm.create_model("test_resnet", in_chans=1, num_classes=10)
    print(fst.convert(model, options.strategy))
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05, weight_decay=5e-4)
    steps = len(labels) // 64
    fst.attach(model, optimizer, total_steps=options.epochs * steps, steps_per_epoch=steps)
    scheduler = CosineLRScheduler(optimizer, t_initial=options.epochs)
    average = ModelEmaV3(model, decay=0.9)
    mixup = Mixup(mixup_alpha=0.2, label_smoothing=0.1, num_classes=10)
    criterion = SoftTargetCrossEntropy()
    for epoch in range(options.epochs):
        model.train()
        for batch in torch.randperm(len(labels))[: steps * 64].split(64):
            mixed, targets = mixup(images[batch], labels[batch])
            loss = criterion(model(mixed), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update(model)
        scheduler.step(epoch + 1)
    # masks that are state belong to the trained model: its average takes them over
    fst.load_sparsity_state(average.module, fst.sparsity_state(model))
    plain = fst.fold(average.module)
    print(f"{fst.verify(plain)}\nfolded: {accuracy(plain, test_images, test_labels):.1f} %")
