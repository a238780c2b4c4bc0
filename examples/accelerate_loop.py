"""FST with accelerate: convert and attach before `prepare`. python examples/accelerate_loop.py

Two processes: torchrun --nproc-per-node=2 examples/accelerate_loop.py
"""

import argparse

import torch
from accelerate import Accelerator
from own_loop import accuracy, load
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import fst
from fst.integrations.accelerate import SparsityState
from fst.models import digits_net

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--out", default="work_dirs/accelerate")
    options = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    images, labels, test_images, test_labels = load()
    sparse = digits_net()
    fst.convert(sparse, "srste")
    sgd = torch.optim.SGD(sparse.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    fst.attach(sparse, sgd)
    fst.seed_random_rules(sparse, seed=0, rank=accelerator.process_index)
    accelerator.register_for_checkpointing(SparsityState(sparse))
    loader = DataLoader(TensorDataset(images, labels), 64, shuffle=True)
    model, optimizer, loader = accelerator.prepare(sparse, sgd, loader)
    for _ in range(options.epochs):
        for batch, targets in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(batch), targets)
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"loss {loss.item():.3f}, {fst.metrics(sparse)['sparsity/density']=}")
        accelerator.save_state(options.out)
    plain = fst.fold(accelerator.unwrap_model(model)).cpu()
    found = accuracy(plain, test_images, test_labels)
    accelerator.print(f"{fst.verify(plain)}\nfolded: {found:.1f} %")
    accelerator.end_training()
