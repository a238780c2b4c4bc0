"""The sparse convolution against the float64 reference, for every strategy and option."""

import pytest
import torch
from hypothesis import given, settings

import fst
from fst.rules.alternating import Alternating
from fst.rules.nm import NM
from fst.rules.strategy import Strategy
from tests.cases import (
    CASES,
    RANDOMS,
    TOLERANCE,
    Case,
    Operands,
    case,
    error,
    random_case,
    read_draws,
    run,
    without_onednn,
)
from tests.oracle.conv import reference_conv2d, reference_operands
from tests.strategy_settings import DEFAULTS, GEMMS, SETTINGS, Setting, rows_and_shapes, setting

NAMES = ("output", "grad_input", "grad_weight", "grad_bias")
# Odd sizes, groups with a stride, everything at once, and more channels than any M.
HARD = [case(id) for id in ("odd_nhwc", "grouped_stride2", "mixed", "wide_channels")]
# Maps without pairs in one direction or both.
TINY = [case(id) for id in ("width_1", "height_1", "single_position")]
ALTERNATING = [row for row in SETTINGS if isinstance(row.build().grad_weight, Alternating)]


def _reference(strategy, the_case, operands, draws=None):
    return reference_conv2d(
        operands.input,
        operands.weight,
        operands.grad_output,
        bias=operands.bias,
        **the_case.arguments,
        strategy=strategy,
        draws=draws,
    )


def _assert_equal_to_reference(row, the_case, operands, limit=1e-10):
    strategy = row.build()
    actual = run(the_case, operands, strategy)
    draws = read_draws(row, the_case, operands)
    generator = torch.Generator().manual_seed(0)  # as in `run`
    draws["start"] = torch.rand((), generator=generator, dtype=torch.float64)
    phases = (0, 1) if row.random_phase else (0,)
    errors = []
    for phase in phases:
        expected = _reference(strategy, the_case, operands, {**draws, "phase": phase})
        for name, a, e in zip(NAMES, actual, expected, strict=True):
            assert (a is None) == (e is None), name
        errors.append(
            {
                name: error(a, e)
                for name, a, e in zip(NAMES, actual, expected, strict=True)
                if a is not None
            }
        )
    best = min(errors, key=lambda e: e["grad_weight"])
    assert all(value <= limit for value in best.values()), f"{best} ({row.id}, {the_case})"


# Output channels that are a multiple of four, in each group (4 of 12) and only in all (6 of 12).
GROUPED = [case(id) for id in ("depthwise_multiplier", "kernel_1x7_grouped")]
NARROW = {torch.float32: 1e-5, torch.bfloat16: 0.02}  # dtype -> largest relative error
DRAWN_NOWHERE = [row for row in DEFAULTS if row.deterministic and not row.build().sampling]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("the_case", [*HARD, *GROUPED])
@pytest.mark.parametrize("row", DRAWN_NOWHERE)
def test_equals_reference_in_narrow_types(row, the_case, dtype):
    """On rounded operands, which the reference multiplies in float64.

    Only in these types 2:4 weights are chosen four at a time, for both directions from one read.
    """
    with fst.backends.force(prune_weight="torch"):
        _assert_equal_to_reference(row, the_case, the_case.operands(dtype), NARROW[dtype])


@pytest.mark.parametrize(
    ("row", "the_case"),
    rows_and_shapes([row for row in SETTINGS if row not in ALTERNATING], CASES, HARD, HARD[-1])
    + rows_and_shapes(ALTERNATING, CASES, HARD + TINY, HARD[-1]),
)
def test_equals_reference(row, the_case):
    _assert_equal_to_reference(row, the_case, the_case.operands())


