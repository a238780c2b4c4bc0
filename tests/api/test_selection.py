"""Which linear layers `layers=` chooses, and what the report says of the others."""

import pytest
import torch
from torch import nn

import fst
from fst.api.selection import classifier_heads, never_called, patch_embeddings

timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")

NARROW = {"depths": (1, 1, 1, 1)}
NETWORKS = {
    "timm:vit_tiny_patch16_224": {"depth": 1},
    "timm:deit_tiny_distilled_patch16_224": {"depth": 1},
    "timm:swin_tiny_patch4_window7_224": NARROW,
    "timm:swinv2_tiny_window8_256": NARROW,
    "timm:convnext_tiny": NARROW,
    "timm:resnet18": {},
    "timm:beit_base_patch16_224": {"depth": 1},
    "timm:mixer_s16_224": {},
    "torchvision:vit_b_16": {},
    "torchvision:convnext_tiny": {},
    "torchvision:swin_t": {},
    "torchvision:vgg11": {},
    "torchvision:mobilenet_v3_small": {},
}


def network(name):
    source, _, model = name.partition(":")
    build = timm.create_model if source == "timm" else torchvision.models.get_model
    with torch.device("meta"):
        return build(model, **NETWORKS[name])


@pytest.mark.parametrize(
    ("name", "heads", "patches"),
    [
        ("timm:vit_tiny_patch16_224", {"head"}, {"patch_embed.proj"}),
        ("timm:deit_tiny_distilled_patch16_224", {"head", "head_dist"}, {"patch_embed.proj"}),
        ("timm:swin_tiny_patch4_window7_224", {"head.fc"}, {"patch_embed.proj"}),
        ("timm:convnext_tiny", {"head.fc"}, {"stem.0"}),
        ("timm:resnet18", {"fc"}, set()),
        ("timm:mixer_s16_224", {"head"}, {"stem.proj"}),
        ("torchvision:vit_b_16", {"heads.head"}, {"conv_proj"}),
        ("torchvision:swin_t", {"head"}, {"features.0.0"}),
        ("torchvision:convnext_tiny", {"classifier.2"}, {"features.0.0"}),
        ("torchvision:vgg11", {"classifier.6"}, set()),
        ("torchvision:mobilenet_v3_small", {"classifier.3"}, set()),
    ],
)
def test_heads_and_patch_embeddings(name, heads, patches):
    net = network(name)
    assert classifier_heads(net) == heads
    layers = {n for n, m in net.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    assert patch_embeddings(net) & layers == patches
    wrapped = nn.ModuleDict({"model": net})
    assert classifier_heads(wrapped) == {f"model.{head}" for head in heads}
    report = fst.convert(net, "fst", layers="all")
    for kept, word in ((heads, "head"), (patches, "patch embedding")):
        assert all(word in report.skipped[layer] for layer in kept)


def test_heads_by_name_and_models_without_one():
    tower = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert classifier_heads(tower) == set()
    assert classifier_heads(nn.ModuleDict({"body": tower, "lm_head": nn.Linear(8, 8)})) == {
        "lm_head"
    }
    headless = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=0, img_size=32)
    assert classifier_heads(headless) == set()


@pytest.mark.parametrize(
    ("layers", "converted"),
    [
        ("linear", {"attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"}),
        ("all", {"attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"}),
        ("conv", set()),
    ],
)
def test_a_vision_transformer(layers, converted):
    net = network("timm:vit_tiny_patch16_224")
    report = fst.convert(net, "fst", layers=layers)
    assert set(report.converted) - {"patch_embed.proj"} == {f"blocks.0.{c}" for c in converted}
    assert ("patch_embed.proj" in report.converted) == (layers == "conv")
    assert {*report.converted, *report.skipped} == {
        *(f"blocks.0.{c}" for c in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")),
        "patch_embed.proj",
        "head",
    }


def test_included_heads_and_embeddings_are_converted():
    net = network("timm:vit_tiny_patch16_224")
    report = fst.convert(net, "fst", include=[nn.Linear, "patch_embed"])
    assert {"head", "patch_embed.proj"} <= set(report.converted) and not report.skipped


def test_convnext_has_its_pointwise_layers_converted_and_its_images_paired():
    net = timm.create_model(
        "convnext_tiny", depths=(1, 1, 1, 1), dims=(8, 8, 8, 8), patch_size=1, num_classes=4
    )
    report = fst.convert(net, "fst", layers="linear")
    assert len(report.layers) == 8 and all(".mlp.fc" in name for name in report.converted)
    assert all("convolutions" in report.skipped[f"stages.{i}.blocks.0.conv_dw"] for i in range(4))
    net(torch.randn(2, 3, 16, 16)).sum().backward()
    assert all(layer.weight.grad.any() for layer in fst.sparse_layers(net).values())


def test_layers_of_few_inputs_stay_dense():
    report = fst.convert(nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 8)), "sdgp", layers="linear")
    assert set(report.converted) == {"1"} and "3 input channels" in report.skipped["0"]


