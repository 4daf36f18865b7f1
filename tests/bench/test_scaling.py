"""The model of several GPUs on paper."""

import pytest

from bench import scaling
from run.recipes import RECIPES


def test_scaling_starts_from_what_was_measured():
    config, how = RECIPES["imagenet-vit-s"], {"step_seconds": 0.0356, "compress": False}
    one, node, nodes = (scaling.predict(config, 43_000_000, gpus=n, images=512, **how) for n in (1, 8, 64))
    assert one["step_ms"] == pytest.approx(35.6) and one["efficiency"] == pytest.approx(1)
    assert 1 > node["efficiency"] > nodes["efficiency"] > 0.5
    ring = node["gradients_ms"] / 1e3 * scaling.WITHIN  # bytes that a GPU sends: all but one of eight parts, twice
    assert ring == pytest.approx(2 * 7 / 8 * 4 * 43_000_000)
    half = scaling.predict(config, 43_000_000, gpus=64, images=512, **how | {"compress": True})
    assert half["gradients_ms"] == pytest.approx(nodes["gradients_ms"] / 2)
    assert node["node_images_per_second"] * 4 == pytest.approx(node["pairs_per_second"])
