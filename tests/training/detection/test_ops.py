"""mmcv's operators made of torchvision's, against literal references and the compiled ones."""

import subprocess
import sys

import mmcv.ops
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fst.training.detection
import fst.training.detection.__main__ as command
from fst.basics.arguments import USER_ERRORS
from fst.training.detection import ops
from tests.training.detection import references

pytestmark = pytest.mark.usefixtures("stand_in")

# Multiples of 1/2: sums and products are exact in float32, and IoUs are not nearly equal.
coordinates = st.integers(0, 24).map(lambda v: v / 2)
corners = st.tuples(coordinates, coordinates, coordinates, coordinates)
box_lists = st.lists(
    corners.map(lambda c: (min(c[0], c[2]), min(c[1], c[3]), max(c[0], c[2]), max(c[1], c[3]))),
    max_size=12,
).map(lambda boxes: boxes + boxes[:2])  # duplicates
thresholds = st.sampled_from([0.1, 0.3, 0.45, 0.5, 0.7, 1.0])
offsets = st.sampled_from([0, 1])
seeds = st.integers(0, 2**31)


@pytest.fixture
def compiled():
    if ops.source() != "compiled":
        pytest.skip("mmcv's compiled extension is not installed")
    return sys.modules[ops.EXTENSION]


def as_tensor(boxes):
    return torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)


def distinct_scores(count, seed):
    """Multiples of 1/256, each once: exact in every floating-point type."""
    return (np.random.default_rng(seed).permutation(200)[:count] / 256 + 1 / 256).tolist()


def random_boxes(count, seed, size=100.0):
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=generator) * size
    return torch.cat([corner, corner + torch.rand(count, 2, generator=generator) * size / 3], 1)


class TestNMS:
    @given(box_lists, seeds, thresholds, offsets)
    def test_against_the_reference(self, boxes, seed, threshold, offset):
        scores = np.random.default_rng(seed).integers(1, 5, len(boxes)) / 4  # many ties
        kept = ops.nms(as_tensor(boxes), torch.tensor(scores).float(), threshold, offset)
        assert kept.tolist() == references.nms(boxes, scores, threshold, offset)
        assert kept.dtype == torch.int64

    @given(box_lists, seeds, thresholds, st.sampled_from([torch.float16, torch.bfloat16]))
    def test_16_bit_types(self, boxes, seed, threshold, dtype):
        scores = distinct_scores(len(boxes), seed)
        kept = ops.nms(as_tensor(boxes).to(dtype), torch.tensor(scores).to(dtype), threshold, 0)
        assert kept.tolist() == references.nms(boxes, scores, threshold)

    def test_an_iou_of_exactly_the_threshold_stays(self):
        boxes = as_tensor([[0, 0, 10, 10], [0, 0, 10, 1]])  # 0.1 in float32 exceeds 0.1 in float64
        assert ops.nms(boxes, torch.tensor([0.9, 0.8]), 0.1, 0).tolist() == [0, 1]

    def test_offset_1_counts_pixels(self):
        boxes = as_tensor([[0, 0, 9, 9], [0, 0, 9, 4], [10, 0, 19, 9]])
        scores = torch.tensor([0.9, 0.8, 0.7])
        assert ops.nms(boxes, scores, 0.47, 1).tolist() == [0, 2]  # 50 / 100 pixels
        assert ops.nms(boxes, scores, 0.47, 0).tolist() == [0, 1, 2]  # 36 / 81

    @pytest.mark.parametrize("offset", [0, 1])
    def test_no_boxes(self, offset):
        kept = ops.nms(torch.empty(0, 4), torch.empty(0), 0.5, offset)
        assert kept.shape == (0,) and kept.dtype == torch.int64

    def test_mixed_types_and_bad_offset(self):
        boxes, scores = random_boxes(20, 0), torch.rand(20).bfloat16()
        expected = ops.nms(boxes, scores.float(), 0.3, 0)
        assert torch.equal(ops.nms(boxes, scores, 0.3, 0), expected)
        with pytest.raises(ValueError, match="offset=2 is unknown. Known: 0, 1"):
            ops.nms(boxes, scores, 0.3, 2)

    @given(
        box_lists, seeds, thresholds, st.sampled_from([0, 0.2, 0.6]), st.sampled_from([-1, 1, 4])
    )
    def test_threshold_and_max_num(self, boxes, seed, threshold, score_threshold, max_num):
        scores = distinct_scores(len(boxes), seed)
        dets, kept = mmcv.ops.nms(
            as_tensor(boxes),
            torch.tensor(scores),
            threshold,
            score_threshold=score_threshold,
            max_num=max_num,
        )
        none = [0] * len(boxes)
        expected = references.batched_nms(boxes, scores, none, threshold, score_threshold, max_num)
        assert kept.tolist() == expected
        assert dets.tolist() == [[*boxes[i], scores[i]] for i in expected]

    @given(box_lists, seeds, thresholds, st.booleans(), st.booleans(), st.sampled_from([-1, 3]))
    def test_batched(self, boxes, seed, threshold, agnostic, split, max_num):
        scores = distinct_scores(len(boxes), seed)
        classes = np.random.default_rng(seed).integers(0, 3, len(boxes)).tolist()
        options = {"type": "nms", "iou_threshold": threshold, "max_num": max_num}
        if split and not agnostic:
            options["split_thr"] = 2
        if not boxes:
            return  # mmcv takes the maximum of the coordinates
        dets, kept = mmcv.ops.batched_nms(
            as_tensor(boxes), torch.tensor(scores), torch.tensor(classes), options, agnostic
        )
        expected = references.batched_nms(
            boxes, scores, classes, threshold, max_num=max_num, agnostic=agnostic
        )
        assert kept.tolist() == expected
        assert dets.tolist() == [[*boxes[i], scores[i]] for i in expected]

    def test_against_the_compiled_one(self, compiled):
        for seed in range(50):
            boxes, offset = random_boxes(100, seed), seed % 2
            scores = torch.randperm(100, generator=torch.Generator().manual_seed(seed)) / 100
            for threshold in (0.1, 0.3, 0.5, 0.7):
                expected = compiled.nms(boxes, scores, iou_threshold=threshold, offset=offset)
                assert torch.equal(ops.nms(boxes, scores, threshold, offset), expected)


