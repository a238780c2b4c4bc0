"""A 2:4 network of segmentation_models_pytorch. python examples/recipes/segmentation.py --data DATA

DATA/train/images/NAME.jpg with DATA/train/masks/NAME.png (0: background), and DATA/val likewise.
Without --data noisy circles are trained on. Your own loop changes by the lines with `fst.`.
"""

import argparse
from pathlib import Path

import segmentation_models_pytorch as smp
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms.v2.functional import InterpolationMode, resize

import fst


def circles(count: int, size: int) -> TensorDataset:
    """Noisy images (count, 3, size, size) and their masks (count, 1, size, size)."""
    centre, radius = torch.rand(2, count, 1, 1) * size, (0.2 + torch.rand(count, 1, 1) / 5) * size
    rows, columns = torch.meshgrid(*[torch.arange(size)] * 2, indexing="ij")
    inside = (rows - centre[0]) ** 2 + (columns - centre[1]) ** 2 < radius**2
    masks = inside.float().unsqueeze(1)
    return TensorDataset(masks + 0.5 * torch.randn(count, 3, size, size), masks)


class Masks(Dataset):
    """Pairs of an image and its mask in a folder, as `circles` has them."""

    def __init__(self, folder: Path, size: int) -> None:
        self.images, self.size = sorted((folder / "images").iterdir()), size
        self.masks = [folder / "masks" / f"{path.stem}.png" for path in self.images]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        image = resize(decode_image(self.images[i], ImageReadMode.RGB), [self.size] * 2)
        mask = decode_image(self.masks[i], ImageReadMode.GRAY)
        mask = resize(mask, [self.size] * 2, InterpolationMode.NEAREST)
        return image / 127.5 - 1, (mask > 0).float()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a folder with train and val")
    parser.add_argument("--net", default="Unet", help="a class of smp: Unet, DeepLabV3Plus, ...")
    parser.add_argument("--strategy", default="srste")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--size", type=int, default=64, help="height and width, a multiple of 32")
    parser.add_argument("--out", default="segmentation", help="prefix of the files")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.data:
        train, val = (Masks(options.data / part, options.size) for part in ("train", "val"))
    else:
        train, val = circles(320, options.size), circles(32, options.size)
    model = getattr(smp, options.net)("resnet18", encoder_weights=None)  # "imagenet": pretrained
    print(fst.convert(model, options.strategy))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fst.attach(model, optimizer)
    loss_of = smp.losses.DiceLoss("binary")
    for epoch in range(options.epochs):
        for images, masks in DataLoader(train, 8, shuffle=True, drop_last=True):
            loss = loss_of(model(images), masks)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
    plain = fst.fold(model).eval()
    counts = []
    with torch.no_grad():
        for images, masks in DataLoader(val, 8):
            found = plain(images).sigmoid().round().long()
            counts.append(smp.metrics.get_stats(found, masks.long(), mode="binary"))
    score = smp.metrics.iou_score(*(torch.cat(kind) for kind in zip(*counts, strict=True)))
    fst.export(plain, f"{options.out}.onnx", images[:1], dynamic=True)
    packed = fst.pack(plain, images)  # for CPUs
    torch.save(packed, f"{options.out}_packed.pt")
    print(packed.report)
    print(f"{fst.verify(f'{options.out}.onnx')}\nfolded: mean IoU {score.mean():.2f}")
    print(f"written: {options.out}.onnx, {options.out}_packed.pt")
