"""timm's own train.py, sparse: the model is converted as it is made, the optimizer attached.

python examples/recipes/timm_train.py path/to/train.py DATA --model resnet18 --epochs 2

Writes the last weights, pruned, as folded.pth, which timm's model loads.
"""

import os
import runpy
import sys

import timm.models
import timm.optim
import torch

import fst

STRATEGY = os.environ.get("STRATEGY", "srste")
create_model, create_optimizer = timm.models.create_model, timm.optim.create_optimizer_v2
made = []


def sparse_model(*args, **options):
    """timm's model, converted."""
    made.append(create_model(*args, **options))
    print(fst.convert(made[-1], STRATEGY))
    return made[-1]


def attached_optimizer(model, **options):
    """timm's optimizer, attached."""
    optimizer = create_optimizer(model, **options)
    fst.attach(model, optimizer)
    return optimizer


if __name__ == "__main__":
    sys.argv.pop(0)
    timm.models.create_model, timm.optim.create_optimizer_v2 = sparse_model, attached_optimizer
    runpy.run_path(sys.argv[0], run_name="__main__")
    plain = fst.fold(made[0])
    print(fst.verify(plain))
    torch.save(plain.state_dict(), "folded.pth")
