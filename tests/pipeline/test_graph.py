"""The DALI graph against Pillow and torchvision with the same parameters, and what its decoder takes."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as F
from conftest import run_program
from PIL import Image, ImageOps

from pipeline import graph
from pipeline.stream import Draw

S = 48


def photo(height, width, seed=0):
    """A smooth picture with some contrast: uint8 RGB."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def run(path, view, draws, gpu_form=None):
    """One view of the image in ``path`` for every set of parameters in ``draws``: uint8 [m,S,S,3]."""
    with Image.open(path) as image:
        width, height = ImageOps.exif_transpose(image).size
    neutral = dict.fromkeys(("brightness", "contrast", "saturation"), 1)
    neutral |= {"flips": False, "hue": 0, "blur_sigma": 0, "solarise": False}
    columns = {k: np.array([[d.get(k, v)] for d in draws]) for k, v in neutral.items()}
    boxes = np.array([[d.get("boxes", (0, 0, height, width))] for d in draws], np.int32)
    drawn = Draw(boxes=boxes, **{k: v if v.dtype == bool else v.astype(np.float32) for k, v in columns.items()})
    sizes = np.tile(np.array([[height, width]], np.int32), (len(draws), 1))
    batches = iter([([np.frombuffer(str(path).encode(), np.uint8)] * len(draws), *graph.feeds((view,), sizes, drawn))])
    settings = {"image_size": S, "batch_size": len(draws), "threads": 1, "device_id": None}
    pipeline = graph.pipeline(lambda: next(batches), (view,), gpu_form=gpu_form, **settings)
    return np.array(pipeline.run()[0].as_tensor())


@pytest.fixture
def crop(tmp_path):
    """A picture of the output size, so that the resize is the identity: its path and its pixels."""
    image = photo(S, S)
    image.save(tmp_path / "crop.png")
    return tmp_path / "crop.png", image


BOXES = [(0, 0, 200, 300), (20, 31, 97, 120), (150, 200, 50, 100), (3, 5, 40, 30), (0, 299, 200, 1)]


def test_crop_flip_and_resize_are_pillows(tmp_path):
    image = photo(200, 300)
    image.save(tmp_path / "a.png")
    draws = [{"boxes": box, "flips": flip} for box in BOXES for flip in (False, True)]
    for got, d in zip(run(tmp_path / "a.png", graph.View(), draws), draws, strict=True):
        expected = F.resized_crop(image, *d["boxes"], [S, S], antialias=True)
        expected = np.asarray(F.horizontal_flip(expected) if d["flips"] else expected).astype(float)
        assert np.abs(got - expected).mean() < 0.3, d


