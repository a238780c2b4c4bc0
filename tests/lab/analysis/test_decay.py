"""`fst analyze decay`: flip rates of short trainings, and the λ that they name."""

import pytest

pytest.importorskip("mmengine")
pytest.importorskip("matplotlib")

import torch

import fst
from fst.engine.config import load_config
from fst.engine.hooks import SparsityHook
from fst.engine.runner import Runner
from fst.lab.analysis.cli import main
from fst.lab.analysis.commands.decay import verdict
from fst.lab.analysis.flips import DENSE, flip_rates
from tests.lab.analysis.test_commands import check

LOADER = {"train_dataloader.num_workers": 0, "train_dataloader.persistent_workers": False}


@pytest.fixture
def configured(write_config):
    def configured(strategy="srste", **options):
        return load_config(write_config(strategy, **options), LOADER)

    return configured


def followed(config, decay, steps, tmp_path):
    """Flip rates of a run that ends by itself, from masks by `sort` of its weights."""
    config.work_dir = str(tmp_path / f"{decay}")
    config.experiment_name = f"followed_{decay}"
    config.sparsity = None if decay is DENSE else {**config.sparsity, "decay": decay}
    runner = Runner.from_cfg(config)
    seen = []

    def look(*_):
        root = SparsityHook.root(runner)
        masks = []
        for index in (2, 6):  # the convolutions of eight channels
            groups = root[index].weight.detach().abs().movedim(1, -1).unflatten(-1, (-1, 4))
            ranks = groups.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
            masks.append((ranks < 2).flatten())
        seen.append(torch.cat(masks))

    class Watch(fst.engine.runner.Hook):
        def before_train(self, runner):
            look()
            runner.optim_wrapper.optimizer.register_step_post_hook(look)

    runner.register_hook(Watch())
    runner.train()
    return {
        step: float((seen[step] != seen[step - 1]).double().mean()) for step in range(1, steps + 1)
    }


def test_rates_are_those_of_the_trainings(configured, tmp_path):
    options = {"exclude": "0"}
    found = flip_rates(configured(**options), [0.0, 0.5], 6)
    assert found.keys() == {DENSE, 0.0, 0.5}
    for decay, rates in found.items():
        assert rates == pytest.approx(followed(configured(**options), decay, 6, tmp_path))
    assert sum(found[DENSE].values()) > 0 and found[0.5] != found[0.0] != found[DENSE]


def test_masks_that_are_kept_are_compared_as_often_as_they_change(configured):
    found = flip_rates(configured("tsrste", interval=2, dense_tail=0.0), [0.0], 5)
    assert list(found[0.0]) == list(found[DENSE]) == [2, 4]


def test_the_command(write_config, tmp_path):
    options = [f"{key}={value}" for key, value in LOADER.items()]
    main(
        ["decay", write_config("fst_w"), "--steps", "6", "--decays", "0", "0.01", "1", "--seed"]
        + ["4", "--ratio", "0.2", "5", "--out", str(tmp_path), "--cfg-options", *options]
    )
    document = check(tmp_path)
    (table,) = document.tables
    assert [row[0] for row in table.rows] == ["dense", "0", "0.01", "1"]
    good = ["yes" if 0.2 <= row[2] <= 5 else "no" for row in table.rows[1:]]
    assert [row[3] for row in table.rows] == ["", *good] and {"yes", "no"} == set(good)
    assert "Take decay=" in document.description and "seed 4" in document.description


def test_verdicts():
    def said(**ratios):
        return verdict({float(key[1:]): value for key, value in ratios.items()}, 0.5, 1.0)

    assert said(_1=1.2, _2=0.99, _3=0.7, _4=0.4) == "Take decay=3: ratio 0.7."
    assert "more than 2" in said(_1=3.0, _2=1.2)
    assert "less than 1" in said(_1=0.3, _2=0.1)
    assert "between 1 and 2" in said(_1=1.5, _2=0.1)


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        ("sdgp", [], "'sdgp' has no decay"),
        ("sste", [], "'sste' has no decay"),
        ("dense", [], "'dense' has no decay"),
        ("srste", ["sparsity.rule=random"], "draws masks at random"),
        ("srste", ["--steps", "7"], "steps=7: the training has 6 optimizer steps only"),
        ("srste", ["--steps", "1"], "steps=1: masks are kept for 1 steps"),
        ("srste", ["--decays", "-1"], "'-1' is not a finite number >= 0"),
        ("srste", ["--ratio", "0.9", "0.5"], "--ratio 0.9 0.5: give two numbers"),
        ("srste", ["--steps", "0"], "--steps"),
    ],
)
def test_bad_input(write_config, tmp_path, capsys, strategy, options, words):
    changes = [f"{key}={value}" for key, value in LOADER.items()]
    changes += [option for option in options if "=" in option]
    options = [option for option in options if "=" not in option] or ["--steps", "6"]
    with pytest.raises(SystemExit) as done:
        main(
            ["decay", write_config(strategy), *options, "--out", str(tmp_path / "out")]
            + ["--cfg-options", *changes]
        )
    assert done.value.code == 2 and words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
