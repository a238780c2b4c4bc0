"""Bad input is refused before any work, with a message that says what to do."""

import inspect
import re

import pytest
import torch
from mmengine.config import Config
from mmengine.optim.optimizer import default_constructor as constructor

from fst.cli import main
from fst.training.engine.checks import PARAMWISE_CFG, check_config
from fst.training.engine.config import load_config
from fst.training.engine.data.loader import build_dataloader
from tests.images import write_images

CIFAR = 'dict(type="CIFAR10", data_root="no/where")'


@pytest.fixture
def refused(error_of, tmp_path):
    """The line with which a command refuses its arguments, before any work."""

    def run(*arguments, command="train"):
        line = error_of(command, *arguments, "--work-dir", tmp_path / "never")
        assert not (tmp_path / "never").exists()
        return line

    return run


@pytest.mark.parametrize(
    ("sparsity", "expected"),
    [
        ('dict(strategy="sdpg")', "Did you mean 'sdgp'"),
        ('dict(strategy="fst", nn=2)', "nn"),
        ('dict(strategy="fst", n=5)', "n=5"),
        ('dict(strategy="fst", log_interval=0)', "log_interval=0"),
        ("dict(n=2)", "must be a dict with the key 'strategy'"),
        ('"fst"', "must be a dict with the key 'strategy'"),
    ],
)
def test_sparsity(write_config, sparsity, expected, refused):
    assert expected in refused(write_config(sparsity))


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("sparsety = dict()\n", "nothing reads 'sparsety'.* Did you mean 'sparsity'"),
        ("max_epochs = 3\n", "nothing reads 'max_epochs'"),
        ("a = 1\nb = a\n", "nothing reads 'b'"),
        ("x, y = 1, 2\nload_from = y and None\n", "nothing reads 'x'"),
    ],
)
def test_top_level_names_that_nothing_reads(write_config, extra, expected, refused):
    assert re.search(expected, refused(write_config(extra=extra)))


def test_helper_variables(tmp_path):
    base, heir = tmp_path / "base.py", tmp_path / "heir.py"
    base.write_text("side = 8\nmodel = dict(type='Classifier', side=side)\n")
    assert load_config(str(base)).model.side == 8
    base.write_text("side = 8\nmodel = dict(type='Classifier')\n")
    heir.write_text("_base_ = 'base.py'\nmodel = dict(side={{_base_.side}})\n")
    assert load_config(str(heir)).model.side == 8
    # an heir cannot change what its base has already used
    base.write_text("side = 8\nmodel = dict(type='Classifier', side=side)\n")
    heir.write_text("_base_ = 'base.py'\nside = 16\n")
    with pytest.raises(ValueError, match=r"heir\.py: nothing reads 'side'"):
        load_config(str(heir))


def test_package_bases_are_trusted(tmp_path):
    pytest.importorskip("mmdet")
    heir = tmp_path / "heir.py"
    heir.write_text("_base_ = 'mmdet::ssd/ssd300_coco.py'\nsparsity = dict(strategy='fst')\n")
    assert load_config(str(heir)).sparsity.strategy == "fst"


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("train_cfg", "not of the form key=value"),
        ("=3", "not of the form key=value"),
        ("optim_wraper.optimizer.lr=1", "Did you mean 'optim_wrapper'"),
        ("model.data_preprocessor.mean=[1", "'[1' cannot be read; write a list"),
        ("train_cfg.max_epochs=-1", "train_cfg.max_epochs=-1 must be an integer >= 1"),
        ("train_cfg.val_begin=x", "train_cfg.val_begin='x' must be an integer >= 0"),
        ("train_cfg.val_interval=0", "train_cfg.val_interval=0 must be an integer >= 1"),
        ("model.architecture=resnet18", "model.architecture='resnet18' must be a dict."),
        ("custom_hooks=5", "custom_hooks=5 must be a list."),
    ],
)
def test_cfg_options(write_config, option, expected, refused):
    config = write_config(extra="custom_hooks = []\n")
    message = refused(config, "--cfg-options", option)
    assert expected in message


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("binary.py", b"\x80\x81"),
        ("null.py", b"a = 1\0"),
        ("binary.json", b"\x80\x81"),
        ("half.json", b'{"model": '),
        ("binary.yaml", b"\x80\x81"),
        ("nested.json", b"[" * 50_000),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_cannot_be_read_is_named(tmp_path, name, content, refused):
    (tmp_path / name).write_bytes(content)
    message = refused(str(tmp_path / name))
    assert message.startswith(f"error: config {str(tmp_path / name)!r} cannot be read: ")


