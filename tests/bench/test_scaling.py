"""The model of several GPUs on paper."""

import json

import pytest

from bench import scaling
from run.recipes import RECIPES


def test_scaling_starts_from_what_was_measured():
    config, how = (
        RECIPES["imagenet-vit-s"],
        {"step_seconds": 0.0356, "memory": 3e12, "update_bytes": 62, "compress": False},
    )
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
    cells = {recipe: row for recipe, *row in scaling.cost_table([own, like, none], "NVIDIA H9 1GB")[1:]}
    assert cells["`imagenet-vit-s`"][-3:] == ["8 GiB at batch 512", "42.7", "1.11"]
    assert cells["`cifar-vit-s`"][-3:] == ["-", "about 3", "about 0.37"]
    assert cells["`cifar-vit-t`"][-3:] == ["-"] * 3
    assert scaling.cost_table([own], "NVIDIA H9 1GB")[0][-2] == "hours on one H9"


def test_the_newest_card_with_both_recipes_counts(tmp_path):
    """Steps as bench step writes them; a result of one recipe, of another batch or without figures moves nothing."""
    cards = "CARD-A1-2026-01-02", "CARD-B1-2026-01-01", "CARD-C1-2026-01-03", "CARD-D1-2026-01-04"
    for number, name in enumerate(cards):
        (tmp_path / name).mkdir()
        for recipe in ("imagenet-vit-s", "imagenet-vit-b")[: 1 + (number != 2)]:
            of = {"pairs_per_second": 100.0 + number, "step_seconds": {"p50": 5.12}, "peak_memory_bytes": 1}
            found = {"recipe": recipe, "graph": of, "flop_per_pair": 3.0, "copy_bytes_per_second": 4e12}
            found["batch_size"] = 64 if number == 3 else 512
            file = tmp_path / name / f"step_{recipe[-5:].replace('-', '_')}.json"
            file.write_text(json.dumps(found | {"machine": {"device": name}}))
    (tmp_path / "CARD-C1-2026-01-03/step_vit_b.json").write_text(json.dumps({"tests": "failed"}))
    assert scaling.newest(tmp_path).name == "CARD-A1-2026-01-02"
    found = scaling.steps_of(scaling.newest(tmp_path))
    assert found["rows"]["imagenet-vit-b"]["pairs_per_second"] == 100 and found["memory"] == 4e12
    assert scaling.steps_of(scaling.newest(scaling.RESULTS))["device"].startswith("NVIDIA")
