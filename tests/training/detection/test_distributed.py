"""Two processes on gloo."""

import pytest

from tests.training import ranks

HOOKS = f"custom_hooks = [{ranks.PROBE}]\n"
RUNS = (("ssd", 'dict(strategy="fst")'), ("faster-rcnn", 'dict(strategy="sdgp")'))


@pytest.mark.system
def test_two_ranks(write_config, tmp_path, assert_same_state):
    configs = [[write_config(d, sparsity=s, extra=HOOKS) for _ in range(3)] for d, s in RUNS]
    zero, one = ranks.run(tmp_path, configs)
    for index in (0, 3):
        seen = zero[index]["images"], one[index]["images"]
        assert [len(images) for images in seen] == [8, 8]  # two epochs of two steps of two images
        for epoch in (slice(0, 4), slice(4, 8)):
            assert len({*seen[0][epoch], *seen[1][epoch]}) == 8
    for index in range(len(RUNS)):
        whole, parts = tmp_path / f"whole{index}", tmp_path / f"parts{index}"
        assert_same_state(whole / "epoch_2.pth", parts / "epoch_2.pth")