def test_a_config_is_read_again_where_threads_confused_python_s_parser(write_config, monkeypatch):
    read, answers = Config.fromfile, [SystemError("AST constructor recursion depth mismatch")]

    def fromfile(path):
        if answers:
            raise answers.pop()
        return read(path)

    monkeypatch.setattr(Config, "fromfile", fromfile)
    assert load_config(write_config()).sparsity.strategy


def test_a_work_dir_that_is_no_folder(tmp_path, write_config, error_of):
    (tmp_path / "file").touch()
    for wrong in ("file", "file/within"):
        line = error_of("train", write_config(), "--work-dir", tmp_path / wrong)
        assert str(tmp_path / "file") in line


def test_cfg_options_of_a_helper_variable(tmp_path):
    (tmp_path / "a.py").write_text("side = 8\nmodel = dict(side=side)\n")
    with pytest.raises(ValueError, match="helper variable of the config, already used"):
        load_config(str(tmp_path / "a.py"), {"side": 9})


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ('dict(type="ImageFolder", data_root="no/where", split="train")', "image-net.org"),
        ('dict(type="Digits", size=0)', "size=0 must be an integer >= 1"),
        ('dict(type="CIFAR10", data_root="no/where")', "cs.toronto.edu"),
    ],
)
def test_missing_data(write_config, dataset, expected, refused):
    config = write_config(extra=f'train_dataloader["dataset"] = {dataset}\n')
    message = refused(config)
    assert expected in message


def test_missing_files(tmp_path, write_config, refused):
    assert "absent.py" in refused("absent.py")
    message = refused(write_config(), "--resume", "absent.pth")
    assert "'absent.pth'" in message and "does not exist" in message
    message = refused(write_config(), str(tmp_path), command="test")
    assert f"{str(tmp_path)!r}" in message and "is no file" in message
    message = refused(write_config(), "absent.pth", command="test")
    assert "'absent.pth'" in message
    broken = tmp_path / "broken.py"
    broken.write_text("model = dict(\n")
    assert "broken.py" in refused(str(broken))


def test_launcher_without_torchrun(write_config, monkeypatch, refused):
    monkeypatch.delenv("RANK", raising=False)
    message = refused(write_config(), "--launcher", "pytorch")
    assert "torchrun --nproc-per-node=2" in message and "RANK" in message


def test_no_images(tmp_path, write_config, refused):
    (tmp_path / "data" / "cat").mkdir(parents=True)
    dataset = dict(type="ImageFolder", data_root=str(tmp_path / "data"))
    extra = f'train_dataloader["dataset"] = {dataset}\n'
    assert "no valid file for the classes cat" in refused(write_config(extra=extra))


def test_more_classes_than_outputs(train):
    with pytest.raises(ValueError, match="10 classes, but the model num_classes=4"):
        train(extra='model["architecture"]["num_classes"] = 4\n')


FOLDERS = """
model["data_preprocessor"] = dict(type="ImagePreprocessor", mean=[0.0], std=[255.0])
reading = [dict(type="Grayscale"), dict(type="Resize", size=(8, 8))]
train_dataloader["batch_size"] = 2
train_dataloader["dataset"] = dict(
    type="ImageFolder", data_root={root!r}, split="train", transforms=reading
)
val_dataloader["dataset"] = dict(
    type="ImageFolder", data_root={root!r}, split="{split}", transforms=reading
)
"""


