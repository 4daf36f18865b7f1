"""Data in COCO's format: what it says is what is trained and evaluated on; what is broken is refused in one line."""

import copy
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline import TooManyBadFiles
from transfer.detection.batches import CocoLoader, EvaluationImages, TrainingImages
from transfer.detection.coco import MAX_PIXELS, CocoData
from transfer.detection.precision import as_results, average_precision
from transfer.detection.scenes import make_scenes

rle = pytest.importorskip("pycocotools.mask")
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools

HEIGHT, WIDTH = 40, 60
BOX = np.zeros((HEIGHT, WIDTH), np.uint8)
BOX[10:30, 20:50] = 1
POLYGON = [[20, 10, 50, 10, 50, 30, 20, 30]]
UNCOMPRESSED = {"size": [HEIGHT, WIDTH], "counts": [20 * HEIGHT + 10, *[20, HEIGHT - 20] * 29, 20, 10 * HEIGHT + 10]}
COMPRESSED = {"size": [HEIGHT, WIDTH], "counts": rle.encode(np.asfortranarray(BOX))["counts"].decode()}
# The same but for the bits above the five of each last part of a number, which pycocotools would read as "goes on".
BELOW = "".join(chr(ord(c) - 32) if ord(c) < 80 else c for c in COMPRESSED["counts"])


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


@pytest.mark.parametrize("dy", (-31, -30, -29, 0, HEIGHT - 11, HEIGHT - 10, HEIGHT))
@pytest.mark.parametrize("dx", (-51, -50, -49, 0, WIDTH - 21, WIDTH - 20, WIDTH))
def test_objects_outside_their_image_are_not_usable(stored, dx, dy):
    """The box and the polygon of columns 20 to 50 and rows 10 to 30, moved: of either, something has to be in it."""
    inside = -50 < dx < WIDTH - 20 and -30 < dy < HEIGHT - 10
    moved = [[v + (dy if i % 2 else dx) for i, v in enumerate(POLYGON[0])]]
    for box, shape in (((20 + dx, 10 + dy), moved), ((20 + dx, 10 + dy), POLYGON), ((20, 10), moved)):
        data = stored(GOOD | {"annotations": [annotation(0, 5, shape, bbox=[*box, 30, 20])]})
        assert (data.usable, data.unusable) == (inside, not inside)
        assert len(data.masks(0)[0]) == inside


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


def test_what_lies_at_the_limits_is_taken(stored):
    whole = broken(of_first(segmentation=[[-WIDTH, 0, 2 * WIDTH, 0, 5, 2 * WIDTH]], bbox=[0, 0, 0.5, 1]))
    whole["annotations"][2]["segmentation"] = COMPRESSED | {"counts": "P[2"}  # one run of all pixels
    whole["images"][1] |= {"height": 1, "width": MAX_PIXELS}
    whole["images"][2] |= {"height": MAX_PIXELS, "width": 1}
    data = stored(whole | {"annotations": whole["annotations"][:4]})
    assert (data.usable, data.unusable) == (3, 0) and [len(data.objects(n)) for n in range(3)] == [4, 0, 0]


def broken(change):
    whole = copy.deepcopy(GOOD)
    change(whole)
    return whole


def called(name):
    return broken(lambda whole: whole["images"][1].update(file_name=name))


def of_first(**more):
    return lambda whole: whole["annotations"][0].update(more)