@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_count_pixels_of_the_upright_image(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    photo(80, 120).save(tmp_path / "a.jpg", exif=exif, quality=95, subsampling=0)
    with Image.open(tmp_path / "a.jpg") as image:
        upright = ImageOps.exif_transpose(image)
    box = (10, 20, 50, 40)
    (got,) = run(tmp_path / "a.jpg", graph.View(), [{"boxes": box}])
    assert np.abs(got - np.asarray(F.resized_crop(upright, *box, [S, S])).astype(float)).mean() < 1


COLOURS = [
    ("brightness", F.adjust_brightness, (0.6, 1.4, 2.0)),
    ("contrast", F.adjust_contrast, (0.6, 1.4, 2.0)),
    ("saturation", F.adjust_saturation, (0.0, 0.6, 1.4, 2.0)),
]


@pytest.mark.parametrize("gpu_form", [False, True], ids=["cpu form", "gpu form"])
@pytest.mark.parametrize("name, reference, factors", COLOURS, ids=[c[0] for c in COLOURS])
def test_colour_is_torchvisions_to_one_level(crop, name, reference, factors, gpu_form):
    path, image = crop
    got = run(path, graph.Augmented(colour=True), [{name: f} for f in factors], gpu_form).astype(int)
    for view, factor in zip(got, factors, strict=True):
        away = np.abs(view - np.asarray(reference(image, factor)))
        assert away.max() <= 1 and (factor or away.mean() < 0.3), (factor, away.mean())


@pytest.mark.parametrize("gpu_form", [False, True], ids=["cpu form", "gpu form"])
def test_colour_in_one_pass_is_the_sequence_of_operations(crop, gpu_form):
    """Brightness, contrast, saturation and hue in this order, in floats, clipped once at the end."""
    path, image = crop
    b, c, s, h = 1.3, 0.7, 1.2, 1 / 3
    x = np.asarray(image).astype(float) * b
    luma = np.array([0.299, 0.587, 0.114])
    x = c * x + (1 - c) * (x @ luma).mean()
    x = s * x + (1 - s) * (x @ luma)[..., None]
    x = x[..., [2, 0, 1]]  # a third of a turn: red becomes green, green blue, blue red; HSV says the same
    draws = [{"brightness": b, "contrast": c, "saturation": s, "hue": h}]
    (got,) = run(path, graph.Augmented(colour=True), draws, gpu_form)
    assert np.abs(got - x.clip(0, 255)).max() <= 0.51


def test_hue_turns_the_way_of_torchvision(crop):
    """A rotation cannot equal the shift in HSV; it must be nearer to it than to no shift or one the other way."""
    path, image = crop
    (got,) = run(path, graph.Augmented(colour=True), [{"hue": 0.1}]).astype(float)
    away = {h: np.abs(got - np.asarray(F.adjust_hue(image, h))).mean() for h in (0.1, 0.0, -0.1)}
    assert away[0.1] < 0.75 * away[0.0] and away[0.1] < 0.4 * away[-0.1], away


@pytest.mark.parametrize("gpu_form", [False, True], ids=["cpu form", "gpu form"])
@pytest.mark.parametrize("probability", [1.0, 0.5])
def test_blur_is_a_gaussian_to_one_level(crop, probability, gpu_form):
    path, image = crop
    sigmas = [0.1, 0.7, 2.0, 7.0] + [0.0] * (probability < 1)
    got = run(path, graph.Augmented(blur=probability), [{"blur_sigma": s} for s in sigmas], gpu_form).astype(int)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    for view, sigma in zip(got, sigmas, strict=True):
        expected = F.gaussian_blur(pixels, [43, 43], [sigma, sigma]) if sigma else pixels
        away = np.abs(view - expected.permute(1, 2, 0).numpy().astype(int))
        assert away.max() <= 1 and away.mean() < 0.6, (sigma, away.mean())


def test_the_widest_blur_is_as_wide_as_the_other_form(crop):
    """The largest sigma that an Augmentation takes, whose window is twelve times the image."""
    wide, other = (
        run(crop[0], graph.Augmented(blur=1), [{"blur_sigma": 100}], form).astype(int) for form in (False, True)
    )
    assert np.abs(wide - other).max() <= 1 and np.ptp(wide, axis=(1, 2)).max() <= 3


def test_solarise_is_exact_and_everything_composes(crop):
    path, image = crop
    view = graph.Augmented(colour=True, blur=0.5, solarise=True)
    got = run(path, view, [{}, {"solarise": True}])
    assert np.array_equal(got[0], np.asarray(image))
    assert np.array_equal(got[1], np.asarray(F.solarize(image, 128)))


def save(path, image, **options):
    image.save(path, **options)


ODD = {  # name: (how it is made, largest mean difference from Pillow; 16 bits are scaled, which Pillow does not)
    "cmyk.jpg": (lambda p: save(p, photo(40, 60).convert("CMYK")), 1),
    "grey.jpg": (lambda p: save(p, photo(40, 60).convert("L")), 1),
    "progressive.jpg": (lambda p: save(p, photo(40, 60), progressive=True), 1),
    "rgba.png": (lambda p: save(p, photo(40, 60).convert("RGBA")), 0),
    "palette.png": (lambda p: save(p, photo(40, 60).convert("P")), 0),
    "bits.png": (lambda p: save(p, photo(40, 60).convert("1")), 0),
    "deep.png": (lambda p: save(p, Image.fromarray(np.arange(2400, dtype=np.uint16).reshape(40, 60) * 20)), 255),
    "a.bmp": (lambda p: save(p, photo(40, 60)), 0),
    "a.webp": (lambda p: save(p, photo(40, 60)), 1),
    "a.tiff": (lambda p: save(p, photo(40, 60)), 0),
    "a.ppm": (lambda p: save(p, photo(40, 60)), 0),
    "dot.jpg": (lambda p: save(p, photo(1, 1)), 1),
    "thin.png": (lambda p: save(p, photo(400, 1)), 0),
    "trailing.jpg": (lambda p: (save(p, photo(40, 60)), p.open("ab").write(b"x" * 100)), 1),
}


def test_odd_files_decode_as_pillow_reads_them(tmp_path):
    for name, (make, tolerance) in ODD.items():
        make(tmp_path / name)
        assert list(graph.probe([str(tmp_path / name)], None)) == [None], name
        (got,) = run(tmp_path / name, graph.View(), [{}])
        expected = F.resize(Image.open(tmp_path / name).convert("RGB"), [S, S])
        assert np.abs(got - np.asarray(expected).astype(float)).mean() <= tolerance + 0.5, name


def test_a_probe_tells_bad_files_from_good_ones(tmp_path):
    """In one pass: a failure must not make the files after it look bad."""
    photo(40, 60).save(tmp_path / "good.jpg")
    data = (tmp_path / "good.jpg").read_bytes()
    (tmp_path / "short.jpg").write_bytes(data[:-2])
    (tmp_path / "half.jpg").write_bytes(data[: len(data) // 2])
    (tmp_path / "text.jpg").write_text("not an image at all")
    (tmp_path / "empty.jpg").touch()
    photo(40, 60).save(tmp_path / "a.gif")
    photo(40, 60).save(tmp_path / "good.png")
    (tmp_path / "short.png").write_bytes((tmp_path / "good.png").read_bytes()[:-60])
    bad = ["short.jpg", "half.jpg", "text.jpg", "empty.jpg", "a.gif", "gone.jpg", "short.png"]
    names = [name for pair in zip(bad, ["good.jpg", "good.png"] * 4, strict=False) for name in pair]
    reasons = dict(zip(names, graph.probe([str(tmp_path / name) for name in names], None), strict=True))
    assert [name for name in names if reasons[name]] == bad
    assert reasons["empty.jpg"] == "empty file" and "No such file" in str(reasons["gone.jpg"])


def test_a_decoder_that_does_not_start_is_no_fault_of_an_image(tmp_path, monkeypatch):
    from nvidia.dali import Pipeline

    def build(pipeline):
        raise RuntimeError("encountered:\nnvImageCodec failure: '#8'")

    photo(40, 60).save(tmp_path / "good.jpg")
    monkeypatch.setattr(Pipeline, "build", build)
    with pytest.raises(RuntimeError, match="'#8'"):
        list(graph.probe([str(tmp_path / "good.jpg")], None))


def test_a_full_folder_of_temporary_files_is_said():
    """In a process of its own: DALI keeps in memory what it could, or could not, translate."""
    done = run_program(
        "-c",
        "import tempfile\n"
        "def full(*_, **__): raise OSError(28, 'No space left on device')\n"
        "tempfile.NamedTemporaryFile = full\n"
        "from pipeline import Augmentation, graph\n"
        "how = {'image_size': 8, 'batch_size': 1, 'threads': 1, 'device_id': None}\n"
        "graph.pipeline(iter([]), Augmentation().views(), **how)\n",
        check=1,
        fresh=True,
    )
    assert "OSError: DALI cannot write to /" in done.stderr and "expected a few kB of room there" in done.stderr


def test_files_are_read_by_names_of_any_kind(tmp_path):
    """As one padded array: short and as long as they may be, of any bytes but NUL and the slash."""
    from nvidia.dali import fn, pipeline_def

    folder = os.fsencode(tmp_path)
    names = [
        folder + b"/" + name for name in (b"a", b" two words ", b"\xff\xfe\n", "é€".encode(), b"?*%20", b"x" * 255)
    ]
    while len(folder) + 256 < 4095:  # the longest path, without the NUL that ends it
        folder += b"/" + b"y" * 200
    os.makedirs(folder)
    names.append(folder + b"/" + b"z" * (4095 - len(folder) - 1))
    for number, name in enumerate(names):
        Path(os.fsdecode(name)).write_bytes(b"%d" % number * (number + 1))
    fed = graph.names([os.fsdecode(name) for name in names])
    assert fed.shape == (len(names), 4095) and fed.dtype == np.uint8

    @pipeline_def(batch_size=len(names), num_threads=1, device_id=None)
    def read():
        return fn.io.file.read(fn.external_source(source=lambda: fed, batch=True), dont_use_mmap=True)

    (contents,) = read().run()
    for number in range(len(names)):
        assert bytes(np.array(contents[number])) == b"%d" % number * (number + 1), names[number]
