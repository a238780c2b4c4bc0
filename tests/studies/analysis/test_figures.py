"""Numbers behind the figures: similarity, gradient maps, overhead, runtime, time to accuracy."""

import json

import pytest
import torch
from torch import nn

import fst
from fst.ops.reference import reference_im2col
from fst.studies.analysis.gradients import RULES, rule_effects
from fst.studies.analysis.overhead import pruning_functions
from fst.studies.analysis.record import record_step
from fst.studies.analysis.runtime import gemm_shares, layer_runtimes, totals
from fst.studies.analysis.similarity import (
    adjacent_difference,
    layer_similarity,
    neighbours,
    patch_grid,
    reconstruction,
)
from fst.studies.analysis.time_to_accuracy import (
    EQUAL_SHARES,
    Pace,
    TimedCurve,
    projected,
    projection_factor,
    read_pace,
    simulated_densities,
)


def net():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, padding_mode="replicate"),
        nn.ReLU(),
        nn.Conv2d(8, 6, 1),
    ).double()


@pytest.fixture
def records():
    model = net()
    images = torch.randn(2, 4, 9, 11, dtype=torch.float64)
    return record_step(model, lambda: model(images).pow(2).sum()).layers


def test_difference_and_reconstruction():
    row = torch.tensor([[1.0, 4.0, 9.0, 16.0, 25.0]])
    assert adjacent_difference(row).tolist() == [[-3, -5, -7, -9]]
    assert reconstruction(row).tolist() == [[1, 1, 9, 9, 25]]
    assert reconstruction(row[:, :4]).tolist() == [[1, 1, 9, 9]]


@pytest.mark.parametrize("name", ["0", "2", "4"])
def test_similarity_follows_the_literal_form(records, name):
    """Eq. 7, 9 and 10 with explicit columns; the pairs of an odd width leave the last one alone."""
    record = records[name]
    layer, call = record.layer, record.calls[0]
    found = layer_similarity(record)
    input, padding = call.input, layer.padding
    if layer.padding_mode != "zeros":
        input = nn.functional.pad(input, (1, 1, 1, 1), mode=layer.padding_mode)
        padding = (0, 0)
    columns = reference_im2col(input, layer.kernel_size, layer.stride, padding, (1, 1))
    height, width = call.grad_output.shape[2:]
    columns = columns.reshape(len(input), -1, height, width).double()
    restored, dropped = columns.clone(), columns.clone()
    for column in range(1, width, 2):
        restored[..., column] = columns[..., column - 1]
        dropped[..., column] = 0
    exact = torch.einsum("nopq,nkpq->ok", call.grad_output, columns)

    def error(a, b):
        return float((a - b).norm() / b.norm())

    assert found.reconstruction == pytest.approx(error(restored, columns))
    for value, matrix in ((found.restored, restored), (found.dropped, dropped)):
        product = torch.einsum("nopq,nkpq->ok", call.grad_output, matrix)
        assert value == pytest.approx(error(product, exact), rel=1e-6)
    x = call.input
    difference = (x[..., :-1] - x[..., 1:]).abs().mean() / (x.max() - x.min())
    assert found.difference == pytest.approx(float(difference))


def test_similarity_of_a_frozen_layer(records):
    records["2"].layer.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="frozen"):
        layer_similarity(records["2"])


def test_rule_effects(records):
    effects = rule_effects(records["2"], generator=torch.Generator().manual_seed(0))
    assert tuple(effects) == RULES
    record = records["2"]
    dense = record.calls[0].grad_output
    assert effects["dense"].maps is dense
    assert effects["dense"].grad_input == pytest.approx((0, 1, 1), abs=1e-12)
    for rule in RULES[1:]:
        maps = effects[rule].maps
        assert (maps.unflatten(1, (2, 4)) != 0).sum(2).max() <= 2
        assert effects[rule].zeros == pytest.approx(float((maps == 0).double().mean()))
        assert effects[rule].l1 == pytest.approx(float(maps.abs().sum() / dense.abs().sum()))
        x = record.calls[0].input.clone().requires_grad_()
        wanted = torch.autograd.grad(nn.Conv2d.forward(record.layer, x), x, maps)[0]
        error = (wanted - record.calls[0].grad_input).norm() / record.calls[0].grad_input.norm()
        assert effects[rule].grad_input.relative == pytest.approx(float(error))
    l1 = {rule: effects[rule].l1 for rule in RULES}
    assert l1["magnitude_rescaled"] == pytest.approx(1) and l1["random"] < l1["magnitude"] < 1
    assert rule_effects(records["0"])["magnitude"].grad_input is None


def test_pruning_functions_run_what_they_say(records, monkeypatch):
    seen = []
    from fst.studies.analysis import overhead

    for name in ("prune_weight", "prune_grad_output"):
        real = getattr(overhead, name)
        monkeypatch.setattr(
            overhead, name, lambda *a, real=real, name=name: (seen.append(name), real(*a))[1]
        )
    functions = pruning_functions(records)
    counts = {}
    for name, function in functions.items():
        seen.clear()
        function()
        counts[name] = len(seen)
    assert counts["S(W)"] == 3 and counts["S(Wᵀ)"] == 2  # the first layer has no grad_input
    assert counts["S(dY) for grad_input"] == 2 and counts["S(dY) for grad_weight"] == 3
    assert len(functions) == 8


REPORT = {
    "layers": [
        {
            "layer": layer,
            "count": count,
            "times": {
                gemm: {"torch": {"median": t}, "fst": {"median": t / 2}}
                for gemm, t in zip(("output", "grad_input", "grad_weight"), times, strict=True)
            },
        }
        for layer, count, times in (("a", 2, (1.0, 2.0, 3.0)), ("b", 1, (4.0, 0.0, 2.0)))
    ]
}