ROIS = (
    (0, 3.2, 2.1, 17.9, 20.3),
    (1, 0.0, 0.0, 31.9, 23.9),
    (1, -6.5, -4.0, 9.5, 40.0),
    (0, 28.0, 5.0, 45.0, 9.0),
    (0, 60.0, 60.0, 70.0, 80.0),
    (1, 7.0, 7.0, 7.0, 12.0),
)
ROI_CASES = [
    (size, scale, ratio, aligned)
    for size in ((2, 3), (7, 7))
    for scale in (1.0, 0.25)
    for ratio in (0, 1, 2)
    for aligned in (True, False)
]


class TestRoIAlign:
    @pytest.mark.parametrize(("size", "scale", "ratio", "aligned"), ROI_CASES)
    def test_output_and_gradient(self, size, scale, ratio, aligned):
        features = torch.randn(2, 3, 24, 32, dtype=torch.float64, requires_grad=True)
        rois = torch.tensor(ROIS, dtype=torch.float64)
        expected = references.roi_align(features, rois, size, scale, ratio, aligned)
        layer = mmcv.ops.RoIAlign(size, scale, ratio, aligned=aligned)
        actual = layer(features, rois)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        weights = torch.randn(expected.shape, dtype=torch.float64).transpose(2, 3).contiguous()
        weights = weights.transpose(2, 3)  # not contiguous
        gradients = [
            torch.autograd.grad((y * weights).sum(), features)[0] for y in (actual, expected)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)

    def test_gradcheck(self):
        features = torch.randn(2, 2, 6, 8, dtype=torch.float64, requires_grad=True)
        rois = torch.tensor(ROIS, dtype=torch.float64)
        layer = mmcv.ops.RoIAlign((2, 2), 0.25, 2)
        assert torch.autograd.gradcheck(lambda x: layer(x, rois), features)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_16_bit_types(self, dtype):
        features = torch.randn(2, 3, 24, 32).to(dtype).requires_grad_()
        rois = torch.tensor(ROIS).to(dtype)
        layer = mmcv.ops.RoIAlign((3, 3), 1.0, 0)
        pooled, wide = layer(features, rois), features.detach().float().requires_grad_()
        expected = layer(wide, rois.float())
        assert torch.equal(pooled, expected.to(dtype))
        pooled.float().sum().backward()
        expected.sum().backward()
        assert features.grad.dtype == dtype
        assert torch.equal(features.grad, wide.grad.to(dtype))

    def test_no_regions(self):
        features = torch.randn(1, 3, 8, 8, requires_grad=True)
        pooled = mmcv.ops.RoIAlign((2, 2))(features, torch.empty(0, 5))
        assert pooled.shape == (0, 3, 2, 2)
        pooled.sum().backward()
        assert not features.grad.any()

    def test_inverted_regions_are_refused(self):
        features, rois = torch.randn(1, 3, 8, 8), torch.tensor([[0, 5.0, 1.0, 2.0, 4.0]])
        with pytest.raises(ValueError, match="rois: .* needs x1 <= x2"):
            mmcv.ops.RoIAlign((2, 2), aligned=True)(features, rois)
        mmcv.ops.RoIAlign((2, 2), aligned=False)(features, rois)  # as 1 x 1, as in mmcv

    def test_maxima_are_refused(self):
        features, rois = torch.randn(1, 3, 8, 8), torch.tensor([[0, 1.0, 1.0, 2.0, 4.0]])
        with pytest.raises(ops.UnavailableOpError, match="pool_mode='max' needs mmcv's compiled"):
            mmcv.ops.RoIAlign((2, 2), pool_mode="max")(features, rois)
        assert issubclass(ops.UnavailableOpError, USER_ERRORS)  # commands end in one line

    @pytest.mark.parametrize(("size", "scale", "ratio", "aligned"), ROI_CASES)
    def test_against_the_compiled_one(self, compiled, size, scale, ratio, aligned, monkeypatch):
        rois = torch.tensor(ROIS)
        results = []
        for module in (ops.StandIn(), compiled):
            monkeypatch.setattr(sys.modules["mmcv.ops.roi_align"], "ext_module", module)
            torch.manual_seed(1)
            features = torch.randn(2, 3, 24, 32, requires_grad=True)
            pooled = mmcv.ops.RoIAlign(size, scale, ratio, aligned=aligned)(features, rois)
            pooled.square().sum().backward()
            results.append((pooled.detach(), features.grad))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu():
    boxes, scores = random_boxes(200, 0), torch.rand(200)
    features, rois = torch.randn(2, 3, 24, 32), torch.tensor(ROIS)
    for offset in (0, 1):
        kept = ops.nms(boxes.cuda(), scores.cuda(), 0.3, offset)
        assert torch.equal(kept.cpu(), ops.nms(boxes, scores, 0.3, offset))
    layer, results = mmcv.ops.RoIAlign((7, 7), 0.25, 0), []
    for device in ("cpu", "cuda"):
        moved = features.to(device).requires_grad_()
        pooled = layer(moved, rois.to(device))
        pooled.square().sum().backward()
        results.append((pooled.detach().cpu(), moved.grad.cpu()))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


