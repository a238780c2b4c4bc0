"""mmcv's operators by torchvision."""

import sys

import mmcv.ops
import pytest
import torch

import fst.training.detection.__main__ as command
from fst.training.detection import ops
from tests.programs import python


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("offset", "threshold"), [(0, 50 / 150), (1, 66 / 176)])
def test_nms_compares_with_the_intersection_over_union(offset, threshold, dtype):
    """Of two boxes of ten pixels, five apart; a third one is far away."""
    boxes = torch.tensor([[5, 0, 15, 10], [0, 0, 10, 10], [40, 0, 50, 10]]).to(dtype)
    scores = torch.tensor([0.25, 0.5, 0.75]).to(dtype)
    assert ops.nms(boxes, scores, threshold + 0.01, offset).tolist() == [2, 1, 0]
    assert ops.nms(boxes, scores, threshold - 0.01, offset).tolist() == [2, 1]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("aligned", [True, False])
def test_roi_align_averages_bins(scale, aligned):
    """On a ramp the mean of a bin is its centre's place, by rows and by columns."""
    rows, columns = torch.arange(24.0)[:, None], torch.arange(32.0)
    ramps = torch.stack([rows.expand(24, 32), columns.expand(24, 32)])[None].requires_grad_()
    roi = torch.tensor([[0, 4, 8, 16, 20]]) / scale
    found = mmcv.ops.RoIAlign((3, 4), scale, 2, aligned=aligned)(ramps, roi)
    places = torch.stack([torch.tensor([10.0, 14, 18])[:, None].expand(3, 4)] * 2)
    places[1] = torch.tensor([5.5, 8.5, 11.5, 14.5])
    torch.testing.assert_close(found[0], places - 0.5 * aligned)
    found.sum().backward()
    torch.testing.assert_close(ramps.grad.sum(), torch.tensor(24.0))


@pytest.mark.usefixtures("stand_in")
def test_maxima_of_regions_are_refused():
    features, rois = torch.randn(1, 3, 8, 8), torch.tensor([[0, 1.0, 1.0, 2.0, 4.0]])
    with pytest.raises(NotImplementedError, match="takes no pool_mode='max'"):
        mmcv.ops.RoIAlign((2, 2), pool_mode="max")(features, rois)


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
    done = python("-m", "fst.training.detection", script, "a", "--b", "-h", status=3)
    assert done.stdout.endswith("beside ['a', '--b', '-h'] nms\n")


def test_no_such_script(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fst.training.detection", "absent.py"])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert "'absent.py' is no file" in capsys.readouterr().err