@pytest.mark.parametrize("row", [row for row in SETTINGS if row.drawn])
def test_drawn_masks_have_the_pattern(row):
    """What the probes read off are masks of the pattern, along the reduction axis."""
    the_case = case("grouped_stride2")
    operands = the_case.operands()
    draws = read_draws(row, the_case, operands)
    assert set(draws) == set(row.drawn)
    for gemm, mask in draws.items():
        rule = row.build().rule(gemm)
        if gemm == "output":
            lines = mask.movedim(1, -1)
        elif gemm == "grad_input":
            lines = mask.unflatten(1, (the_case.groups, -1)).movedim(2, -1)
        elif rule.operand == "grad_output":
            lines = mask.flatten(2)
        else:
            lines = mask[:, 4::9]  # the kernel's centre, the only rows that never touch the padding
        for group in lines.reshape(-1, lines.shape[-1]).split(rule.m, dim=1):
            kept = group.sum(1)
            if gemm == "output" and row.name == "tsm":
                assert (kept <= rule.n).all()
            else:
                assert (kept == min(rule.n, group.shape[1])).all()


@pytest.mark.parametrize("the_case", [case("basic"), case("odd_nhwc"), case("kernel_1x1")])
@pytest.mark.parametrize("name", ["fst", "wx-alternating", "gx-alternating"])
def test_random_phase_uses_both_phases(name, the_case):
    row = setting(name)
    strategy = row.build(phase="random")
    operands = the_case.operands()
    seen = set()
    for seed in range(12):
        grad_weight = run(the_case, operands, strategy, seed)[2]
        for phase in (0, 1):
            expected = _reference(row.build(phase=phase), the_case, operands).grad_weight
            if error(grad_weight, expected) < 1e-10:
                seen.add(phase)
                break
        else:
            pytest.fail(f"seed {seed}: neither phase 0 nor phase 1")
    assert seen == {0, 1}


@pytest.mark.parametrize("the_case", [case("basic"), case("odd_nhwc"), case("depthwise")])
@pytest.mark.parametrize("row", [row for row in SETTINGS if not row.deterministic])
def test_random_strategies_follow_the_generator(row, the_case):
    operands = the_case.operands()
    first, same = (run(the_case, operands, row.build(), seed=3) for _ in range(2))
    for a, b in zip(first, same, strict=True):
        assert a is b is None or torch.equal(a, b)


MANY_SAMPLES = Case("many_samples", (8, 8), (6, 6), padding=1, batch=64)