class TestInstall:
    @pytest.fixture
    def extension(self, tmp_path, monkeypatch):
        """Makes mmcv look as if its compiled extension were this code, and not yet imported."""

        def put(code):
            if code is not None:
                (tmp_path / "_ext.py").write_text(code)
            monkeypatch.setattr(mmcv, "__path__", [str(tmp_path)])
            monkeypatch.delitem(sys.modules, ops.EXTENSION)
            monkeypatch.setattr(mmcv, "_ext", None)
            assert ops.source() is None

        return put

    def test_an_extension_that_loads_is_used(self, extension):
        extension("mark = 1")
        ops.install()
        assert ops.source() == "compiled" and mmcv._ext.mark == 1

    def test_one_that_does_not_load_is_replaced(self, extension):
        extension("raise ImportError('_ext.so: undefined symbol: _ZN2at')")
        with pytest.warns(UserWarning, match="undefined symbol: _ZN2at.*torchvision"):
            ops.install()
        assert ops.source() == "torchvision"

    def test_none(self, extension, recwarn):
        extension(None)
        ops.install()
        assert ops.source() == "torchvision" and not recwarn.list
        module = mmcv._ext
        ops.install()
        assert mmcv._ext is module is sys.modules[ops.EXTENSION]

    def test_without_mmcv(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "mmcv", None)
        monkeypatch.delitem(sys.modules, ops.EXTENSION)
        with pytest.raises(ImportError, match=r"pip install 'fst-train\[det\]'"):
            ops.install()

    def test_other_operators_name_themselves(self):
        module = ops.StandIn()
        with pytest.raises(NotImplementedError, match=r"'deform_conv_forward'(.|\n)*pip install"):
            module.deform_conv_forward(1, x=2)
        assert module.nms is ops.nms
        assert not hasattr(module, "__wrapped__")
        assert "torchvision" in module.get_compiler_version()


class TestCommand:
    @pytest.mark.system
    def test_runs_a_script(self, tmp_path):
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

    def test_no_such_script(self, capsys, monkeypatch):
        monkeypatch.setattr(sys, "argv", ["fst.training.detection", "absent.py"])
        with pytest.raises(SystemExit, match="2"):
            command.main()
        assert "'absent.py' is no file" in capsys.readouterr().err


def test_importing_the_package_installs():
    assert fst.training.detection.ops.source() in ("compiled", "torchvision")
