"""Reading grids: what is inherited, what is refused, and the configs that come out."""

from pathlib import Path

import pytest
from mmengine.config import Config

from fst.lab.ablation.grid import load_grid
from fst.lab.ablation.runs import as_text, make_runs
from fst.training.engine.config import load_config, read_sparsity, set_epochs

GRIDS = Path(__file__).resolve().parents[3] / "configs" / "ablation"
DENSE = {"sparsity": {"strategy": "dense"}}


def test_extends_merges_settings_by_name_and_key(write_grid):
    write_grid("parent.yaml", base=None, settings={"a": {"label": "A", "note": "n"}, "b": {}})
    path = write_grid(extends="parent.yaml", settings={"a": {"label": "AA"}, "c": DENSE})
    grid = load_grid(path)
    assert list(grid.settings) == ["a", "b", "c"]
    assert (grid.settings["a"].label, grid.settings["a"].note) == ("AA", "n")
    assert grid.settings["b"].base == path.parent / "base.py"
    assert grid.settings["c"].sparsity == {"strategy": "dense"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"seed": [0]}, "'seed' is no key. Did you mean 'seeds'"),
        ({"settings": {"a": {"sparsty": {}}}}, "'sparsty' is no key. Did you mean 'sparsity'"),
        ({"settings": {}}, "settings={} is missing or empty"),
        ({"settings": {"a/b": DENSE}}, "the name becomes a folder"),
        ({"seeds": [0, 0]}, "must be different integers"),
        ({"seeds": [0, -1]}, "must be different integers of 0 or more"),
        ({"seeds": [True]}, r"seeds=\[True\]: Expected `int`"),
        ({"seeds": 3}, "seeds=3: Expected `array`"),
        ({"epochs": 0}, "epochs=0: Expected `int` >= 1"),
        ({"title": None}, "title=None is missing"),
        ({"metrics": {}}, "metrics={} is missing or empty"),
        ({"metrics": {"x": {"scale": "100"}}}, "metrics.x: scale='100': Expected `float`"),
        ({"baseline": "dens"}, "'dens' is no such setting. Did you mean 'dense'"),
        ({"settings": {"a": {**DENSE, "published": {"P": 1}}}}, "'P' is no column"),
        ({"settings": {"a": {**DENSE, "published": 1}}}, "must name its column"),
        (
            {"published": {"P": {"same_data": True}}},
            "published.P: .*missing .* `source`",
        ),
        ({"settings": {"a": {"start_from": "b"}, "b": {}}}, "start_from='b' is no such setting"),
        ({"extends": "grid.yaml"}, "leads back to the file itself"),
        ({"baseline": ["a"]}, r"grid.yaml: baseline=\['a'\]: Expected `str"),
        (
            {"settings": {"a": {"start_from": ["b"]}}},
            r"settings.a: start_from=\['b'\]: Expected `str",
        ),
    ],
)
def test_bad_grids_are_refused(write_grid, keys, message):
    with pytest.raises(ValueError, match=message):
        load_grid(write_grid(**keys))


def test_deep_nesting_is_an_error_of_one_line(tmp_path):
    (tmp_path / "deep.yaml").write_text("a: " + "[" * 50_000)
    with pytest.raises(ValueError, match="deep.yaml is no valid YAML: [^\n]*$"):
        load_grid(tmp_path / "deep.yaml")


def test_missing_files_are_named(write_grid):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_grid(write_grid(extends="nowhere.yaml"))
    with pytest.raises(ValueError, match="setting 'dense': config '.*nowhere.py' does not exist"):
        make_runs(load_grid(write_grid(base="nowhere.py")), ["dense"], [0])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"sparsity": {"strategy": "fts"}}, "setting 'a'.*'fts' is unknown. Did you mean 'fst'"),
        ({"sparsity": {"strategy": "fst", "k": 2}}, "has no option 'k'"),
        ({"options": {"trian_cfg.max_epochs": 2}}, "trian_cfg.*train_cfg"),
        ({"options": {"train_cfg.max_epochs": 0}}, "max_epochs=0 must be an integer >= 1"),
        ({"options": {"param_scheduler.7.end": 2}}, "setting 'a'"),
        ({"options": {"model.architecture.width": "wide"}}, "setting 'a'.*'digits_net'"),
        ({"options": {"model.architecture.depth": 2}}, "setting 'a'.*'depth'"),
        (
            {"options": {"randomness.seed": 7}},
            "a seed or a work_dir is not for options; use --seeds",
        ),
        ({"options": {"randomness": {"seed": 7}}}, "a seed or a work_dir is not for options"),
        ({"options": {"work_dir": "x"}}, "a seed or a work_dir is not for options"),
    ],
)
def test_configs_are_checked_before_anything_runs(write_grid, setting, message):
    grid = load_grid(write_grid(settings={"a": setting}))
    with pytest.raises(ValueError, match=message):
        make_runs(grid, ["a"], [0])


