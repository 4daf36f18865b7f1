"""What is decoded at a time is bounded by the memory that there is; what cannot fit is refused before a run begins."""

import numpy as np
import pytest
import torch

from pipeline import Index, memory

CPU = torch.device("cpu")


def test_parts_are_as_large_as_may_be():
    rng = np.random.default_rng(0)
    for number in range(1, 50):
        sizes = rng.integers(1, 50, (number, 2)).astype(np.int32)
        pixels, most, images = sizes.prod(1), rng.integers(1, 4000), int(rng.integers(1, 9))
        parts = list(memory.parts(sizes, most, images))
        assert [i for part in parts for i in range(number)[part]] == list(range(number))
        for part, after in zip(parts, [*parts[1:], None], strict=True):
            count, total = part.stop - part.start, pixels[part].sum()
            assert 1 <= count <= images and (total <= most or count == 1)
            assert after is None or count == images or total + pixels[after.start] > most
    large = np.array([[60_000, 60_000]] * 2, np.int32)  # more than 32 bits hold
    assert list(memory.parts(large, 2**32, 9)) == [slice(0, 1), slice(1, 2)]


def machine(root, groups):
    """A machine of 10 GB with control groups {folder: its files}."""
    files = {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   10000000 kB\n"}
    for folder, content in groups.items():
        files |= {f"sys/fs/cgroup/{folder}/{name}": text for name, text in content.items()}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def second(limit, used, cache):
    return {"memory.max": limit, "memory.current": used, "memory.stat": f"anon 7\ninactive_file {cache}\nfile 5\n"}


def first(limit, used, cache):
    stat = f"inactive_file 1\ntotal_inactive_file {cache}\n"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


@pytest.mark.parametrize(
    "line, groups, expected",
    [
        ("0::/", {}, 10_240_000_000),
        ("0::/a/b", {"a/b": second("max\n", "5\n", 3), "a": second("4000\n", "1500\n", 500)}, 3000),
        ("0::/", {".": second("400", "900", 100)}, 0),
        ("9:cpu:/a\n8:memory:/a", {"memory/a": first("700", "300", 50)}, 450),
        ("8:memory:/of/the/host", {"memory": first("700", "300", 50), "memory/elsewhere": first("1", "1", 0)}, 450),
    ],
    ids=["none", "parent", "full", "version 1", "container"],
)  # fmt: skip
def test_memory_is_what_the_machine_and_its_control_groups_leave(tmp_path, monkeypatch, line, groups, expected):
    monkeypatch.setattr(memory, "_ROOT", tmp_path)
    machine(tmp_path, groups | {"../../../proc/self": {"cgroup": line}})
    assert memory.free(CPU) == expected
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert memory.free(CPU) == expected // 3
    assert memory.most_pixels(CPU) == min(1 << 29, expected // 3 // 13)


def test_what_batches_take_is_said_and_what_cannot_fit_is_refused(tmp_path, monkeypatch):
    sizes = np.array([[4000, 6000]] * 3 + [[100, 100]] * 5, np.int32)
    index = Index(tmp_path, [f"{i}.jpg" for i in range(8)], np.full(8, -1), sizes, (), {})
    how = {"image_size": 224, "views": 2, "device": CPU}
    left = {"bytes": 10_000_000_000}
    monkeypatch.setattr(memory, "free", lambda device: left["bytes"])
    assert memory.plan(index, batch=4, **how) == ""
    monkeypatch.setattr(memory, "_WORTH_SAYING", 1e8)
    assert memory.plan(index, batch=4, **how) == "to decode 4 images: 0.2 GB at most, 0.1 on the mean"
    left["bytes"] = 13 * 40_000_000
    assert memory.plan(index, batch=4, **how).endswith(", in parts of at most 0.1 GB, or one image")
    for bytes_left, batch in ((7 * 24_000_000, 1), (3_000_000_000, 1000)):  # the latter: colours
        left["bytes"] = bytes_left
        with pytest.raises(
            ValueError, match=r"not enough memory: .* to decode '0.jpg'; expected a smaller --batch-size"
        ):
            memory.plan(index, batch=batch, **how)
