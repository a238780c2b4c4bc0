"""A 2:4 network of segmentation_models_pytorch. python examples/recipes/segmentation.py --net Unet

Images of circles stand for a data set; a loop of your own changes by the two lines with `fst.`.
"""

import argparse

import segmentation_models_pytorch as smp
import torch
from torch import Tensor

import fst


def circles(count: int, size: int) -> tuple[Tensor, Tensor]:
    """Noisy images (count, 3, size, size) and their masks (count, 1, size, size)."""
    centre, radius = torch.rand(2, count, 1, 1) * size, (0.2 + torch.rand(count, 1, 1) / 5) * size
    rows, columns = torch.meshgrid(*[torch.arange(size)] * 2, indexing="ij")
    inside = (rows - centre[0]) ** 2 + (columns - centre[1]) ** 2 < radius**2
    masks = inside.float().unsqueeze(1)
    return masks + 0.5 * torch.randn(count, 3, size, size), masks


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", default="Unet", help="a class of smp: Unet, DeepLabV3Plus, ...")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--out", default="segmentation.onnx")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = getattr(smp, options.net)("resnet18", encoder_weights=None)  # "imagenet": pretrained
    fst.convert(model, "srste")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of = smp.losses.DiceLoss("binary")
    for _ in range(options.steps):
        images, masks = circles(8, options.size)
        loss = loss_of(model(images), masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    plain = fst.fold(model).eval()
    images, masks = circles(32, options.size)
    with torch.no_grad():
        found = plain(images).sigmoid().round().long()
        packed = fst.pack(plain, images[:8])  # for CPUs
        print(f"packed differs by {(packed(images) - plain(images)).abs().max():.1e}")
    score = smp.metrics.iou_score(*smp.metrics.get_stats(found, masks.long(), mode="binary"))
    fst.export(plain, options.out, images[:1])
    print(f"{fst.verify(options.out)}\nfolded: mean IoU {score.mean():.2f}")
