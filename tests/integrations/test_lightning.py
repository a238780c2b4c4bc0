"""The callback in Lightning's own Trainer: it converts, logs, resumes exactly, and refuses."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import VisionTransformer

import fst

pl = pytest.importorskip("lightning.pytorch")

from fst.integrations.lightning import SparsityCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Module(pl.LightningModule):
    def __init__(self, model=None):
        super().__init__()
        torch.manual_seed(0)
        self.model = model or nn.Sequential(
            nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten()
        )
        self.frozen = []

    def training_step(self, batch):
        images, labels = batch
        return cross_entropy(self.model(images), labels)

    def validation_step(self, batch):
        self.frozen += [
            layer.transient.frozen is not None for layer in fst.sparse_layers(self).values()
        ]

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def loader(batch_size=8):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(32, 4, 6, 6, generator=generator)
    labels = torch.randint(32, (32,), generator=generator)
    return DataLoader(TensorDataset(images, labels), batch_size)


def fit(
    folder,
    epochs,
    strategy="srste",
    checkpoint=None,
    module=None,
    batch_size=8,
    accumulate=1,
    **options,
):
    callback = SparsityCallback(strategy, log_every=2, **options)
    trainer = pl.Trainer(
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=[callback, pl.callbacks.ModelCheckpoint(folder / "saved", save_top_k=-1)],
        logger=pl.loggers.CSVLogger(folder),
        log_every_n_steps=2,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = module or Module()
    trainer.fit(module, loader(batch_size), loader(), ckpt_path=checkpoint)
    return trainer, module


class DenseAgain(Module):
    """Its second epoch is dense training."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            fst.unconvert(self)


def test_a_run_may_end_dense(tmp_path):
    _, module = fit(tmp_path, 2, strategy="rigl", interval=3, module=DenseAgain())
    assert type(module.model[0]) is nn.Conv2d and bool(module.model[2].weight.all())


@pytest.mark.parametrize("options", [{}, {"strategy": "tsm", "interval": 7}])
def test_a_resumed_run_ends_as_a_whole_one(tmp_path, options):
    _, whole = fit(tmp_path / "whole", 3, **options)
    (path,) = (tmp_path / "whole" / "saved").glob("epoch=0*.ckpt")
    _, resumed = fit(tmp_path / "resumed", 3, checkpoint=path, **options)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name])
    states = [fst.sparsity_state(module) for module in (whole, resumed)]
    assert states[0]["model.0"]["step"] == states[1]["model.0"]["step"] == 12
    if options:
        masks = [state["model.2"]["kept_mask"] for state in states]
        assert torch.equal(*masks) and 0 < masks[0].double().mean() < 1


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("srste", {}),
        ("rigl", dict(interval=3)),
        ("clicktrain", dict(choose=0.2, enforce=0.7, lasso=0.1)),
    ],
)
def test_the_run_is_that_of_a_loop_of_ones_own(tmp_path, name, options):
    trainer, module = fit(tmp_path, 2, strategy=name, **options)
    alone = Module()
    fst.convert(alone, fst.get_strategy(name, **options))
    fst.seed_random_rules(alone, 0)
    optimizer = alone.configure_optimizers()
    fst.attach(alone, optimizer, total_steps=8)
    for _ in range(2):
        for batch in loader():
            optimizer.zero_grad()
            alone.training_step(batch).backward()
            optimizer.step()
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(module.state_dict()[key], value)
    layer, expected = module.model[2], alone.model[2]
    torch.testing.assert_close(layer.effective_weight(), expected.effective_weight())
    assert module.frozen and all(module.frozen)
    assert trainer.callback_metrics["sparsity/density"] == fst.metrics(alone)["sparsity/density"]
    assert "sparsity/grad_norm/model.0" in trainer.callback_metrics
    assert fst.verify(fst.fold(module)).ok == (name == "srste")


def test_a_sampled_model_is_tested_after_its_training(tmp_path):
    sizes = {"image_size": 8, "patch_size": 4, "num_layers": 1, "num_heads": 2, "num_classes": 32}
    model = nn.Sequential(
        nn.Conv2d(4, 3, 1), nn.Upsample(8), VisionTransformer(**sizes, hidden_dim=16, mlp_dim=32)
    )
    trainer, module = fit(tmp_path, 1, strategy="sampled", module=Module(model), layers="linear")
    assert {layer.strategy.name for layer in fst.sparse_layers(module).values()} == {"sampled"}
    trainer.test(module, loader())


class TwoOptimizers(Module):
    """The halves of the model take turns."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.model[index].parameters(), lr=0.5) for index in (0, 2)]


def test_several_optimizers_hold_converted_weights(tmp_path):
    _, module = fit(tmp_path, 1, module=TwoOptimizers())
    assert [layer.state.step for layer in fst.sparse_layers(module).values()] == [4, 4]


def test_accumulation_ends_with_the_epoch(tmp_path):
    """Six batches, four at a time, are two steps; of eight filters some go after each epoch."""
    trainer, _ = fit(tmp_path, 3, strategy="asfp", goal=0.5, batch_size=6, accumulate=4)
    assert trainer.global_step == 6
    for path in (tmp_path / "saved").glob("*.ckpt"):
        weight = torch.load(path, weights_only=True)["state_dict"]["model.2.weight"]
        assert (weight == 0).flatten(1).all(1).sum() in (3, 4), path.name


def test_what_cannot_work_is_refused(tmp_path):
    with pytest.raises(ValueError, match="replaces Parameters"):
        SparsityCallback("prunetrain")
    with pytest.raises(ValueError, match="log_every=-1"):
        SparsityCallback("srste", log_every=-1)
    module = Module()
    fst.convert(module, "tsm")
    with pytest.raises(ValueError, match="the module is converted with tsm"):
        SparsityCallback("srste").setup(None, module, "fit")
    plain = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    plain.fit(Module(), loader())
    path = tmp_path / "plain.ckpt"
    plain.save_checkpoint(path)
    with pytest.raises(ValueError, match="a training without SparsityCallback"):
        fit(tmp_path, 2, checkpoint=path)