def test_runtime_of_a_report():
    layers = layer_runtimes(REPORT)
    assert layers[0].times["fst"] == {"output": 0.5, "grad_input": 1.0, "grad_weight": 1.5}
    assert totals(layers) == {"output": 6.0, "grad_input": 4.0, "grad_weight": 8.0}
    shares = gemm_shares(REPORT)
    assert shares == pytest.approx({"output": 6 / 18, "grad_input": 4 / 18, "grad_weight": 8 / 18})
    with_step = {**REPORT, "steps": {"step": {"torch": {"median": 40.0}}}}
    assert gemm_shares(with_step)["grad_weight"] == pytest.approx(0.2)
    for broken, message in (({}, "KeyError 'layers'"), ({"layers": []}, "--no-layers")):
        with pytest.raises(ValueError, match=message):
            layer_runtimes(broken)


def test_projection_is_sdgps():
    """The paper's own numbers: 33.17 % of the time is grad_input."""
    shares = {"output": 0.3, "grad_input": 0.3317, "grad_weight": 0.3}
    for n, m, saved in ((2, 4, 0.166), (2, 8, 0.249)):
        densities = simulated_densities(fst.get_strategy("sdgp", n=n, m=m))
        assert densities == {"grad_input": n / m}
        assert 1 - projection_factor(densities, shares) == pytest.approx(saved, abs=5e-4)
    fst_all = simulated_densities(fst.get_strategy("fst"))
    assert fst_all == {"output": 0.5, "grad_input": 0.5}  # grad_weight is accelerated: measured
    assert projection_factor(fst_all, EQUAL_SHARES) == pytest.approx(2 / 3)
    assert simulated_densities(None) == simulated_densities(fst.get_strategy("dense")) == {}
    assert simulated_densities(fst.get_strategy("sdgp", n=4, m=4)) == {}
    sampled = {"layer": {"rule": "sampled", "keep": 4}}
    assert simulated_densities(fst.get_strategy("fst"), sampled) == fst_all
    with pytest.raises(ValueError, match="plan, layer 'layer'.*strategy 'wx'"):
        simulated_densities(fst.get_strategy("wx"), sampled)
    curve = TimedCurve("a", "measured", (10.0, 20.0, 30.0), (1.0, 5.0, 4.0))
    half = projected(curve, 0.5)
    assert (half.kind, half.seconds, half.values) == ("projected", (5.0, 10.0, 15.0), curve.values)
    assert curve.time_to(2.0) == 20.0 and half.time_to(5.0) == 10.0 and curve.time_to(6.0) is None


def test_time_up_to_a_step():
    pace = Pace((10, 20), (1.0, 2.0))
    assert pace.seconds_at([5, 10, 15, 20, 30]) == [5.0, 10.0, 20.0, 30.0, 50.0]
    assert Pace((10, 20), (1.0, 2.0), 10).seconds_at([1, 2]) == [10.0, 30.0]


def write_log(folder, name, lines):
    path = folder / name / "vis_data" / "scalars.json"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n" + '{"cut of')


def test_timing_is_read_from_logs(tmp_path):
    """100 iterations per epoch, logged every 40; the resumed run overrides iteration 140."""
    write_log(
        tmp_path,
        "1",
        [
            {"iter": 40, "epoch": 1, "time": 0.1, "step": 40},
            {"iter": 80, "epoch": 1, "time": 0.1, "step": 80},
            {"accuracy/top1": 3.0, "time": 9.0, "step": 1},
            {"iter": 140, "epoch": 2, "time": 5.0, "step": 140},
        ],
    )
    write_log(tmp_path, "2", [{"iter": 140, "epoch": 2, "time": 0.2, "step": 140}])
    pace = read_pace(tmp_path, by_epoch=True)
    assert pace == Pace((40, 80, 140), (0.1, 0.1, 0.2), 100)
    assert pace.seconds_at([1, 2]) == pytest.approx([8 + 20 * 0.2, 8 + 120 * 0.2])
    assert read_pace(tmp_path, by_epoch=False).per_epoch is None
    with pytest.raises(ValueError, match="no time per iteration"):
        read_pace(tmp_path / "1", by_epoch=True)


def test_neighbours_against_any_two_positions():
    """Literally, over all pairs; tokens as pixels once the class token is left out."""
    torch.manual_seed(0)
    maps = torch.randn(2, 3, 4, 4).cumsum(3).double()
    flat = maps.flatten(2)
    pairs = [(i, j) for i in range(16) for j in range(i)]
    any_two = torch.stack([(flat[..., i] - flat[..., j]).abs() for i, j in pairs]).mean()
    found = neighbours(maps)
    assert found.positions == "4x4" and found.rows < found.columns
    rows = (maps[..., 1:] - maps[..., :-1]).abs().mean() / any_two
    columns = (maps[:, :, 1:] - maps[:, :, :-1]).abs().mean() / any_two
    sequence = (flat[..., 1:] - flat[..., :-1]).abs().mean() / any_two
    expected = [float(sequence), float(rows), float(columns)]
    assert list(found[1:]) == pytest.approx(expected)
    images = maps.permute(0, 2, 3, 1)
    assert neighbours(images, channels_last=True) == found
    tokens = torch.cat([torch.full((2, 1, 3), 100.0), images.flatten(1, 2)], 1)
    with_class = neighbours(tokens, channels_last=True)
    assert with_class.positions == "17 = 1 + 4x4" and with_class.sequence != found.sequence
    assert with_class[2:] == found[2:]
    assert patch_grid(197) == (14, 1) and patch_grid(49) == (7, 0) and patch_grid(77) == (0, 0)
    assert neighbours(torch.ones(2, 3, 4, 4)) is None and neighbours(torch.ones(2, 3, 1, 1)) is None