def test_the_config_of_a_run(write_grid, tmp_path):
    """`sparsity` replaces the base's (phase=1 is gone), options change, the file stands alone."""
    options = {"optim_wrapper.optimizer.lr": 0.5, "param_scheduler.0.T_max": 3}
    settings = {"a": {"sparsity": {"strategy": "fst"}, "options": options}, "b": {}}
    grid = load_grid(write_grid(settings=settings, options={"train_cfg.max_epochs": 3}))
    a, b = make_runs(grid, ["a", "b"], [5])
    (tmp_path / "alone.py").write_text(as_text(a.config))
    config = load_config(str(tmp_path / "alone.py"))
    assert config.sparsity == {"strategy": "fst"}
    assert config.optim_wrapper.optimizer.lr == 0.5
    assert config.param_scheduler[0].T_max == 3
    assert config.randomness.seed == 5
    assert config.val_evaluator.topk == (1,)
    assert (a.epochs, b.epochs) == ("3", "3")
    assert b.config.sparsity == {"strategy": "fst", "phase": 1}


def test_sparsity_of_a_config(write_grid, tmp_path):
    """`sparsity` may name a config; options change what comes from there."""
    (tmp_path / "system.py").write_text('sparsity = dict(strategy="rigl", interval=7)\n')
    (tmp_path / "none.py").write_text("work_dir = None\n")
    rigl = {"sparsity": "system.py", "options": {"sparsity.alpha": 0.1}}
    grid = load_grid(write_grid(settings={"rigl": rigl}))
    assert grid.settings["rigl"].sparsity == {"strategy": "rigl", "interval": 7}
    (run,) = make_runs(grid, ["rigl"], [0])
    assert run.config.sparsity == {"strategy": "rigl", "interval": 7, "alpha": 0.1}
    with pytest.raises(ValueError, match="none.py.* has no sparsity"):
        load_grid(write_grid(settings={"a": {"sparsity": "none.py"}}))
    with pytest.raises(FileNotFoundError, match="nowhere.py"):
        load_grid(write_grid(settings={"a": {"sparsity": "nowhere.py"}}))


def test_a_run_comes_after_the_one_it_starts_from(write_grid):
    settings = {"a": DENSE, "b": {"start_from": "a"}, "other": DENSE, "c": {"start_from": "b"}}
    grid = load_grid(write_grid(settings=settings))
    assert grid.select(["c"]) == ["a", "b", "c"] and grid.select(None) == list(settings)
    runs = make_runs(grid, grid.select(["c"]), [0])
    assert [(r.setting, r.epochs) for r in runs] == [("a", "1"), ("b", "1 + 1"), ("c", "1 + 1 + 1")]


def test_epochs_stretch_the_schedules_that_last_to_the_end():
    warmup, cosine = {"type": "LinearLR", "end": 2}, {"begin": 2, "end": 8, "T_max": 6}
    iterations = {"by_epoch": False, "end": 500}
    schedulers = [warmup, cosine, dict(iterations)]
    config = Config({"train_cfg": {"max_epochs": 8}, "param_scheduler": schedulers})
    set_epochs(config, 5)
    assert config.train_cfg.max_epochs == 5
    assert config.param_scheduler[0].end == 2
    assert config.param_scheduler[1] == {"begin": 2, "end": 5, "T_max": 3}
    assert config.param_scheduler[2] == iterations
    with pytest.raises(ValueError, match="epochs=2 must be at least"):
        set_epochs(config, 2)


def test_epochs_need_a_loop_that_counts_them():
    with pytest.raises(ValueError, match="needs a train_cfg that has max_epochs"):
        set_epochs(Config({"train_cfg": {"max_iters": 8}}), 5)


TRIALS = ("weight_gradient", "equal_time", "frontier")
OF_NO_PAPER = {f"{data}_{trial}" for data in ("cifar10", "imagenette", "bccd") for trial in TRIALS}
OF_NO_PAPER |= {
    "cifar10_dense_last",
    "cifar10_equal_time_wide",
    "cifar10_subset_vit",
    "cifar10_subset_convnext",
}
OF_NO_PAPER |= {f"{name}_choices" for name in OF_NO_PAPER}
OF_NO_PAPER |= {"cifar10_subset_since_2021", "cifar10_subset_vit_since_2021"}


