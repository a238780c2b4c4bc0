"""Models with batches and a loss, from a config and by name."""

import pytest
import torch
from model_under_test import from_config, from_name, images_of

from fst.cli import main


def test_checkpoints_and_masks(tmp_path):
    """tsm keeps its masks in the checkpoint; the analysed copy has them."""
    path, work = "fst::configs/demo_digits.py", tmp_path / "run"
    loader = "train_dataloader"
    options = {"sparsity.strategy": "tsm", f"{loader}.batch_size": 32, "train_cfg.max_epochs": 1}
    options |= {f"{loader}.dataset.subset": 64, "model.architecture.width": 4}
    changes = (f"{key}={value}" for key, value in options.items())
    main(["train", path, "--work-dir", str(work), "--cfg-options", *changes])
    saved = torch.load(work / "epoch_1.pth", weights_only=False)
    tested = from_config(path, options, checkpoint=str(work / "epoch_1.pth"), batches=2)
    assert [len(images_of(batch)) for batch in tested.batches] == [32, 32]
    copied = tested.copied(tested.strategy).architecture
    for name, entry in saved["sparsity"].items():
        layer = copied.get_submodule(name)
        assert torch.equal(layer.output_mask(), entry["kept_mask"].view(layer.weight.shape))
        key = f"architecture.{name}.weight"
        assert torch.equal(layer.weight, saved["state_dict"][key])
    with pytest.raises(ValueError, match="does not fit the model"):
        other = {**options, "model.architecture.num_classes": 7}
        from_config(path, other, checkpoint=str(work / "epoch_1.pth"))


def test_named_models():
    tested = from_name("timm:resnet18", classes=5, size=32, batch_size=2, batches=2)
    assert len(tested.batches) == 2 and images_of(tested.batches[0]).shape == (2, 3, 32, 32)
    assert tested.loss(tested.model, tested.batches[0]).dim() == 0