@pytest.mark.parametrize(
    ("whole", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "holds a list"),
        (broken(lambda whole: whole.pop("categories")), "no list of categories"),
        (broken(lambda whole: whole["images"].append(3)), r"images\[3\] is 3; expected an object"),
        (broken(lambda whole: whole["images"][1].update(id=5)), r"images\[1\] has its id twice"),
        (broken(lambda whole: whole["images"][1].update(id="5")), "expected an integer"),
        (broken(lambda whole: whole["images"][1].update(id=[5])), r"images\[1\] has its id as \[5\]; expected"),
        (broken(lambda whole: whole["images"][1].update(height=None)), "image 0 has height None; expected int"),
        *((called(name), "has file_name '.*an image") for name in ("a.TAR", "s3://b/0.jpg", "a\0.jpg", "\ud800.jpg")),
        (broken(lambda whole: whole["images"][1].update(width=10**9)), "image 0 has 1000000000 x 40 pixels"),
        (broken(lambda whole: whole["images"][1].update(width=0)), "image 0 has 0 x 40 pixels"),
        (
            broken(lambda whole: whole["images"][1].update(width=MAX_PIXELS + 1, height=1)),
            "image 0 has 178956971 x 1 p",
        ),
        (broken(lambda whole: whole["images"].clear()), "has no images"),
        (broken(lambda whole: whole["categories"].clear()), "has no categories"),
        (broken(lambda whole: whole["categories"][1].update(name="box")), "two of one name"),
        (broken(of_first(image_id=4)), "annotation 0 is of image 4"),
        (broken(of_first(category_id=1)), "annotation 0 is of category 1"),
        (broken(of_first(category_id=[7])), r"annotation 0 has category_id \[7\]; expected int"),
        (broken(of_first(bbox=[1, 2, 3])), r"annotation 0 has bbox \[1, 2, 3\]"),
        (broken(of_first(bbox=[1, 2, 3, float("inf")])), "annotation 0 has bbox"),
        (broken(of_first(bbox={})), "annotation 0 has bbox {}; expected"),
        (broken(of_first(bbox=["1", "2", "3", "4"])), r"annotation 0 has bbox \['1', '2', '3', '4'\]; expected"),
        (broken(of_first(segmentation=None)), "annotation 0 has segmentation None"),
        (broken(of_first(segmentation=[[1, 2, 3, 4, 5]])), "no list of x, y"),
        (broken(of_first(segmentation=[[1, 2, 3, float("nan"), 5, 6]])), "no list of x, y"),
        (broken(of_first(segmentation=[[1, 2, 3, 4, 5, 10**400]])), "no list of x, y"),
        (broken(of_first(segmentation=[[1, 2, 3, 1e9, 5, 6]])), "far beyond its image"),
        (broken(of_first(segmentation=[[1, 2, 3, 2 * WIDTH + 1, 5, 6]])), "from 1 to 121, far beyond its image"),
        (broken(of_first(segmentation=[[1, 2, 3, -WIDTH - 1, 5, 6]])), "from -61 to 6, far beyond its image"),
        (broken(of_first(iscrowd=2)), "annotation 0 has iscrowd 2; expected 0 or 1"),
        (broken(of_first(area=float("nan"))), "annotation 0 has area nan"),
        (broken(of_first(segmentation={"size": [4, 4], "counts": [16]})), r"size \[4, 4\]; expected \[40, 60\]"),
        (broken(of_first(segmentation=UNCOMPRESSED | {"counts": [5, 5]})), "do not make up"),
        (broken(of_first(segmentation=UNCOMPRESSED | {"counts": [-5, HEIGHT * WIDTH + 5]})), "do not make up"),
        (broken(of_first(segmentation=COMPRESSED | {"counts": COMPRESSED["counts"][:-1]})), "do not make up"),
        (broken(of_first(segmentation=COMPRESSED | {"counts": "~" * 40})), "do not make up"),
        (broken(of_first(segmentation=COMPRESSED | {"counts": BELOW})), "do not make up"),
        (broken(of_first(segmentation=COMPRESSED | {"counts": "p[2"})), "do not make up"),  # P[2 would be right
        (broken(of_first(segmentation=COMPRESSED | {"counts": COMPRESSED["counts"] + "P"})), "do not make up"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_annotations_that_are_broken_are_refused(stored, whole, said):
    with pytest.raises(ValueError, match=said):
        stored(whole)


@pytest.mark.parametrize("scale", [(0.3, 0.9), (1.0, 1.0), (1.5, 3.0)])
def test_masks_and_boxes_go_with_the_picture(stored, scale):
    """The object is white on black, wherever scale, crop and flip have put it."""
    images = TrainingImages(stored(GOOD), size=64, scale=scale, seed=3, limit=0)
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


def test_how_large_a_picture_becomes_and_which_part_of_it_is_kept(stored, tmp_path):
    """The longer side is the size times the scale; what exceeds the size is cut, anywhere within the picture."""
    data = stored(GOOD)
    ys, xs = np.mgrid[:HEIGHT, :WIDTH]
    Image.fromarray(np.stack([xs * 4, ys * 6, xs * 0], -1).astype(np.uint8)).save(tmp_path / "0.png")

    def pictures(*scale, epochs=60):
        images = TrainingImages(data, size=64, scale=scale, seed=3, limit=0)
        return [images[epoch, 1][0].numpy().astype(int) for epoch in range(epochs)]

    assert {image.shape for image in pictures(0.5, 0.5, epochs=3)} == {(3, 21, 32)}
    assert {image.shape for image in pictures(1.2, 1.2, epochs=3)} == {(3, 51, 64)}
    longest = [max(image.shape) for image in pictures(0.3, 0.9)]
    assert 19 <= min(longest) <= 22 and 54 <= max(longest) <= 58 and 35 < np.mean(longest) < 42
    first, flipped = [], []
    for image in pictures(2.0, 2.0):  # 30 x 30 of 60 x 40 pixels
        assert image.shape == (3, 64, 64)
        across, down = image[0, 0], image[1, :, 0]
        flipped.append(across[0] > across[-1])
        across = across[::-1] if flipped[-1] else across
        assert all(
            (np.diff(ramp) >= 0).all() and np.ptp(ramp) >= 0.9 * 29 * per for ramp, per in ((across, 4), (down, 6))
        )
        first.append([round(across[0] / 4), round(down[0] / 6)])
    assert 15 < sum(flipped) < 45
    (left, top), (right, bottom) = np.min(first, 0), np.max(first, 0)
    assert left <= 2 and 28 <= right <= 30 and (top, bottom) == (0, 10)


def test_pictures_are_made_smaller_as_pillow_does(stored, tmp_path):
    data = stored(GOOD)
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8))
    noise.save(tmp_path / "0.png")
    expected = np.asarray(noise.resize((15, 10), Image.Resampling.BILINEAR)).astype(float).transpose(2, 0, 1)
    trained = TrainingImages(data, size=15, scale=(1, 1), seed=3, limit=0)[0, 1][0].numpy()
    position, whole, reason = EvaluationImages(data, size=15)[1]
    assert (position, reason) == (1, "") and np.abs(whole.numpy() - expected).mean() < 0.6
    assert min(np.abs(image - expected).mean() for image in (trained, trained[:, :, ::-1])) < 0.6

    Image.new("RGB", (60, 1)).save(tmp_path / "0.png")
    whole = copy.deepcopy(GOOD)
    whole["images"][1]["height"] = 1
    (tmp_path / "thin.json").write_text(json.dumps(whole))
    thin = CocoData(tmp_path / "thin.json", tmp_path)
    assert EvaluationImages(thin, size=15)[1][1].shape == (3, 1, 15)
    assert TrainingImages(thin, size=15, scale=(1, 1), seed=3, limit=0)[0, 1][0].shape == (3, 1, 15)


