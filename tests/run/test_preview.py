"""The contact sheet: it shows the views, patches and boxes that training has, where they are."""

import tarfile

import numpy as np
import pytest
import torch
from conftest import run_program
from PIL import Image

from kernels import patch_overlap
from pipeline import Index, Loader
from run import preview
from run.recipes import RECIPES
from run.training import Training, plan_patches

CONFIG = RECIPES["toy"]
GRID, KEEP = plan_patches(CONFIG)[1:]
SIDE = 192  # 64 px, each three times as large


@pytest.fixture(scope="module")
def shown(photos):
    """Six examples of epoch 1, and the batch and the patch numbers that a run has there."""
    index = Index.scan(photos)
    how = {"image_size": 64, "batch_size": 12, "seed": CONFIG.seed, "device": torch.device("cpu"), "threads": 1}
    loader = Loader(index, CONFIG.augmentation, **how)
    (batch,) = loader.batches(4, 5)
    chosen = Training(CONFIG, torch.device("cpu")).sample(batch, 1)
    return list(preview.examples(index, CONFIG, GRID, KEEP, 6, 1)), batch, chosen


def cell(sheet, column, row):
    """A cell of a block: column 0 holds the whole views."""
    x = 2 * preview.GAP + preview.LEFT + (SIDE + preview.GAP) * column
    y = 40 + (preview.CAPTION + SIDE + preview.GAP) * row + preview.CAPTION
    return np.asarray(sheet)[y : y + SIDE : 3, x : x + SIDE : 3].astype(int)


def test_views_and_lit_patches_are_those_of_training(shown):
    """Whatever the batch size; a lit patch has the pixels of the view, all others are darker."""
    for i, example in enumerate(shown[0]):
        sheet, (batch, chosen) = preview.block(example, GRID, SIDE), shown[1:]
        for view in range(2):
            pixels = batch.views[view][i].numpy().astype(int)
            assert np.array_equal(cell(sheet, 0, view), pixels)
            for group in range(CONFIG.groups):
                there = cell(sheet, 1 + group, view)
                same = (there == pixels).all(2).reshape(8, 8, 8, 8).all((1, 3)).ravel()  # of grid and patch, by turns
                lit = np.zeros(64, bool)
                lit[chosen[view, i, group]] = True
                black = (pixels == 0).all(2).reshape(8, 8, 8, 8).all((1, 3)).ravel()  # dimming leaves that as it is
                assert np.array_equal(same, lit | black) and (there <= pixels).all()
        overlap = patch_overlap(batch.boxes[i : i + 1], batch.flips[i : i + 1], chosen[0, i : i + 1], grid=GRID)
        assert np.array_equal(example.overlap, overlap[0].numpy())


def test_boxes_and_dots_lie_where_the_crops_are(shown):
    example = shown[0][0]
    example.boxes, example.flips = np.array([(10, 20, 15, 25), (0, 0, 5, 5)], np.int32), np.array([True, False])
    example.picture = Image.new("RGB", (80, 60), "white")
    image = np.asarray(preview.source(example, 800, 700))
    assert image.shape == (600, 800, 3)
    blue = np.argwhere((image == preview.COLOURS[0]).all(2))
    assert blue.min(0).tolist() == [100, 200] and blue.max(0).tolist() == [249, 449]
    assert (image[150, 300] == 255).all()  # nothing but the outline
    assert (image[109, 440] == preview.COLOURS[0]).all() and (image[109, 209] == 255).all()  # flipped: on the right
    assert (image[9, 9] == preview.COLOURS[1]).all()


def test_patches_put_back_into_the_picture_overlap_as_the_kernel_says(shown):
    """Counted on a fine raster; boxes whose sides the grid divides, so that patches end on its lines."""
    boxes, flips = np.array([(4, 2, 24, 16), (0, 6, 16, 32)], np.int32), np.array([True, False])
    first = np.random.default_rng(0).permutation(64)[:16].astype(np.int32)

    def covered(view, patches):
        raster = np.zeros((40, 40))
        for a, b, c, d in preview.in_picture(boxes[view], flips[view], patches, GRID).astype(int):
            raster[b:d, a:c] = 1
        return raster

    mine = [(covered(0, first) * covered(1, np.array([j]))).sum() / 8 for j in range(64)]  # 2 x 4 px a patch
    said = patch_overlap(*(torch.from_numpy(a)[None] for a in (boxes, flips, first[None])), grid=GRID)
    assert np.allclose(mine, said[0, 0]) and 0 < np.mean(mine) < 1


def test_program_writes_a_sheet_of_a_folder_and_of_a_tar(photos, tmp_path):
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        for path in sorted(photos.rglob("*.jpg")):
            tar.add(path, path.name)
    sizes = []
    for data, images, name in ((photos, 1, "one.png"), (photos, 3, "three.png"), (tmp_path / "photos.tar", 3, "t.jpg")):
        preview.main(["--data", str(data), "--images", str(images), "--output", str(tmp_path / name)])
        with Image.open(tmp_path / name) as sheet:
            sheet.load()
            sizes.append(sheet.size)
    width = preview.LEFT + 5 * SIDE + 7 * preview.GAP
    height = 40 + 4 * (SIDE + preview.CAPTION + preview.GAP) + 2 * preview.LINE
    assert sizes[1] == sizes[2] == (width, sizes[0][1] + 2 * height) and sizes[0][0] == width


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"--data": "missing"}, "missing"),
        ({"--data": ""}, "--data: expected a name"),
        ({"--data": "."}, "no usable image"),
        ({"--output": "missing/sheet.png"}, "in a folder that exists"),
        ({"--output": "sheet.txt"}, ".png"),
        ({"--output": "folder.png"}, "expected a file"),
        ({"--images": "0"}, "1 to 50"),
        ({"--images": "x"}, "invalid int"),
        ({"--epoch": "-1"}, "0 or more"),
        ({"--recipe": "imagenet"}, "cifar-vit-t"),
    ],
    ids=lambda value: "".join(value.values()) if isinstance(value, dict) else "",
)
def test_bad_command_is_one_line_and_exit_code_2(wrong, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    arguments = {"--data": ".", "--output": "sheet.png"} | wrong
    with pytest.raises(SystemExit) as stopped:
        preview.main([word for pair in arguments.items() for word in pair])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and said in error
    assert not (tmp_path / "sheet.png").exists()


def test_it_is_a_program(tmp_path):
    done = run_program("-m", "run.preview", "--data", tmp_path / "none", "--output", tmp_path / "a.png", check=2)
    assert done.stderr.count("\n") == 1 and "none" in done.stderr
