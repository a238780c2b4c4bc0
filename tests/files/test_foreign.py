"""Files of ONNX that other tools wrote or changed: which axis is summed, what can be checked."""

import copy

import pytest
import torch
from torch import nn

import fst
from fst.files.weights import read_stored

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class OnTokens(nn.Module):
    """A linear layer on (N, tokens, channels), which exporters write as a MatMul."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(32, 16)

    def forward(self, tokens):
        return self.l(tokens)


def pruned_along_the_outputs() -> nn.Module:
    model, weight = OnTokens(), torch.randn(32, 16).view(32, 4, 4)
    weight[..., 2:] = 0
    model.l.weight.data = weight.view(32, 16).t().contiguous()
    return model


def pruned() -> nn.Module:
    model = OnTokens()
    fst.convert(model, "srste", layers="linear")
    return fst.fold(model)


@pytest.mark.parametrize("tokens", [(2, 5, 32), (2, 32)], ids=["MatMul", "Gemm"])
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize(("build", "expected"), [(pruned, True), (pruned_along_the_outputs, False)])
def test_zeros_count_along_the_axis_that_a_node_sums(build, expected, dynamo, tokens, tmp_path):
    model = build().eval()
    path = tmp_path / "l.onnx"
    torch.onnx.export(model, (torch.randn(tokens),), path, dynamo=dynamo)
    for target in (model, path):
        assert fst.verify(target, 2, 4, include="*").ok is expected


def made_by_hand(folder, node, shape, *more):
    """A program of one product with a weight W that is 2:4 along the last axis but one."""
    weight = torch.randn(shape)
    weight.unflatten(-2, (-1, 4))[..., 2:, :] = 0
    nodes = [helper.make_node("Transpose", ["W"], ["T"], perm=[1, 0])] if "T" in node[1] else []
    nodes += [helper.make_node(node[0], node[1], ["y"], **dict(more))]
    names = [name for name in node[1] if name == "x"]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    tensors = [numpy_helper.from_array(weight.numpy(), "W")]
    graph = helper.make_graph(nodes, "g", inputs, outputs, tensors)
    onnx.save(helper.make_model(graph), folder / "m.onnx")
    return folder / "m.onnx"


@pytest.mark.parametrize(
    ("node", "attributes", "expected"),
    [
        (("MatMul", ["x", "W"]), {}, True),
        (("MatMul", ["W", "x"]), {}, False),
        (("MatMul", ["T", "x"]), {}, True),
        (("MatMul", ["x", "T"]), {}, False),
        (("Gemm", ["x", "W"]), {}, True),
        (("Gemm", ["x", "W"]), {"transB": 1}, False),
        (("Gemm", ["W", "x"]), {}, False),
        (("Gemm", ["W", "x"]), {"transA": 1}, True),
        (("Gemm", ["x", "T"]), {"transB": 1}, True),
    ],
    ids=str,
)
def test_each_operand_is_read_as_its_node_multiplies_it(node, attributes, expected, tmp_path):
    path = made_by_hand(tmp_path, node, (16, 16), *attributes.items())
    report = fst.verify(path, 2, 4, include="W")
    assert report.ok is expected and report.coverage == float(expected)


def test_transposed_convolutions_and_batches_of_matrices(tmp_path):
    model = nn.Sequential(nn.ConvTranspose2d(8, 6, 2, groups=2))
    with torch.no_grad():
        model[0].weight[2:4] = model[0].weight[6:8] = 0
    path = tmp_path / "t.onnx"
    torch.onnx.export(model.eval(), (torch.randn(1, 8, 4, 4),), path, dynamo=True)
    (row,) = fst.verify(path).layers
    assert row.ok and row.shape == (6, 4, 2, 2)
    path = made_by_hand(tmp_path, ("MatMul", ["x", "W"]), (3, 16, 8))
    (row,) = fst.verify(path, include="W").layers
    assert row.ok and row.shape == (24, 16)


class Half(nn.Module):
    """A convolution, and a much larger linear layer on its maps."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.l = nn.Conv2d(8, 8, 1), nn.Linear(64, 64)

    def forward(self, images):
        return self.l(self.c(images).flatten(2))


@pytest.mark.parametrize("writer", ["fst", "dynamo", "script"])
def test_linear_layers_on_tokens_count_in_the_coverage(writer, tmp_path):
    model, path, images = Half(), tmp_path / "c.onnx", torch.randn(1, 8, 8, 8)
    fst.convert(model, "srste")
    plain = fst.fold(model).eval()
    if writer == "fst":
        fst.export(plain, path, images)
    else:
        torch.onnx.export(plain, (images,), path, dynamo=writer == "dynamo")
    report = fst.verify(path, min_coverage=0.9)
    assert report.coverage == fst.verify(plain).coverage == 64 / (64 + 64 * 64)
    assert not report.ok
    if writer == "fst":
        assert {row.name for row in report.covered.rows} == {"c.weight", "l.weight"}


def test_equal_weights_keep_their_names(tmp_path):
    """Exporters rename both, and may keep one tensor for both."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    for layer in model[1:]:
        nn.init.zeros_(layer.weight)
    fst.convert(model, "srste", include=nn.Linear)
    fst.export(model, tmp_path / "m.onnx", torch.randn(2, 3, 16))
    report = fst.verify(tmp_path / "m.onnx")
    assert report.ok and report.coverage == 1
    assert {row.name for row in report.covered.rows} == {f"{i}.weight" for i in range(3)}


def exported(folder):
    """Two 2:4 convolutions, a 2:4 linear layer on tokens, and a dense one."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()),
        *(nn.Flatten(2), nn.Linear(16, 8), nn.Flatten(), nn.Linear(128, 8)),
    )
    fst.convert(model, "srste", include=["0", "2", "5"])
    fst.export(model, folder / "m.onnx", torch.randn(2, 8, 8, 8))
    return folder / "m.onnx"


