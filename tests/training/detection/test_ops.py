"""mmcv's operators by torchvision, against literal references and the compiled ones."""

import subprocess
import sys

import mmcv.ops
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fst.training.detection.__main__ as command
from fst.training.detection import ops
from tests.training.detection import references

COMPILED = not isinstance(sys.modules[ops.EXTENSION], ops.StandIn)

# Multiples of 1/2: sums and products are exact in float32, and IoUs are not nearly equal.
coordinates = st.integers(0, 24).map(lambda v: v / 2)
corners = st.tuples(coordinates, coordinates, coordinates, coordinates)
box_lists = st.lists(
    corners.map(lambda c: (min(c[0], c[2]), min(c[1], c[3]), max(c[0], c[2]), max(c[1], c[3]))),
    max_size=12,
).map(lambda boxes: boxes + boxes[:2])  # duplicates


@given(
    box_lists,
    st.integers(0, 2**31),
    st.sampled_from([0.25, 0.47, 0.5, 0.71, 1.0]),
    st.sampled_from([0, 1]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_nms_against_the_reference(boxes, seed, threshold, offset, dtype):
    # multiples of 1/256, each once: exact in every floating-point type
    scores = np.random.default_rng(seed).permutation(200)[: len(boxes)] / 256 + 1 / 256
    given = torch.tensor(boxes).reshape(-1, 4).to(dtype), torch.tensor(scores).to(dtype)
    expected = references.nms(boxes, scores, threshold, offset)
    assert ops.nms(*given, threshold, offset).tolist() == expected


ROIS = (
    (0, 3.2, 2.1, 17.9, 20.3),
    (1, 0.0, 0.0, 31.9, 23.9),
    (1, -6.5, -4.0, 9.5, 40.0),
    (0, 28.0, 5.0, 45.0, 9.0),
    (0, 60.0, 60.0, 70.0, 80.0),
)
ROI_CASES = [
    (size, scale, ratio, aligned)
    for size in ((2, 3), (7, 7))
    for scale in (1.0, 0.25)
    for ratio in (0, 2)
    for aligned in (True, False)
]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("size", "scale", "ratio", "aligned"), ROI_CASES)
def test_roi_align_against_the_reference(size, scale, ratio, aligned):
    features = torch.randn(2, 3, 24, 32, dtype=torch.float64, requires_grad=True)
    rois = torch.tensor(ROIS, dtype=torch.float64)
    expected = references.roi_align(features, rois, size, scale, ratio, aligned)
    actual = mmcv.ops.RoIAlign(size, scale, ratio, aligned=aligned)(features, rois)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad((y * weights).sum(), features)[0] for y in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("stand_in")
def test_maxima_of_regions_are_refused():
    features, rois = torch.randn(1, 3, 8, 8), torch.tensor([[0, 1.0, 1.0, 2.0, 4.0]])
    with pytest.raises(NotImplementedError, match="takes no pool_mode='max'"):
        mmcv.ops.RoIAlign((2, 2), pool_mode="max")(features, rois)


@pytest.mark.skipif(not COMPILED, reason="mmcv's compiled extension is not installed")
def test_against_the_compiled_operators():
    compiled = sys.modules[ops.EXTENSION]
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        corner = torch.rand(100, 2, generator=generator) * 100
        boxes = torch.cat([corner, corner + torch.rand(100, 2, generator=generator) * 30], 1)
        scores = torch.randperm(100, generator=generator) / 100
        for threshold in (0.1, 0.3, 0.5, 0.7):
            found = ops.nms(boxes, scores, threshold, seed % 2)
            expected = compiled.nms(boxes, scores, iou_threshold=threshold, offset=seed % 2)
            assert torch.equal(found, expected)
    features, rois = torch.randn(2, 3, 24, 32), torch.tensor(ROIS)
    for size, *options, aligned in ROI_CASES:
        expected = mmcv.ops.RoIAlign(size, *options, aligned=aligned)(features, rois)
        found = ops.roi_align(features, rois, size, *options, aligned=aligned)
        torch.testing.assert_close(found, expected)


@pytest.fixture
def no_extension(tmp_path, monkeypatch):
    """Makes mmcv look as if it had no extension, and none had been imported."""
    monkeypatch.setattr(mmcv, "__path__", [*mmcv.__path__[1:], str(tmp_path)])
    monkeypatch.delitem(sys.modules, ops.EXTENSION)
    return tmp_path


def test_an_extension_that_loads_is_used(no_extension):
    (no_extension / "_ext.py").write_text("mark = 1")
    ops.install()
    assert sys.modules[ops.EXTENSION].mark == 1


def test_one_that_does_not_load_says_why(no_extension):
    (no_extension / "_ext.py").write_text("raise ImportError('undefined symbol: _ZN2at')")
    with pytest.raises(ImportError, match="undefined symbol: _ZN2at"):
        ops.install()


def test_without_mmcv(monkeypatch):
    monkeypatch.setitem(sys.modules, "mmcv", None)
    with pytest.raises(ImportError, match=r"pip install 'fst-train\[det\]'"):
        ops.install()


def test_other_operators_name_themselves():
    with pytest.raises(NotImplementedError, match=r"'deform_conv_forward'.*pip install"):
        ops.StandIn(ops.EXTENSION).deform_conv_forward(1, x=2)


@pytest.mark.system
def test_the_module_runs_a_script(tmp_path):
    (tmp_path / "beside.py").write_text("name = 'beside'")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, beside, mmcv.ops\n"
        "assert __name__ == '__main__'\n"
        "print(beside.name, sys.argv[1:], mmcv.ops.nms.__name__)\n"
        "sys.exit(3)\n"
    )
    words = [sys.executable, "-m", "fst.training.detection", str(script), "a", "--b", "-h"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert done.stdout.endswith("beside ['a', '--b', '-h'] nms\n")


def test_no_such_script(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fst.training.detection", "absent.py"])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert "'absent.py' is no file" in capsys.readouterr().err