@pytest.mark.parametrize("path", sorted(GRIDS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_grids_load(path):
    grid = load_grid(path)
    if path.stem in OF_NO_PAPER:
        return
    assert grid.published and any(s.published for s in grid.settings.values())


def test_a_grid_of_the_package():
    grid = load_grid("fst::configs/ablation/digits_table1")
    assert grid.path.name == "digits_table1.yaml" and grid.settings


@pytest.mark.parametrize("path", sorted(GRIDS.glob("digits_*.yaml")), ids=lambda path: path.stem)
def test_shipped_digits_grids_are_valid(path):
    grid = load_grid(path)
    assert len(grid.seeds) >= 2
    make_runs(grid, grid.select(None), grid.seeds)


def test_no_grid_is_missing():
    tables = ("table1", "table3", "table5", "sdgp_table", "sdgp_figure8")
    data = ("digits", "cifar10", "imagenet")
    wanted = {f"{d}_{t}" for d in data for t in tables}
    wanted |= {f"cifar10_subset_{t}" for t in ("table1", "table5", "learning_rates")}
    assert wanted <= {p.stem for p in GRIDS.glob("*.yaml")}


@pytest.mark.parametrize("table", ["sdgp_figure8", "sdgp_table"])
def test_imagenet_grids_of_sdgp_have_the_published_networks(table):
    """Pruned networks are blurred and drawn anew, the dense ResNet-18 is torchvision's."""
    for name, setting in load_grid(GRIDS / f"imagenet_{table}.yaml").settings.items():
        model = Config.fromfile(setting.base).model
        published = (model.get("blur_pool", False), model.get("initialisation"))
        assert published == ((False, None) if name == "dense" else (True, "kaiming_uniform")), name


def test_learning_rates_of_a_grid():
    grid = load_grid(GRIDS / "cifar10_subset_learning_rates.yaml")
    rates = [s.options["optim_wrapper.optimizer.lr"] for s in grid.settings.values()]
    assert rates == [0.05, 0.1, 0.2] * 3
    assert [s.sparsity["strategy"] for s in grid.settings.values()] == [
        name for name in ("dense", "fst_w", "fst") for _ in range(3)
    ]
    assert all(name.endswith(f"_{rate}") for name, rate in zip(grid.settings, rates, strict=True))


@pytest.mark.parametrize("data", ["cifar10", "imagenet"])
def test_table3_agrees_with_the_recipes(data):
    """A system is the same in the grid, in its own file and in the grid of the digits, but for
    what has to happen more often there and for shortcuts that network does not have.
    """
    grid = load_grid(GRIDS / f"{data}_table3.yaml").settings
    digits = load_grid(GRIDS / "digits_table3.yaml")
    recipes = {p.stem: p for p in (GRIDS.parent / "_base_" / "systems").glob("*.py")}
    names = sorted(set(recipes) & set(grid))
    assert len(names) >= 12
    runs = {run.setting: run for run in make_runs(digits, names, [0])}
    for name in names:
        recipe = Config.fromfile(recipes[name]).sparsity
        assert grid[name].sparsity == recipe, name
        found = {k: v for k, v in runs[name].config.sparsity.items() if v is not None}
        changed = {"interval", "exclude"}
        assert {k: v for k, v in found.items() if k not in changed} == {
            k: v for k, v in recipe.items() if k not in changed
        }, name
    assert grid["prunetrain"].sparsity["interval"] == 5
    assert {name for name in grid if grid[name].start_from == "dense"} == {"asp", "asfp"}
    resnet50 = load_grid(GRIDS / "imagenet_table3_resnet50.yaml").settings["rigl"]
    assert resnet50.options == {"sparsity.end": 25000 / 32000}
    excluded = {name for name in grid if "exclude" in grid[name].sparsity}
    assert excluded == {"asfp", "clicktrain"}


@pytest.mark.parametrize("name", ["table1", "table3", "table5"])
def test_tables_of_fst_are_literal(name):
    for path in GRIDS.glob(f"*_{name}.yaml"):
        for setting in load_grid(path).settings.values():
            strategy, _ = read_sparsity({"sparsity": setting.sparsity})
            rules = strategy.output, strategy.grad_weight
            if setting.sparsity["strategy"] in ("fst", "fst_w", "wg", "wx", "gg", "gx"):
                assert rules[0].group_order == "im2col", setting.name
            assert getattr(rules[1], "pairing", "flat") == "flat", setting.name


def test_published_numbers():
    """A few, from the papers."""
    table3 = load_grid(GRIDS / "digits_table3.yaml").settings
    assert table3["fst"].published == {"ResNet-18": 71.0, "ResNet-50": 77.0}
    assert table3["meprop"].published == {"ResNet-18": 32.5}
    sdgp = load_grid(GRIDS / "cifar10_sdgp_table.yaml").settings
    assert len(sdgp) == 14
    assert sdgp["rescaled_1_8"].published == {"CIFAR-10": 94.7}
    imagenet = load_grid(GRIDS / "imagenet_sdgp_table.yaml").settings
    assert imagenet["random_2_4"].published["ImageNet"] == 67.8
