"""FST in the loop of torchvision's classification reference: MixUp, AMP, clipping, averaging.

python examples/torchvision_loop.py. In torchvision's own references/classification/train.py the
same three lines are added: `fst.convert` after `get_model`, `fst.attach` after the optimizer, and
`fst.sparsity_state` in its checkpoint.
"""

import argparse

import torch
from own_loop import accuracy, load
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision.models import DenseNet
from torchvision.transforms import v2

import fst

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, labels, test_images, test_labels = load()
    larger = v2.Compose([v2.Resize(32), v2.RGB()])
    images, test_images = larger(images), larger(test_images)
    model = DenseNet(12, (3, 3), 24, num_classes=10).to(device)
    print(fst.convert(model, "srste"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    fst.attach(model, optimizer)
    warmup = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, options.epochs * 23)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    mix = v2.MixUp(num_classes=10, alpha=0.2)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
    for _ in range(options.epochs):
        model.train()
        for batch in torch.randperm(len(labels)).split(64):
            mixed, targets = mix(images[batch].to(device), labels[batch].to(device))
            with torch.autocast(device, enabled=device == "cuda"):
                loss = criterion(model(mixed), targets)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            warmup.step()
            average.update_parameters(model)
    plain = fst.fold(average.module).cpu()
    print(f"{fst.verify(plain)}\nfolded: {accuracy(plain, test_images, test_labels):.1f} %")
