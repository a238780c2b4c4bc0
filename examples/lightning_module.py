"""FST in Lightning: one callback. python examples/lightning_module.py --epochs 8"""

import argparse

import lightning.pytorch as pl
import torch
from own_loop import accuracy, load
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import fst
from fst.integrations.lightning import SparsityCallback
from fst.models import digits_net


class Digits(pl.LightningModule):
    """A classifier as Lightning has it; nothing in it knows of FST."""

    def __init__(self) -> None:
        super().__init__()
        self.model = digits_net()

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """The loss of a batch."""
        images, labels = batch
        return cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--out", default="work_dirs/lightning")
    options = parser.parse_args()
    pl.seed_everything(0)
    images, labels, test_images, test_labels = load()
    module = Digits()
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        devices=options.ranks,
        strategy="ddp" if options.ranks > 1 else "auto",
        default_root_dir=options.out,
        callbacks=[SparsityCallback("srste", log_every=10)],
    )
    trainer.fit(module, DataLoader(TensorDataset(images, labels), 64, shuffle=True))
    plain = fst.fold(module.model)
    print(f"{fst.verify(plain)}\nfolded: {accuracy(plain, test_images, test_labels):.1f} %")
