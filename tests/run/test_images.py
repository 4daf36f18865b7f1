"""What there is to train on and to evaluate on, and which of it is refused."""

import dataclasses
import pickle
import shutil

import pytest
import torch
from conftest import photo

from pipeline import Index
from run import images
from run.images import open_data, open_loader
from run.recipes import Config, ImagesConfig
from run.session import CHANGED, GONE, open_output
from tests.run.test_loop import ALONE


@pytest.fixture
def folder(tmp_path):
    """Images of two classes, one of which holds a file that is none."""
    for number in range(6):
        path = tmp_path / "data" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        photo(number, 8, 9).save(path)
    (tmp_path / "data" / "b" / "text.jpg").write_text("no image")
    return tmp_path


def config(folder, **options):
    return ImagesConfig(output=folder / "run", data=folder / "data", **options)


def refused(said, config, **how):
    with pytest.raises(ValueError) as error:
        open_data(config, ALONE, **how)
    assert said in str(error.value) and "expected" in str(error.value)


def test_evaluation_has_classes_of_training_and_with_labels_all_of_them(folder):
    alone = open_data(config(folder), ALONE)
    assert len(alone[0]) == 6 and alone[1] == {} and alone[2] is None and alone[0].classes == ("a", "b")
    for number, names in enumerate((("b",), ("a", "b"), ("b", "c"), ("",))):
        for name in names:
            (folder / f"eval{number}" / name).mkdir(parents=True)
            photo(0, 8, 9).save(folder / f"eval{number}" / name / "x.png")
    for number, labelled in ((0, False), (1, False), (1, True)):
        evaluation = open_data(config(folder, eval_data=folder / f"eval{number}"), ALONE, labelled=labelled)[2]
        assert len(evaluation) == 1 + number
    refused("lacks 1 of the 2 classes", config(folder, eval_data=folder / "eval0"), labelled=True)
    for labelled in (False, True):
        refused("not in", config(folder, eval_data=folder / "eval2"), labelled=labelled)
        refused("has no labels", config(folder, eval_data=folder / "eval3"), labelled=labelled)


def test_the_output_is_no_folder_of_images(folder):
    for options in ({"output": folder / "data"}, {"output": folder / "x" / "..", "eval_data": folder}):
        refused("is the folder of --", dataclasses.replace(config(folder), **options))
    (folder / "loop").symlink_to(folder / "loop")
    open_data(dataclasses.replace(config(folder), output=folder / "loop"), ALONE)  # refused where it is made


def test_labels_are_asked_for_where_they_are_needed(folder):
    photo(9, 8, 9).save(folder / "data" / "loose.png")
    index, bad, _ = open_data(config(folder), ALONE)
    assert len(index) == 7 and not bad
    index, bad, _ = open_data(config(folder), ALONE, labelled=True)
    assert {index.paths[sample]: reason for sample, reason in bad.items()} == {"loose.png": "has no class"}
    flat = dataclasses.replace(config(folder), data=folder / "data" / "a")
    assert len(open_data(flat, ALONE)[0]) == 3
    refused("has no labels", flat, labelled=True)


def test_a_share_of_bad_files_is_refused_here(folder):
    for number in range(20):
        (folder / "data" / "b" / f"{number}.jpg").write_text("no image")
    refused("21 of 27 files cannot be used, at most 20 may", config(folder))
    refused("at most 0 may", config(folder, max_bad=0))
    assert len(open_data(config(folder, max_bad=0.8), ALONE)[0]) == 6


def test_a_run_goes_on_with_the_numbers_that_its_images_had(folder):
    """One gone, one changed, one new; the numbers of the others stay, also where the images are all back."""
    first = config(folder)
    index = open_data(first, ALONE)[0]
    open_output(first, index, ALONE)
    names, kept = list(index.paths), (folder / "data" / "a" / "2.png").read_bytes()
    (folder / "data" / "a" / "2.png").unlink()
    photo(1, 12, 9).save(folder / "data" / "b" / "3.png")
    photo(7, 8, 9).save(folder / "data" / "a" / "0new.png")
    now = open_data(first, ALONE)[0]
    said = r"6 images there, 6 now, 1 gone \(a/2.png\), 1 new .*, 1 changed .*--resume changed"
    with pytest.raises(ValueError, match=said):
        open_output(first, now, ALONE)
    going_on = dataclasses.replace(first, resume="changed")
    index, bad, _ = open_data(going_on, ALONE)
    assert list(index.paths) == names and {names[i]: why for i, why in bad.items()} == {
        "a/2.png": GONE, "b/3.png": CHANGED,
    }  # fmt: skip
    open_output(going_on, index, ALONE)
    (folder / "data" / "a" / "2.png").write_bytes(kept)
    assert [names[i] for i in open_data(going_on, ALONE)[1]] == ["b/3.png"]
    (folder / "run" / "index" / "run.index").unlink()
    with pytest.raises(ValueError, match=r"needs run\.index in its folder index"):
        open_output(first, now, ALONE)
    elsewhere = dataclasses.replace(going_on, output=folder / "other")  # no run: nothing to go on with
    assert len(open_data(elsewhere, ALONE)[0]) == 7 and not open_data(elsewhere, ALONE)[1]


def test_the_generated_images_stand_in_and_the_loader_knows_what_is_bad(folder, monkeypatch):
    monkeypatch.setattr(images, "make_toy", lambda root: (folder / "data", folder / "data"))
    index, _, evaluation = open_data(ImagesConfig(output=folder / "run"), ALONE)
    assert len(index) == len(evaluation) == 6
    options = Config(output=folder / "run", batch_size=2, seed=3, threads=1, max_bad=0.5)
    loader = open_loader(options, ALONE, index, {1: "why"}, image_size=4)
    assert loader.bad == {1: "why"} and loader.batches_per_epoch == 3 and loader.seed == 3
    (batch,) = loader.batches(0, 1)
    assert batch.views[0].shape == (2, 4, 4, 3) and batch.views[0].dtype == torch.uint8


def test_ranks_elsewhere_get_an_index_that_they_can_read(folder):
    """Where nothing may be left for them in a file, as by a dry run, all of it."""
    ranks = dataclasses.replace(ALONE, count=2)
    index = images.scanned(folder / "data", ranks, cache=folder / "cache", trust=False, shared=None)
    given = pickle.dumps(index)
    shutil.rmtree(folder / "cache")
    there = pickle.loads(given)
    assert there.paths == index.paths and there.fingerprint == index.fingerprint


def test_what_an_object_store_takes_is_said(bucket, tmp_path):
    """Of the objects that can be read; nothing where there are none."""
    bucket.files = {"/b/0.jpg": b"bytes"}
    (tmp_path / "list.txt").write_text("s3://b/0.jpg\t\t40\t50\n")
    index = Index.scan(tmp_path / "list.txt")
    said = images.remote_rate(index)
    assert said.startswith("an image of the store takes ") and "so 256 requests at a time bring at most " in said
    bucket.files = {}
    assert images.remote_rate(index) == ""
