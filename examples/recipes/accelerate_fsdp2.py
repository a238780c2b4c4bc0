"""accelerate with FSDP2: convert, prepare, attach. accelerate makes shards on GPUs alone.

torchrun --nproc-per-node=2 examples/recipes/accelerate_fsdp2.py
"""

import argparse

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18

import fst

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="srste")
    parser.add_argument("--out", default="folded.pth")
    options = parser.parse_args()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100_000
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 3, 64, 64), torch.randint(10, (32,)))  # your images
    model = resnet18(num_classes=10)
    fst.convert(model, options.strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 8))
    fst.attach(model, optimizer.optimizer)  # the sharded weights: after prepare
    for _ in range(2):
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()
    weights = accelerator.get_state_dict(model)  # gathered, on the first rank
    masks = fst.sparsity_state(model)
    if accelerator.is_main_process:
        whole = resnet18(num_classes=10)
        fst.convert(whole, options.strategy)
        whole.load_state_dict(weights)
        fst.load_sparsity_state(whole, masks)
        plain = fst.fold(whole)
        torch.save(plain.state_dict(), options.out)
        print(fst.verify(plain))
    accelerator.end_training()