def rename(program, old, new):
    for entry in program.graph.initializer:
        entry.name = new if entry.name == old else entry.name
    for node in program.graph.node:
        node.input[:] = [new if name == old else name for name in node.input]


def test_a_weight_that_a_tool_renamed_is_checked_and_named(tmp_path):
    path = exported(tmp_path)
    program = onnx.load(path)
    rename(program, "0.weight", "W")
    onnx.checker.check_model(program)
    onnx.save(program, path)
    report = fst.verify(path)
    assert {row.name: row.ok for row in report.layers} == {
        **dict.fromkeys(("W", "2.weight", "5.weight"), True)
    }
    assert not report.ok and report.lost == ("0.weight",)
    assert "not in the file, whose metadata say that they are N:M: 0.weight." in str(report)
    assert fst.verify(path, include=["W", "2", "5"]).ok
    dense = numpy_helper.from_array(torch.randn(16, 8, 3, 3).numpy(), "W")
    (entry,) = (entry for entry in program.graph.initializer if entry.name == "W")
    entry.CopyFrom(dense)
    onnx.save(program, path)
    assert [row.name for row in fst.verify(path).layers if not row.ok] == ["W"]


class _Images:
    def __init__(self, path):
        name = onnx.load(path).graph.input[0].name
        self.given = iter([{name: torch.randn(2, 8, 8, 8).numpy()}])

    def get_next(self):
        return next(self.given, None)


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_quantised_weights_have_a_row_and_are_not_checked(form, tmp_path):
    from onnxruntime.quantization import QuantFormat, quantize_static

    path, quantised = exported(tmp_path), tmp_path / "q.onnx"
    options = dict(quant_format=QuantFormat[form], nodes_to_exclude=["node_conv2d"])
    quantize_static(path, quantised, _Images(path), **options)
    report = fst.verify(quantised)
    labels = {row.name: row.label for row in report.covered.rows}
    assert labels.pop("0.weight") == "2:4"
    assert set(labels.values()) == {"quantised, not checked"} and len(labels) == 3
    assert not report.ok and set(report.unread) == set(labels)
    assert fst.verify(quantised, exclude=[*labels]).ok
    quantize_static(path, quantised, _Images(path), quant_format=QuantFormat[form])
    with pytest.raises(ValueError, match="are quantised: verify the model before that"):
        fst.verify(quantised)


@pytest.mark.parametrize("level", ["BASIC", "EXTENDED", "ALL"])
def test_files_of_onnxruntime_are_read_as_far_as_their_order_is_known(level, tmp_path):
    import onnxruntime

    path, written = exported(tmp_path), tmp_path / "o.onnx"
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(
        onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}"
    )
    options.optimized_model_filepath = str(written)
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    report = fst.verify(written)
    assert report.coverage < fst.verify(path).coverage if report.unread else report.ok
    assert set(report.unread.values()) <= {"reordered, not checked"}
    assert bool(report.lost) == bool(report.unread), "they have other names"
    assert all(row.ok for row in report.layers)


def test_onnxscripts_optimizer_keeps_what_is_known(tmp_path):
    from onnxscript import optimizer

    path = exported(tmp_path)
    onnx.save(optimizer.optimize(onnx.load(path)), tmp_path / "o.onnx")
    first, second = (fst.verify(tmp_path / name) for name in ("m.onnx", "o.onnx"))
    assert first.ok and str(first) == str(second)


def test_one_of_two_state_dicts_is_checked_and_the_other_named(tmp_path):
    model = nn.Sequential(nn.Conv2d(8, 8, 3))
    dense = {name: value.clone() for name, value in model.state_dict().items()}
    fst.convert(model, "srste")
    both = {"state_dict": fst.fold(model).state_dict(), "state_dict_ema": dense, "epoch": 3}
    both["optimizer"] = {"state": {0: {"momentum_buffer": torch.ones(3, 3)}}, "param_groups": []}
    torch.save(both, tmp_path / "t.pt")
    for target in (both, tmp_path / "t.pt"):
        report = fst.verify(target)
        assert report.ok and report.others == ("state_dict_ema",)
        assert "not checked: the file's other weights, state_dict_ema" in str(report)
    assert not fst.verify(both["state_dict"]).others


@pytest.mark.parametrize("name", ["serialized_state_dict.pt", "m/models/model.json"])
def test_a_program_of_an_older_torch_is_not_called_damaged(name, tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "m.pt2", "w") as archive:
        archive.writestr(name, "{}")
    with pytest.raises(ValueError, match=r"m\.pt2' was written by a PyTorch before 2\.9"):
        fst.verify(tmp_path / "m.pt2")


def test_weights_of_kinds_that_torch_does_not_take_from_numpy_are_read(tmp_path):
    path = made_by_hand(tmp_path, ("MatMul", ["x", "W"]), (16, 8))
    program = onnx.load(path)
    weight = copy.deepcopy(program.graph.initializer[0])
    for kind, unread in (
        (TensorProto.BFLOAT16, False),
        (TensorProto.FLOAT8E4M3FN, False),
        (TensorProto.INT4, True),
    ):
        values = numpy_helper.to_array(weight)
        tensor = helper.make_tensor("W", kind, values.shape, values.flatten().astype("float32"))
        program.graph.initializer[0].CopyFrom(tensor)
        onnx.save(program, path)
        stored = read_stored(path)
        assert stored.layers == {"W"} and stored.weights["W"].shape == (8, 16)
        if unread:
            with pytest.raises(ValueError, match="W are quantised"):
                fst.verify(path, include="W")
        else:
            assert fst.verify(path, include="W").ok
