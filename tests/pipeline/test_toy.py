"""The embedded dataset: the same pictures every time, all or nothing on disk, classes not told by colour."""

import base64
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import coarse

from pipeline import toy as toy_module
from pipeline.toy import CLASSES, draw, make_toy

# The first picture of each class: its size, and the mean grey of each part of 8 x 8.
DRAWN = [
    ((109, 103), "gGF0cHNeZ2J0ZXZkZXB1YkpXi2FzfXpnWnt8U3p/eGh7cXdkY2VkVZNubGJLTHJagoNxZFxad1pshm6Dc3CQfg=="),
    ((110, 99), "j2d7WFxUd3aBb2ZbeWlncm5od3WCdHRxemt4cYtpcW5rY2ppcGxqbmqCe3J5enF9YIV6d3p3ZHhsc3Zwbnl8hg=="),
    ((93, 103), "lHhZTGdZRkJdUU9Ndl5jTIFZTVZ8cFNXZHBTVW9iX3BoV3A9Ql9iVWdWR0hUal5bY1dFUlFfX2twcFdHUl9eZg=="),
    ((106, 107), "ZHlXXFhqZY5pZlRWXV+DjWBhZGOAfntwYWNjdXGHiHthWGluZnKIenNpamdlW19vb1lhaFlVWWdiY4R8aGBwXA=="),
    ((94, 112), "Xnx3YmtVW0tZbWdmaFFMTnJ+bF1gY0hOkIiFbl5hWGd/cWdjZWlsbm5rZFJLYHtqZmFvXGFkYkd8amBgVV1wiQ=="),
    ((109, 112), "enBjc11ua193b3F0bWNkY39zdH9ybmhrcX9YWW1ubV9kYGhgbnZsaltXY1llbXd1Z2FdcGh5eWlmaXKGhXiAaQ=="),
    ((101, 104), "gFhfVG9xbISAX1RUd11WYWZ9W3BhZm1TfYBudWBdamBvcHBsamRkf25udniEdHN7XGh0gGRccntpaol5j2xahA=="),
    ((112, 91), "Z2aKU2hibGFmd4ducXFnY1N1jHFwaGJqXXeRiH97X19vY2dheHtnZW9ndmtuc2FjZ1VjcYR7gWJoaWleeGlubg=="),
    ((101, 91), "e2x0aVxlWmFwZXRvZ2hmYWtnbGRXZ1xyZFlbVVdOYnVlXWBeVl5ddGNeTUteVm9ga1VKSmducGBtT0ZRd3dvYw=="),
    ((104, 109), "iW1UW05dXnaKZGZiY21fbG9zZWVnWVR3Y2ZiY15bXGViZ19lSmdkb2ZUZWFUYl9FX2xtbHRteVxebGJlbId1UA=="),
]


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


def test_an_interrupt_ends_the_drawing(tmp_path, monkeypatch):
    drawn = []

    def interrupted(*_):
        drawn.append(time.sleep(0.01))  # as long as a picture takes
        raise KeyboardInterrupt

    monkeypatch.setattr(toy_module, "draw", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_toy(tmp_path / "data", train=1000, test=10)
    assert len(drawn) < 500 and not (tmp_path / "data").exists()


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


def test_drawings_are_those_of_their_version():
    """To two levels: what was measured on them was measured on these."""
    assert toy_module._VERSION == 1, "the version of DRAWN"
    for label, (size, expected) in enumerate(DRAWN):
        picture = draw(*list(CLASSES.values())[label], np.random.default_rng([0, 0, label, 0]))
        assert picture.size == size
        assert np.abs(coarse(picture) - np.frombuffer(base64.b64decode(expected), np.uint8)).max() < 2


def test_silhouettes_have_the_area_of_the_disc():
    """And reach no further than objects are given room for."""
    v, u = np.mgrid[-1.6:1.6:800j, -1.6:1.6:800j]
    for name, (_, silhouette) in CLASSES.items():
        inside = silhouette(u / toy_module._unit(silhouette), v / toy_module._unit(silhouette)) < 0
        assert 3.2**2 * inside.mean() == pytest.approx(np.pi, rel=0.02), name
        assert np.hypot(u, v)[inside].max() <= 1.56, name
