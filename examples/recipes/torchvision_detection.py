"""torchvision's detectors, sparse, on boxes in COCO's format (needs pycocotools).

python examples/recipes/torchvision_detection.py IMAGES train.json --model retinanet_resnet50_fpn_v2
"""

import argparse

import torch
from torch.utils.data import DataLoader
from torchvision.datasets import CocoDetection, wrap_dataset_for_transforms_v2
from torchvision.models import get_model
from torchvision.transforms import v2

import fst

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images", help="folder")
    parser.add_argument("annotations", help="COCO's JSON file of them")
    parser.add_argument("--model", default="fasterrcnn_resnet50_fpn_v2")
    parser.add_argument("--strategy", default="srste")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--out", default="folded.pth")
    options = parser.parse_args()
    torch.manual_seed(0)
    flips = [v2.ToImage(), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]
    data = CocoDetection(options.images, options.annotations, transforms=v2.Compose(flips))
    classes = max(data.coco.getCatIds()) + 1  # with the background, which is 0
    data = wrap_dataset_for_transforms_v2(data, target_keys=("boxes", "labels"))
    loader = DataLoader(data, options.batch, shuffle=True, collate_fn=list)
    model = get_model(options.model, weights=None, weights_backbone=None, num_classes=classes)
    print(fst.convert(model, options.strategy))
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.005, momentum=0.9, weight_decay=5e-4)
    fst.attach(model, optimizer)
    for _ in range(options.epochs):
        for batch in loader:
            loss = sum(model(*map(list, zip(*batch, strict=True))).values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"loss {loss.item():.3f}")
    plain = fst.fold(model)
    print(fst.verify(plain))
    torch.save(plain.state_dict(), options.out)  # which torchvision's own model loads
