"""ASP's and ModelOpt's 2:4 fine-tuning. python examples/recipes/from_asp_or_modelopt.py

Masks are chosen once, by the magnitudes of trained weights, and kept while the network recovers.
Theirs, before and after the training loop:

    from apex.contrib.sparsity import ASP       import modelopt.torch.sparsity as mts
    ASP.prune_trained_model(model, optimizer)   mts.sparsify(model, mode="sparse_magnitude")
    torch.save(model.state_dict(), file)        model = mts.export(model)
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import fst
from fst.models import digits_net


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> float:
    """Returns the accuracy on the test images in percent."""
    data = load_digits()
    images = torch.tensor(data.images).float().div(16).sub(0.5).unsqueeze(1)
    labels = torch.tensor(data.target)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(1400).split(64):
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        found = model.eval()(images[1400:]).argmax(1)
    return 100 * (found == labels[1400:]).float().mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--out", default="asp.pth")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = digits_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    dense = train(model, optimizer, options.epochs)
    fst.convert(model, "asp")
    fst.attach(model, optimizer)
    train(model, optimizer, options.epochs)
    plain = fst.fold(model)
    torch.save(plain.state_dict(), options.out)
    accuracy = train(plain, optimizer, epochs=0)
    print(f"{fst.verify(options.out)}\ndense: {dense:.1f} %, folded: {accuracy:.1f} %")
