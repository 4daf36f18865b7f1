"""Data in COCO's format: what it says is what is trained and evaluated on; what is broken is refused in one line."""

import copy
import json

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.coco import Batches, CocoData, EvaluationImages, TrainingImages
from pipeline.scenes import KINDS, make_scenes
from run.coco import as_results, average_precision

rle = pytest.importorskip("pycocotools.mask")
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools

HEIGHT, WIDTH = 40, 60
BOX = np.zeros((HEIGHT, WIDTH), np.uint8)
BOX[10:30, 20:50] = 1
POLYGON = [[20, 10, 50, 10, 50, 30, 20, 30]]
UNCOMPRESSED = {"size": [HEIGHT, WIDTH], "counts": [20 * HEIGHT + 10, *[20, HEIGHT - 20] * 29, 20, 10 * HEIGHT + 10]}
COMPRESSED = {"size": [HEIGHT, WIDTH], "counts": rle.encode(np.asfortranarray(BOX))["counts"].decode()}


def annotation(number, image, shape=None, category=7, **more):
    whole = {"id": number, "image_id": image, "category_id": category, "bbox": [20, 10, 30, 20], "area": 600}
    return whole | {"iscrowd": 0, "segmentation": POLYGON if shape is None else shape} | more


GOOD = {
    "images": [{"id": n, "file_name": f"{n}.png", "height": HEIGHT, "width": WIDTH} for n in (5, 0, 9)],
    "categories": [{"id": 7, "name": "box"}, {"id": 3, "name": "bottle"}],
    "annotations": [
        annotation(0, 5), annotation(1, 5, UNCOMPRESSED, category=3), annotation(2, 5, COMPRESSED),
        annotation(3, 5, UNCOMPRESSED, iscrowd=1), annotation(4, 9, [[1, 1, 5, 5]]),
        annotation(5, 9, bbox=[3, 3, 0, 9]),
    ],
}  # fmt: skip


@pytest.fixture
def stored(tmp_path):
    """A function that writes annotations, with images where the box of the masks is white, and reads them."""

    def store(whole):
        for image in GOOD["images"]:
            pixels = np.repeat(BOX[..., None] * 255, 3, 2)
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / image["file_name"])
        (tmp_path / "annotations.json").write_text(whole if isinstance(whole, str) else json.dumps(whole))
        return CocoData(tmp_path / "annotations.json", tmp_path)

    return store


def test_masks_of_all_forms_are_the_same(stored):
    data = stored(GOOD)
    assert data.categories == {3: "bottle", 7: "box"}
    labels, masks = data.masks(0)
    assert labels.tolist() == [2, 1, 2]  # the crowd is left out
    assert torch.equal(masks, torch.from_numpy(BOX).expand(3, -1, -1))
    for image in (1, 2):  # nothing is in the one, nothing that has an area in the other
        labels, masks = data.masks(image)
        assert len(labels) == 0 and masks.shape == (0, HEIGHT, WIDTH)
    assert data.unusable == 2


def test_what_is_there_found_where_it_is_gives_100_percent(stored):
    """Also the object whose annotation has id 0, which pycocotools would not count, and beside a crowd."""
    whole = copy.deepcopy(GOOD)
    whole["annotations"] = whole["annotations"][:4]  # without those that nothing can find
    data = stored(whole)
    labels, masks = data.masks(0)
    boxes = torch.tensor([[20.0, 10.0, 50.0, 30.0]]).expand(3, -1)
    found = {"boxes": boxes, "labels": labels, "masks": masks.bool(), "scores": torch.full((3,), 0.9)}
    results = as_results(found, 5, list(data.categories))
    figures = average_precision(data, results)
    assert figures["box_AP"] == figures["mask_AP"] == figures["mask_AP_small"] == pytest.approx(100)
    assert figures["box_AP_large"] is None
    assert average_precision(data, results[:2])["box_AP"] == pytest.approx(75, abs=0.6)  # the bottle, one of two boxes
    assert average_precision(data, [])["mask_AP50"] == 0

    # What is found where nothing is counts by its size: that of its box is medium, that of its mask small.
    thin = torch.zeros(3, HEIGHT, WIDTH, dtype=torch.bool)
    thin[:, :2] = thin[:, :, :2] = True
    wrong = found | {
        "boxes": torch.tensor([[0.0, 0.0, 60.0, 40.0]]).expand(3, -1),
        "masks": thin,
        "scores": torch.ones(3),
    }
    figures = average_precision(data, results + as_results(wrong, 5, list(data.categories)))
    assert figures["box_AP_small"] == pytest.approx(100) and figures["mask_AP_small"] < 70


