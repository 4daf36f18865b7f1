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


def test_what_a_recipe_takes_follows_from_what_was_measured():
    """Its own speed if there is one, whatever the code counts now; else as many operations a second as its like."""
    of = {"pairs_per_second": 10_000, "flop_per_pair": 3e9, "peak_memory_bytes": 2**33}
    names = "imagenet-vit-s", "cifar-vit-s", "cifar-vit-t"
    own, like, none = (scaling.cost(name, 1e9, {"imagenet-vit-s": of}) for name in names)
    assert own["hours"] == pytest.approx(300 * 1_281_167 * 4 / 10_000 / 3600)
    assert (
        like["hours"] == pytest.approx(1600 * 50_000 * 4 / 30_000 / 3600) and own["own_hours"] == 3 * like["own_hours"]
    )
    cells = {recipe: row for recipe, *row in scaling.cost_table([own, like, none])[1:]}
    assert cells["`imagenet-vit-s`"][-3:] == ["8 GiB at batch 512", "42.7", "1.11"]
    assert cells["`cifar-vit-s`"][-3:] == ["-", "about 3", "about 0.37"]
    assert cells["`cifar-vit-t`"][-3:] == ["-"] * 3
