"""The embedded dataset: the same bytes every time, all or nothing on disk, classes that colour does not give away."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from pipeline.toy import CLASSES, draw, make_toy


def _digests(root):
    return {p.relative_to(root): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(root.rglob("*.jpg"))}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A set of two training images and one test image per class."""
    root = tmp_path_factory.mktemp("toy") / "data"
    make_toy(root, train=20, test=10)
    return root


def test_folders_name_the_classes(toy):
    for split, count in ("train", 2), ("test", 1):
        assert sorted(p.name for p in (toy / split).iterdir()) == sorted(CLASSES)
        for name in CLASSES:
            assert [p.name for p in sorted((toy / split / name).iterdir())] == [f"{i:04d}.jpg" for i in range(count)]


def test_images_have_mixed_sizes(toy):
    sizes = {Image.open(p).size for p in toy.rglob("*.jpg")}
    assert len(sizes) > 20 and all(88 <= side <= 112 for size in sizes for side in size)


def test_same_bytes_whatever_the_count_and_no_image_twice(toy, tmp_path):
    make_toy(tmp_path / "more", train=30, test=10)
    few, more = _digests(toy), _digests(tmp_path / "more")
    assert few.items() <= more.items() and len(more) == len(set(more.values())) == 40


def test_another_seed_replaces_the_set(tmp_path):
    root = tmp_path / "data"
    make_toy(root, train=10, test=10)
    first = _digests(root)
    make_toy(root, train=10, test=10, seed=1)
    assert not set(first.values()) & set(_digests(root).values())
    assert {p.name for p in tmp_path.iterdir()} == {"data", ".data.lock"}


def test_a_complete_set_is_reused(toy):
    before = {p: p.stat().st_mtime_ns for p in toy.rglob("*")}
    assert make_toy(toy, train=20, test=10) == (toy / "train", toy / "test")
    assert before == {p: p.stat().st_mtime_ns for p in toy.rglob("*")}


def test_a_killed_run_is_redone(toy, tmp_path):
    left = tmp_path / ".data.new" / "train" / "striped-disc"
    left.mkdir(parents=True)
    (left / "0007.jpg").write_bytes(b"half")
    make_toy(tmp_path / "data", train=20, test=10)
    assert _digests(tmp_path / "data") == _digests(toy)


def test_callers_at_once_get_one_set(toy, tmp_path):
    # Each call opens the lock file anew, and flock holds between openings: threads stand for processes.
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: make_toy(tmp_path / "data", train=20, test=10), range(3)))
    assert _digests(tmp_path / "data") == _digests(toy)


def test_a_folder_of_the_user_is_left_alone(tmp_path):
    (tmp_path / "photo.jpg").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="not a toy dataset"):
        make_toy(tmp_path)
    assert (tmp_path / "photo.jpg").read_bytes() == b"mine"


def test_uneven_counts_are_refused(tmp_path):
    with pytest.raises(ValueError, match="train=15"):
        make_toy(tmp_path / "data", train=15)


def test_mean_colour_does_not_tell_the_class():
    """1-NN on the mean colour, leave one out, 200 images: chance is 10 %, and 25 % is seven deviations above it."""
    label = np.repeat(np.arange(len(CLASSES)), 20)
    recipes = list(CLASSES.values())
    mean = np.stack(
        [np.asarray(draw(*recipes[c], np.random.default_rng([9, i]))).mean((0, 1)) for i, c in enumerate(label)]
    )
    distance = np.linalg.norm(mean[:, None] - mean, axis=-1)
    np.fill_diagonal(distance, np.inf)
    accuracy = (label[distance.argmin(1)] == label).mean()
    assert accuracy < 0.25, f"mean colour alone finds {accuracy:.0%} of the classes"