def test_images_that_cannot_be_read_are_named(stored, tmp_path):
    data = stored(GOOD)
    (tmp_path / "5.png").write_bytes(b"no image")
    turned = Image.Exif()
    turned[274] = 6
    Image.new("RGB", (HEIGHT, WIDTH)).save(tmp_path / "0.png", exif=turned)  # upright it has the size that it should
    Image.new("RGB", (WIDTH, HEIGHT)).save(tmp_path / "9.png", exif=turned)
    images = TrainingImages(data, size=64, scale=(1, 1), seed=0, limit=2)
    assert list(images[0, 0][2]) == [0] and not images[0, 1][2]
    assert list(images[0, 2][2]) == [2, 0]  # the first image comes after the last
    whole = EvaluationImages(data, size=64)
    assert whole[0][1] is None and whole[1][1].shape == (3, 43, 64)
    wrong = "is 40 pixels wide and 60 high, not 60 and 40 as annotated"
    assert whole[2][2] == wrong and data.check() == {0: "not an image", 2: wrong}
    (tmp_path / "0.png").unlink()
    for limit in (0, 1):
        few = TrainingImages(data, size=64, scale=(1, 1), seed=0, limit=limit)
        assert few[0, 0][0] is None and list(few[0, 0][2]) == [*range(limit + 1)]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return CocoData(*make_scenes(tmp_path_factory.mktemp("scenes") / "data", train=10, evaluation=1)["train"])


def loader(data, batch_size, **more):
    settings = {"size": 32, "scale": (0.5, 2.0), "seed": -1, "device": torch.device("cpu"), "workers": 0} | more
    return CocoLoader(data, batch_size=batch_size, **settings)


def test_batches_pass_over_all_images_and_go_on_anywhere(scenes):
    whole = [loader(scenes, 3).samples(number) for number in range(9)]
    for epoch in range(3):
        places = [at for batch in whole[3 * epoch : 3 * epoch + 3] for at in batch]
        assert len(set(places)) == 9 and set(places) <= set(range(10))
    assert [loader(scenes, 3).samples(number) for number in (7, 4)] == [whole[7], whole[4]]
    assert whole[:3] != whole[3:6]
    one, *parts = loader(scenes, 4), *(loader(scenes, 4, rank=rank, ranks=2) for rank in (0, 1))
    for number in range(6):
        assert sorted([*parts[0].samples(number), *parts[1].samples(number)]) == sorted(one.samples(number))
    for batch_size, ranks in ((11, 1), (5, 2)):
        with pytest.raises(ValueError, match=f"--batch-size {batch_size}: expected"):
            loader(scenes, batch_size, ranks=ranks)


def test_bad_images_give_the_same_batches_known_or_not(scenes, tmp_path):
    """The next one stands in, found by a worker or, when the run goes on, skipped; too many end it."""
    shutil.copytree(scenes.annotations.parent, tmp_path / "data")
    data = CocoData(tmp_path / "data" / "train.json", tmp_path / "data" / "train")
    for position in (3, 4):
        (data.root / data.paths[position]).write_bytes(b"no image")
    finding, knowing = loader(data, 5), loader(data, 5, workers=1)
    found = list(finding.batches(0, 4))
    assert finding.bad.keys() == {3, 4}
    knowing.bad.update(finding.bad)
    for one, other in zip(found, knowing.batches(0, 4), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
        assert all(torch.equal(a["boxes"], b["boxes"]) for a, b in zip(one[1], other[1], strict=True))
    assert not {3, 4} & {position for number in range(4) for position in knowing.samples(number)}
    for share in (0.0, 1.0):
        with pytest.raises(TooManyBadFiles, match=r"10 images in .* at most [09] may: 0000\d.jpg: "):
            for path in data.paths if share else []:
                (data.root / path).write_bytes(b"no image")
            list(loader(data, 5, max_bad=share).batches(0, 2))