@pytest.mark.parametrize(
    "the_case", [case("basic"), case("odd_nhwc"), case("depthwise"), MANY_SAMPLES]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sorted_columns_of_some_samples_at_a_time(the_case, dtype, monkeypatch):
    """As on a CPU's large layers, whose columns do not fit into its cache."""
    operands = the_case.operands(dtype)
    whole = run(the_case, operands, setting("wx").build())[2]
    monkeypatch.setattr(fst.rules.masks, "CPU_PART", 1)
    expected = _reference(setting("wx").build(), the_case, operands).grad_weight
    parts = run(the_case, operands, setting("wx").build())[2]
    assert error(parts, expected) <= max(1e-12, 2 * error(whole, expected))


@pytest.mark.parametrize("operand", ["input", "grad_output"])
def test_a_draw_does_not_depend_on_the_cache(operand, monkeypatch):
    """Masks are drawn for all samples at once, however many of them a cache holds."""
    operands = MANY_SAMPLES.operands()
    strategy = Strategy("drawn", grad_weight=NM(operand, rule="random"))
    whole = run(MANY_SAMPLES, operands, strategy, seed=3)[2]
    monkeypatch.setattr(fst.rules.masks, "CPU_PART", 1)
    assert torch.equal(run(MANY_SAMPLES, operands, strategy, seed=3)[2], whole)


# ---------------------------------------------------------------- dense, bit for bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("the_case", CASES)
def test_dense_is_torch_bit_for_bit(the_case, dtype):
    operands = the_case.operands(dtype)
    actual, expected = (run(the_case, operands, strategy) for strategy in ("dense", None))
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        assert a is e is None or (torch.equal(a, e) and a.dtype == e.dtype), name
        assert a is e is None or a.stride() == e.stride(), name


FOR_DENSE = [case(id) for id in ("basic", "odd_nhwc", "depthwise")]
HARD_FOR_DENSE = [case(id) for id in ("kernel_1x1_stride2", "wide_channels")]


@pytest.mark.parametrize(
    ("row", "the_case"),
    rows_and_shapes(SETTINGS, FOR_DENSE + HARD_FOR_DENSE, HARD_FOR_DENSE, HARD_FOR_DENSE[-1]),
)
def test_unpruned_gemms_are_dense_bit_for_bit(row, the_case):
    """The table's ``dense`` column, and that everything else really is pruned."""
    operands = the_case.operands(torch.float32)
    if operands.bias is None:
        operands.bias = torch.randn(the_case.channels[1])
    actual, expected = (run(the_case, operands, s) for s in (row.build(), None))
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        if name in row.dense:
            assert torch.equal(a, e), name
        elif name == "grad_bias":
            torch.testing.assert_close(a, e)
        elif the_case.id == "wide_channels":
            assert not torch.equal(a, e), f"{name} is not pruned"


PRECISION = (
    Case("precision", (16, 24), (12, 13), padding=1, batch=4, bias=True),
    Case("precision_nhwc", (16, 24), (12, 13), stride=2, padding=1, batch=4, channels_last=True),
)
PRECISION_ROWS = (
    "dense srste fst fst-phase1 fst-flat fst-block2x2 fst-norestore fst_w sdgp sdgp-magnitude "
    "sdgp-group sdgp-channel wg gg wx gx tsm"
).split()


def _same_dtype_torch(strategy, the_case, operands, dtype):
    """torch's own three GEMMs in ``dtype`` on the operands as the reference prunes them."""
    pruned = reference_operands(
        operands.input,
        operands.weight,
        operands.grad_output,
        **the_case.arguments,
        strategy=strategy,
    )
    pruned = type(pruned)(*(t.to(dtype) for t in pruned))
    whole = the_case.operands(dtype)
    whole.weight = pruned.output_weight
    output = run(the_case, whole, None)[0]
    whole.weight, whole.grad_output = pruned.grad_input_weight, pruned.grad_input_grad_output
    grad_input = run(the_case, whole, None)[1]
    kept = pruned.grad_weight_columns != 0
    if isinstance(strategy.grad_weight, NM) and strategy.grad_weight.operand == "input":
        rows = pruned.grad_weight_grad_output.flatten(2).movedim(1, 0).flatten(1)
        columns = pruned.grad_weight_columns.movedim(1, 0).flatten(1)
        grad_weight = (rows @ columns.T).reshape(operands.weight.shape)
    else:
        grads = pruned.grad_weight_grad_output
        if isinstance(strategy.grad_weight, Alternating):  # S(Xᵀ) drops positions: so may dY
            grads = grads * kept.any(0).any(0).reshape(grads.shape[2:])
        whole.weight, whole.grad_output = pruned.output_weight, grads
        grad_weight = run(the_case, whole, None)[2]
    if strategy.gradient_decay:
        decay = strategy.decay * (operands.weight - pruned.output_weight)
        grad_weight = grad_weight + decay.to(dtype)
    return output, grad_input, grad_weight, run(the_case, operands, None)[3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("the_case", PRECISION)
@pytest.mark.parametrize("name", PRECISION_ROWS)
def test_error_at_most_twice_that_of_torch(name, the_case, dtype):
    strategy = setting(name).build()
    operands = the_case.operands(dtype)
    expected = _reference(strategy, the_case, operands)
    actual = run(the_case, operands, strategy)
    by_torch = _same_dtype_torch(strategy, the_case, operands, dtype)
    for which, a, t, e in zip(NAMES, actual, by_torch, expected, strict=True):
        if e is None:
            continue
        assert a.dtype == dtype
        assert error(a, e) <= 2 * error(t, e), f"{which}: {error(a, e)} against {error(t, e)}"


LAYOUTS = ("contiguous", "channels_last", "strided", "transposed", "expanded")
PAIRINGS = [
    *(
        dict(pairing=pairing, phase=phase, restore=restore)
        for pairing in ("row", "flat")
        for phase in (0, 1)
        for restore in (True, False)
    ),
    *(dict(block=(2, 2)), dict(block=(2, 2), restore=False)),
]


def _in_layout(tensor, layout):
    """The values of ``tensor`` in another memory layout; "expanded" repeats the first sample."""
    if tensor.dim() < 4 or layout == "contiguous":
        return tensor
    if layout == "channels_last":
        return tensor.contiguous(memory_format=torch.channels_last)
    if layout == "strided":
        return torch.stack([tensor, -tensor], dim=4)[..., 0]
    if layout == "transposed":
        return tensor.mT.contiguous().mT
    return tensor[:1].expand_as(tensor)


def _random_row(draw):
    """A row of the table, or options of fst or sdgp that no row may have together."""
    if draw.random() < 0.5:
        return draw.choice(SETTINGS)
    n, m = draw.choice(((2, 4), (1, 4), (3, 5), (4, 8)))
    if draw.random() < 0.5:
        order = draw.choice(("channel", "im2col"))
        options = dict(group_order=order, decay=0.1, **draw.choice(PAIRINGS))
        return Setting("any", "fst", dict(n=n, m=m, **options))
    rescale = draw.choice((None, "sample_channel", "channel", "group"))
    rule = "magnitude" if rescale is None else "magnitude_rescaled"
    return Setting("any", "sdgp", dict(n=n, m=m, rule=rule, rescale=rescale))


@settings(max_examples=150)
@given(RANDOMS)
def test_random_calls(draw):
    the_case, row = random_case(draw), _random_row(draw)
    # what a rule draws can be read off in float64 alone
    dtype = torch.float64 if row.drawn else draw.choice(tuple(TOLERANCE))
    torch.manual_seed(draw.getrandbits(32))
    made = {
        name: None if value is None else _in_layout(torch.randn_like(value), draw.choice(LAYOUTS))
        for name, value in vars(the_case.operands(dtype)).items()
    }
    # Probabilities are in units of 2⁻³¹, and the last bit of a score may move one by a unit.
    allowed = max(TOLERANCE[dtype], 1e-8 if row.build().sampling else 0.0)
    with without_onednn(dtype.itemsize == 2 or the_case.is_narrow):
        _assert_equal_to_reference(row, the_case, Operands(**made), allowed)


def _assert_strategy_equals_reference(strategy, the_case):
    operands = the_case.operands()
    actual = run(the_case, operands, strategy)
    expected = _reference(strategy, the_case, operands)
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        assert a is e is None or error(a, e) <= 1e-10, (name, str(strategy))


@pytest.mark.parametrize(
    "options",
    [{}, dict(phase=1), dict(pairing="flat"), dict(block=(2, 2)), dict(restore=False)],
    ids=str,
)
def test_windows_that_lie_wholly_in_the_padding(options):
    """`F.conv2d` takes them: of a 1x1 kernel that is kept positions without any input."""
    strategy = fst.get_strategy("fst", **options)
    for size, kernel, stride, padding in (
        ((6, 2), (1, 1), 5, 2),
        ((2, 3), (1, 1), (4, 1), (3, 5)),
        ((1, 1), (1, 1), 1, 4),
        ((3, 2), (2, 1), (1, 4), (5, 3)),
    ):
        padded = Case("padded", (3, 8), size, kernel, stride, padding, bias=True)
        _assert_strategy_equals_reference(strategy, padded)


def test_every_rule_combination_of_operands():
    """Each operand that a GEMM may prune, with each other, in one call."""
    the_case = case("odd_nhwc")
    rules = {
        "output": [None, NM("weight", 1, 2), NM("weight", 2, 4, group_order="im2col")],
        "grad_input": [None, NM("weight", 1, 4), NM("grad_output", 2, 4)],
        "grad_weight": [None, NM("grad_output"), NM("input", 1, 4), Alternating()],
    }
    assert tuple(rules) == GEMMS
    for output in rules["output"]:
        for grad_input in rules["grad_input"]:
            for grad_weight in rules["grad_weight"]:
                strategy = Strategy("combined", output, grad_input, grad_weight)
                _assert_strategy_equals_reference(strategy, the_case)