def test_classes_have_the_same_numbers_in_training_and_evaluation(train, write_config, tmp_path):
    images = {"train": "abc", "same": "abc", "fewer": "ab", "shifted": "bc", "more": "abcdefghijk"}
    write_images(tmp_path, {f"{split}/{name}": 1 for split in images for name in images[split]})
    folders = {split: FOLDERS.format(root=str(tmp_path), split=split) for split in images}
    path = str(train("run", extra=folders["same"]) / "epoch_2.pth")
    for split, message in (
        ("fewer", r"fewer: its classes are not those of the training, .* \(missing: c; not in"),
        ("shifted", r"shifted: .* \(missing: a; not in the training: none\)"),
        ("more", r"more: .* \(missing: none; not in the training: d, e, f"),
    ):
        with pytest.raises(ValueError, match=message):
            train(f"run_{split}", extra=folders[split])
        assert not list((tmp_path / f"run_{split}").glob("*.pth"))
        config = write_config(extra=folders[split])
        with pytest.raises(ValueError, match=message):
            main(["test", config, path, "--work-dir", str(tmp_path / "test"), "--traceback"])


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("train_dataloader.pop('sampler')", "train_dataloader has no sampler"),
        (
            f'train_dataloader["dataset"] = dict(type="RepeatDataset", times=2, dataset={CIFAR})',
            "'RepeatDataset' cannot wrap CIFAR10",
        ),
        (
            f'train_dataloader["dataset"] = dict(type="ConcatDataset", datasets=[{CIFAR}])',
            "'ConcatDataset' cannot wrap CIFAR10",
        ),
        ("env_cfg = dict(cudnn_benchmrk=True)", "env_cfg key 'cudnn_benchmrk'.* 'cudnn_benchmark'"),
        (
            "auto_scale_lr = dict(enabled=True)",
            "auto_scale_lr key 'enabled'.* Did you mean 'enable'",
        ),
        ('{optim}["paramwise_cfg"] = dict(norm_decay_mul=0)', "Did you mean 'norm_decay_mult'"),
        (
            '{optim}["paramwise_cfg"] = dict(custom_keys=dict(bn=dict(decay_mul=0)))',
            r"custom_keys\['bn'\] key 'decay_mul' is unknown. Did you mean 'decay_mult'",
        ),
    ],
)
def test_what_would_be_ignored(write_config, extra, expected, refused):
    extra = extra.replace("{optim}", "optim_wrapper")
    assert re.search(expected, refused(write_config(extra=extra + "\n")))


def test_keys_of_paramwise_cfg_are_those_that_mmengine_reads():
    read = re.findall(r"paramwise_cfg\.get\(\s*'(\w+)'", inspect.getsource(constructor))
    assert set(PARAMWISE_CFG) == set(read)


def test_other_constructors_have_keys_of_their_own():
    optim = dict(optimizer=dict(type="SGD", lr=1), paramwise_cfg=dict(num_layers=2))
    config = Config(dict(model={}, optim_wrapper=dict(optim, constructor="LayerDecay")))
    check_config(config, ())
    with pytest.raises(ValueError, match="'num_layers' is unknown"):
        check_config(Config(dict(model={}, optim_wrapper=optim)), ())


def test_a_best_metric_that_is_none(train, tmp_path):
    metrics = f"""[val_evaluator, dict(type="DumpResults", out_file_path="{tmp_path}/out.pkl")]"""
    with pytest.raises(ValueError, match="save_best='accuracy/top5' is no metric. Did you mean"):
        train(
            extra='default_hooks["checkpoint"]["save_best"] = "accuracy/top5"\n'
            f"val_evaluator = {metrics}\n"
        )


def test_fsdp_is_refused(train):
    with pytest.raises(ValueError, match="FSDP is not supported"):
        train(extra='model_wrapper_cfg = dict(type="MMFullyShardedDataParallel")\n')


def test_two_sparsity_hooks(train):
    with pytest.raises(ValueError, match="several SparsityHooks"):
        train(extra='custom_hooks = [dict(type="SparsityHook", strategy="fst")]\n')


def test_amp_on_cpu(train):
    if torch.cuda.is_available():
        pytest.skip("checks the CPU's rules")
    train("amp", "--amp")
    with pytest.raises(ValueError, match="needs a GPU"):
        train("fp16", "--amp", "--cfg-options", "optim_wrapper.dtype=float16")
    with pytest.raises(ValueError, match="'Mine'"):
        train("other", "--amp", extra='optim_wrapper["type"] = "Mine"\n')


def test_a_config_of_the_package_is_inherited(tmp_path):
    """Values taken from it by name come with no scope, for which MMEngine would want a package."""
    heir = tmp_path / "heir.py"
    heir.write_text(
        '_base_ = "fst::configs/demo_digits.py"\n'
        "val_dataloader = dict(batch_size=7)\n"
        "test_dataloader = {{_base_.val_dataloader}}\n"
    )
    config = load_config(str(heir))
    assert config.sparsity.strategy == "fst" and config.val_dataloader.batch_size == 7
    assert "_scope_" not in config.pretty_text
    check_config(config, ("val_dataloader", "test_dataloader"))
    assert len(build_dataloader(config.test_dataloader, seed=0).dataset) == 359
    assert load_config("fst::configs/demo_digits").sparsity.strategy == "fst"
    with pytest.raises(FileNotFoundError, match="Did you mean 'fst::configs/demo_digits.py'"):
        load_config("fst::configs/demo_digit")