def test_compressed_masks_of_any_shape(stored):
    rng = np.random.default_rng(0)
    masks = np.stack([rng.random((HEIGHT, WIDTH)) < share for share in (0.01, 0.1, 0.5, 0.9, 0.99)]).astype(np.uint8)
    masks[0, :, 20:] = 0  # a last run that is much longer than the others
    shapes = [rle.encode(np.asfortranarray(mask)) for mask in masks]
    shapes = [shape | {"counts": shape["counts"].decode()} for shape in shapes]
    whole = GOOD | {"annotations": [annotation(n, 9, shape) for n, shape in enumerate(shapes)]}
    assert torch.equal(stored(whole).masks(2)[1], torch.from_numpy(masks))


def broken(change):
    whole = copy.deepcopy(GOOD)
    change(whole)
    return whole


def of_first(**more):
    return lambda whole: whole["annotations"][0].update(more)


@pytest.mark.parametrize(
    ("whole", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "holds a list"),
        (broken(lambda whole: whole.pop("categories")), "no list of categories"),
        (broken(lambda whole: whole["images"].append(3)), r"images\[3\] has its id as None"),
        (broken(lambda whole: whole["images"][1].update(id=5)), r"images\[1\] has its id twice"),
        (broken(lambda whole: whole["images"][1].update(id="5")), "expected an integer"),
        (broken(lambda whole: whole["images"][1].update(height=None)), "image 0 has height None; expected int"),
        (broken(lambda whole: whole["images"][1].update(width=10**9)), "image 0 has 40 x 1000000000 pixels"),
        (broken(lambda whole: whole["images"][1].update(file_name="gone.png")), "1 of the 3 images .* gone.png"),
        (broken(lambda whole: whole["categories"][1].update(name="box")), "two of one name"),
        (broken(of_first(image_id=4)), "annotation 0 is of image 4"),
        (broken(of_first(category_id=1)), "annotation 0 is of category 1"),
        (broken(of_first(category_id=[7])), r"annotation 0 has category_id \[7\]; expected int"),
        (broken(of_first(bbox=[1, 2, 3])), r"annotation 0 has bbox \[1, 2, 3\]"),
        (broken(of_first(bbox=[1, 2, 3, float("inf")])), "annotation 0 has bbox"),
        (broken(of_first(segmentation=None)), "annotation 0 has segmentation None"),
        (broken(of_first(segmentation=[[1, 2, 3, 4, 5]])), "no list of x, y"),
        (broken(of_first(segmentation=[[1, 2, 3, float("nan"), 5, 6]])), "no list of x, y"),
        (broken(of_first(segmentation=[[1, 2, 3, 4, 5, 10**400]])), "no list of x, y"),
        (broken(of_first(segmentation=[[1, 2, 3, 1e9, 5, 6]])), "far beyond its image"),
        (broken(of_first(segmentation={"size": [4, 4], "counts": [16]})), r"size \[4, 4\]; expected \[40, 60\]"),
        (broken(of_first(segmentation=UNCOMPRESSED | {"counts": [5, 5]})), "do not make up"),
        (broken(of_first(segmentation=UNCOMPRESSED | {"counts": [-5, HEIGHT * WIDTH + 5]})), "do not make up"),
        (broken(of_first(segmentation=COMPRESSED | {"counts": COMPRESSED["counts"][:-1]})), "do not make up"),
        (broken(of_first(segmentation=COMPRESSED | {"counts": "~" * 40})), "do not make up"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_annotations_that_are_broken_are_refused(stored, whole, said):
    with pytest.raises(ValueError, match=said):
        stored(whole)


@pytest.mark.parametrize("scale", [(0.3, 0.9), (1.0, 1.0), (1.5, 3.0)])
def test_masks_and_boxes_go_with_the_picture(stored, scale):
    """The object is white on black, wherever scale, crop and flip have put it."""
    images = TrainingImages(stored(GOOD), size=64, scale=scale, seed=3)
    seen = 0
    for epoch in range(30):
        image, target, bad = images[epoch, 0]
        assert image.dtype == torch.uint8 and max(image.shape[1:]) <= 64 and not bad
        white = image[0] > 127
        for mask, box in zip(target["masks"], target["boxes"], strict=True):
            assert (mask.bool() ^ white).sum() <= 2 * sum(white.shape)  # an edge of a pixel
            ys, xs = np.nonzero(mask.numpy())
            assert box.tolist() == [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
        assert len(target["boxes"]) == len(target["labels"]) == len(target["masks"])
        assert target["boxes"].dtype == torch.float32
        seen += len(target["masks"])
        again, also, _ = images[epoch, 0]
        assert torch.equal(image, again) and torch.equal(target["masks"], also["masks"])
    assert seen > 60 and len({images[epoch, 0][0].numpy().tobytes() for epoch in range(30)}) > (
        1 if scale[1] == 1 else 20
    )
    assert images[0, 1][1]["boxes"].shape == (0, 4)


def test_images_that_cannot_be_read_are_named(stored, tmp_path):
    data = stored(GOOD)
    (tmp_path / "5.png").write_bytes(b"no image")
    turned = Image.Exif()
    turned[274] = 6
    Image.new("RGB", (HEIGHT, WIDTH)).save(tmp_path / "0.png", exif=turned)  # upright it has the size that it should
    Image.new("RGB", (WIDTH, HEIGHT)).save(tmp_path / "9.png", exif=turned)
    images = TrainingImages(data, size=64, scale=(1, 1), seed=0)
    assert list(images[0, 0][2]) == ["5.png"] and not images[0, 1][2]
    assert list(images[0, 2][2]) == ["9.png", "5.png"]  # the first image comes after the last
    whole = EvaluationImages(data, size=64)
    assert whole[0][1] is None and whole[1][1].shape == (3, 43, 64)
    assert "60 x 40 pixels, not 40 x 60" in whole[2][2]
    (tmp_path / "0.png").unlink()
    with pytest.raises(ValueError, match="images in a row"):
        images[0, 0]


def test_batches_pass_over_all_images_and_go_on_anywhere():
    whole = list(Batches(10, 3, seed=-1, start=0, end=9))
    for epoch in range(3):
        places = [at for batch in whole[3 * epoch : 3 * epoch + 3] for at in batch]
        assert {e for e, _ in places} == {epoch} and len({at for _, at in places}) == 9
    assert list(Batches(10, 3, seed=-1, start=4, end=9)) == whole[4:]
    assert whole[:3] != [[(0, at) for _, at in batch] for batch in whole[3:6]]
    ranks = [list(Batches(12, 4, seed=1, start=0, end=6, rank=rank, ranks=2)) for rank in (0, 1)]
    for parts, batch in zip(zip(*ranks, strict=True), Batches(12, 4, seed=1, start=0, end=6), strict=True):
        assert sorted(parts[0] + parts[1]) == sorted(batch)


def test_scenes_are_what_their_annotations_say(tmp_path):
    places = make_scenes(tmp_path / "scenes", train=16, evaluation=8)
    data = CocoData(*places["train"])
    assert list(data.categories.values()) == list(KINDS) and data.unusable == 0
    counts = [len(data.objects(position)) for position in range(16)]
    assert counts[7] == counts[15] == 0 and sum(counts) > 16
    for position in range(16):
        image, (_, masks) = data.read(position).float(), data.masks(position)
        for mask, one in zip(masks.bool(), data.objects(position), strict=True):
            assert mask.sum() == one["area"]
            assert image[:, mask].std() > 2 * image[:, ~masks.bool().any(0)].std()  # a pattern before a soft background
    places_again = make_scenes(tmp_path / "again", train=16, evaluation=8)
    assert all(
        a[0].read_bytes() == b[0].read_bytes() for a, b in zip(places.values(), places_again.values(), strict=True)
    )
