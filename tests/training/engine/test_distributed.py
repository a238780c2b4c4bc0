"""Two processes on gloo."""

import pytest

from tests.training import ranks

EMA = 'dict(type="EMAHook", momentum=0.4)'
SETTINGS = (
    ('dict(strategy="fst")', f"custom_hooks = [{ranks.PROBE}, {EMA}]\n"),
    ('dict(strategy="sdgp", rule="random")', f"custom_hooks = [{ranks.PROBE}]\n"),
    ('dict(strategy="resprop", threshold=1e-4)', f"custom_hooks = [{ranks.PROBE}]\n"),
)


@pytest.mark.system
def test_two_ranks(write_config, tmp_path, assert_same_state):
    zero, one = ranks.run(tmp_path, [[write_config(*s) for _ in range(3)] for s in SETTINGS])
    assert len(zero[0]["masks"]) == 4  # 128 images per step and rank
    for epoch in (slice(0, 128), slice(128, 256)):
        assert len({*zero[0]["images"][epoch], *one[0]["images"][epoch]}) == 256
    for index in range(len(SETTINGS)):
        whole, parts = tmp_path / f"whole{index}", tmp_path / f"parts{index}"
        assert_same_state(whole / "epoch_2.pth", parts / "epoch_2.pth")