# ------------------------------------------------------------- weights that no layer multiplies


def test_multihead_attention_is_named_and_left_out():
    net = network("torchvision:vit_b_16")
    report = fst.convert(net, "fst", include=[nn.Linear])
    attention = "encoder.layers.encoder_layer_0.self_attention"
    assert "Parameter" in report.skipped[f"{attention}.in_proj_weight"]
    assert "MultiheadAttention" in report.skipped[f"{attention}.out_proj"]
    assert "encoder.layers.encoder_layer_0.mlp.0" in report.converted
    assert f"{attention}.in_proj_weight" in str(report)
    separate = nn.MultiheadAttention(8, 2, kdim=4, vdim=4)
    names = {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj"}
    assert set(never_called(separate)) == names
    # its fast path in evaluation multiplies with their weights
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert {"linear1", "linear2", "self_attn.out_proj"} <= set(never_called(encoder))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("timm:swinv2_tiny_window8_256", {"qkv"}),
        ("timm:beit_base_patch16_224", {"qkv"}),
        ("torchvision:swin_t", {"qkv", "proj"}),
        ("timm:swin_tiny_patch4_window7_224", set()),
    ],
)
def test_layers_whose_weight_is_used_without_a_call_are_never_converted(name, layers):
    net = network(name)
    assert {path.rpartition(".")[2] for path in never_called(net)} == layers
    report = fst.convert(net, "fst", include=[nn.Linear])
    skipped = [path for path, reason in report.skipped.items() if "uses its weight" in reason]
    assert {path.rpartition(".")[2] for path in skipped} == layers


def test_the_trial_call_shows_which_layers_are_not_called():
    class Reads(nn.Module):
        """Multiplies with the weight of a layer that it does not call."""

        def __init__(self):
            super().__init__()
            self.called, self.used = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return nn.functional.linear(self.called(x), self.used.weight)

    report = fst.convert(Reads(), "fst", include=[nn.Linear], example_input=torch.randn(2, 8))
    labels = {weight.name: weight.label for weight in report.covered.rows}
    assert labels["called.weight"] == "2:4" and "not called" in labels["used.weight"]


# --------------------------------------------------------------------------------------- errors


def test_wrong_choices_are_errors():
    with pytest.raises(ValueError, match="layers='linaer' is unknown.*'linear'"):
        fst.convert(nn.Linear(8, 8), "fst", layers="linaer")
    with pytest.raises(ValueError, match="layers='all' beside include='head'"):
        fst.convert(network("timm:resnet18"), "fst", layers="all", include="head")
    with pytest.raises(ValueError, match="layers='linear'"):
        fst.convert(nn.Conv2d(8, 8, 3), "fst", layers="linear")


def test_the_config_takes_the_same_choice():
    read_sparsity = pytest.importorskip("fst.training.engine.config").read_sparsity
    _, choice = read_sparsity({"sparsity": {"strategy": "fst", "layers": "linear"}})
    assert choice["layers"] == "linear"
    with pytest.raises(ValueError, match="layers='lin'"):
        read_sparsity({"sparsity": {"strategy": "fst", "layers": "lin"}})
    with pytest.raises(ValueError, match="beside include"):
        read_sparsity({"sparsity": {"strategy": "fst", "layers": "all", "include": ["fc"]}})
