"""A contact sheet of what training does to a few images: to understand the method, and to find mistakes at a glance.

python -m run.preview --data DIR --recipe imagenet-vit-s --output sheet.png

Views, boxes, patches and overlaps come from the functions that training calls. The source picture is read by Pillow,
and the patches are put back into it by code of this file: where the two disagree, one of them is wrong.
"""

import argparse
import dataclasses
import signal
import sys
import textwrap

if __name__ == "__main__":  # before what takes time: until ``program.run`` takes over, Ctrl-C ends it without a word
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from kernels import patch_overlap
from pipeline import Index, Loader, cache, graph, pictures, stream
from pipeline.headers import printable
from pipeline.paths import argument
from pipeline.toy import make_toy

from . import program
from .images import TOY
from .recipes import RECIPES
from .training import plan_patches, sample_patches

COLOURS = (20, 90, 200), (240, 110, 10)  # of view 1 and view 2
_SHADES = np.array([(236, 241, 249), (95, 155, 225), (10, 35, 95)])  # of an overlap of 0, 1/2 and 1
_INK = (25, 25, 32)
LEFT, GAP, CAPTION, LINE = 400, 24, 22, 20  # pixels: the left column, between cells, a caption, a line of text
MOST = 50  # images on a sheet
_HOW = """\
1. Two random crops of a picture, view 1 (blue) and view 2 (orange), are flipped, recoloured and blurred at random. An \
encoder learns to tell that they are of the same picture. A dot marks the same corner in picture and view.
2. The patches of view 1 are dealt at random into {groups} groups of {keep}. Each group is a training step of its own: \
the encoder sees its patches, here lit, and nothing else of view 1. So one decoded picture feeds {groups} steps.
3. For each group, {keep} of the {patches} patches of view 2 are drawn, with weights (1 - r)^{power:g}. The overlap r \
of a patch is its share that the lit patches of view 1 already show. So a step compares different parts of a picture, \
which takes more than matching pixels.
All is well if the views show what their boxes hold; if the drawn patches (framed in the maps) lie mostly where the \
map is pale; and if, in the last row, where both views' patches are put back into the picture, orange meets blue where \
the map is dark.
"""


@dataclasses.dataclass
class Example:
    """One image of the sheet."""

    title: str
    picture: Image.Image  # upright, of the size in the index
    views: tuple[np.ndarray, np.ndarray]  # uint8 [H,W,3] each
    boxes: np.ndarray  # int32 [2,4] (y, x, h, w)
    flips: np.ndarray  # bool [2]
    drawn: stream.Draw  # of this image alone
    chosen: np.ndarray  # int32 [2,R,K] patch numbers
    overlap: np.ndarray  # float32 [R,N], of the patches of view 2 with each group of view 1
    covered: float  # share of view 2 inside view 1


def examples(index, config, grid, keep, images, epoch):
    """Yield the first images of an epoch as training with ``config`` sees them, whatever its batch size."""
    loader = Loader(
        index, config.augmentation, image_size=config.image_size, batch_size=images, seed=config.seed,
        device=torch.device("cpu"), threads=1,
    )  # fmt: skip
    first = epoch * loader.batches_per_epoch
    (batch,) = loader.batches(first, first + 1)
    for sample, reason in loader.bad.items():
        print(f"replaced: {printable(index.paths[sample])}: {reason}", file=sys.stderr)
    chosen = sample_patches(config, batch, epoch, grid=grid, keep=keep)
    overlap = patch_overlap(batch.boxes, batch.flips, chosen[0], grid=grid)
    everything = torch.arange(grid[0] * grid[1], dtype=torch.int32).expand(images, 1, -1)
    covered = patch_overlap(batch.boxes, batch.flips, everything, grid=grid).mean((1, 2))
    for i, (sample, label) in enumerate(zip(batch.sample.tolist(), batch.label.tolist(), strict=True)):
        height, width = size = index.sizes[sample].tolist()
        title = f"{printable(index.paths[sample])}   {width} x {height} px, number {sample:,} of the index"
        if label >= 0:
            title += f", class {printable(index.classes[label])}"
        picture = Image.fromarray(pictures.read(graph.read(*index.place(sample)).tobytes()))  # upright
        if picture.size != (width, height):
            title = "THE FILE HAS {} x {} px, NOT AS INDEXED: ".format(*picture.size) + title
        yield Example(
            title=title,
            picture=picture.resize((width, height)),  # mostly a copy
            views=tuple(view[i].numpy() for view in batch.views),
            boxes=batch.boxes[i].numpy(),
            flips=batch.flips[i].numpy(),
            drawn=config.augmentation.draw(np.array([size]), np.array([sample]), config.seed, epoch),
            chosen=chosen[:, i].numpy(),
            overlap=overlap[i].numpy(),
            covered=covered[i].item(),
        )


# ---- Cells


def lit(view, chosen, grid):
    """A view uint8 [H,W,3] in which all but the patches ``chosen`` [K] are dimmed."""
    on = np.zeros(grid, bool)
    on.flat[chosen] = True
    on = on.repeat(view.shape[0] // grid[0], 0).repeat(view.shape[1] // grid[1], 1)
    return np.where(on[..., None], view, view // 4)


def in_picture(box, flip, patches, grid):
    """Where patches of a crop lie in the upright picture: [K,4] left, top, right, bottom in its pixels."""
    (y, x, h, w), (row, column) = box, np.divmod(patches, grid[1])
    column = grid[1] - 1 - column if flip else column
    left, top = x + column * w / grid[1], y + row * h / grid[0]
    return np.stack([left, top, left + w / grid[1], top + h / grid[0]], -1)


def source(example, width, height):
    """The picture, fitted into width x height, with the boxes; a dot marks what comes to the top left of the view."""
    image, scale = _part(example, (0, 0, example.picture.height, example.picture.width), width, height)
    pen = ImageDraw.Draw(image)
    for (y, x, h, w), flip, colour in zip(example.boxes * scale, example.flips, COLOURS, strict=True):
        pen.rectangle((x, y, max(x, x + w - 1), max(y, y + h - 1)), outline=colour, width=3)
        pen.circle((x + w - 10 if flip else x + 9, y + 9), 7, colour, "white", 2)
    return image


def overlap_map(example, group, grid, side):
    """The overlap of every patch of view 2 with a group of view 1, as shades; the drawn patches are framed."""
    image = enlarged(_shades(example.overlap[group].reshape(grid)), side)
    pen = ImageDraw.Draw(image)
    for a, b, c, d in in_picture((0, 0, side, side), False, example.chosen[1, group], grid):
        pen.rectangle((a, b, c - 1, d - 1), outline=COLOURS[1], width=1 + (side >= 12 * grid[1]))
    return image


def _shades(overlap):
    """Overlaps in [0, 1] as colours, uint8 [..., 3]."""
    return np.stack([np.interp(overlap, (0, 0.5, 1), channel) for channel in _SHADES.T], -1).astype(np.uint8)


def together(example, group, grid, side):
    """The part of the picture that the crops take up, grey and pale, under the patches of a group of both views."""
    top, left = example.boxes[:, :2].min(0)
    bottom, right = (example.boxes[:, :2] + example.boxes[:, 2:]).max(0)
    image, scale = _part(example, (top, left, bottom, right), side, side)
    image = Image.blend(image.convert("L").convert("RGB"), Image.new("RGB", image.size, "white"), 0.4)
    pen = ImageDraw.Draw(image, "RGBA")
    for view, colour in enumerate(COLOURS):
        patches = in_picture(example.boxes[view], example.flips[view], example.chosen[view, group], grid)
        for a, b, c, d in (patches - [left, top, left, top]) * scale:
            pen.rectangle((a, b, max(a, c - 1), max(b, d - 1)), fill=(*colour, 120), outline=(*colour, 255))
    return image


def _part(example, part, width, height):
    """A part (top, left, bottom, right) of the picture, as large as fits, and by how much it is enlarged."""
    top, left, bottom, right = map(float, part)
    scale = min(width / (right - left), height / (bottom - top))
    target = max(1, round((right - left) * scale)), max(1, round((bottom - top) * scale))
    return example.picture.resize(target, Image.Resampling.LANCZOS, (left, top, right, bottom)), scale


def enlarged(pixels, side):
    return Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST)


# ---- Sheet


def block(example, grid, side):
    """All that the sheet says of one image, in cells of ``side`` pixels."""
    groups = example.chosen.shape[1]
    row = CAPTION + side + GAP
    tops = [40, 40 + row, 40 + 2 * row, 40 + 3 * row + 2 * LINE]
    lefts = [2 * GAP + LEFT + (side + GAP) * i for i in range(groups + 1)]
    sheet = Image.new("RGB", (lefts[-1] + side + GAP, tops[-1] + row), "white")
    pen = ImageDraw.Draw(sheet)
    pen.line((GAP, 2, sheet.width - GAP, 2), (190, 190, 198), 2)
    _write(pen, GAP, 12, example.title, size=17)

    def put(image, x, y, caption, colour=None):
        _write(pen, x, y, caption, colour or _INK)
        if colour:
            pen.rectangle((x - 3, y + CAPTION - 3, x + side + 2, y + CAPTION + side + 2), colour)
        sheet.paste(image, (x, y + CAPTION))

    put(source(example, LEFT, 2 * side + CAPTION + GAP), GAP, tops[0], "the picture, upright, with both boxes")
    _table(pen, example, GAP, tops[2])
    for view, (y, colour) in enumerate(zip(tops[:2], COLOURS, strict=True)):
        flipped = "flipped" if example.flips[view] else "not flipped"
        put(enlarged(example.views[view], side), lefts[0], y, f"view {view + 1}, {flipped}", colour)
        pen.circle((lefts[0] - 12, y + CAPTION + 4), 6, colour)
        for group, x in enumerate(lefts[1:]):
            image = lit(example.views[view], example.chosen[view, group], grid)
            put(enlarged(image, side), x, y, f"group {group + 1}: view {view + 1}", colour)
    for group, x in enumerate(lefts[1:]):
        overlap, drawn = example.overlap[group], example.overlap[group, example.chosen[1, group]]
        put(overlap_map(example, group, grid, side), x, tops[2], f"group {group + 1}: overlap of view 2")
        below = tops[2] + CAPTION + side + 4
        _write(pen, x, below, f"r > 0 in {(overlap > 0).mean():.0%} of all patches")
        _write(pen, x, below + LINE, f"mean r {overlap.mean():.3f}, of drawn {drawn.mean():.3f}")
        put(together(example, group, grid, side), x, tops[3], f"group {group + 1}: in the picture")

    x, y = lefts[0], tops[2]
    _write(pen, x, y, "the maps: overlap r")
    scale = _shades(np.linspace(0, 1, side))[None].repeat(LINE, 0)
    sheet.paste(Image.fromarray(scale), (x, y + CAPTION))
    _write(pen, x, y + CAPTION + LINE + 4, "0: new to the encoder")
    _write(pen, x, y + CAPTION + 2 * LINE + 4, "1: shown by view 1 already")
    _write(pen, x, y + CAPTION + 4 * LINE, "framed: drawn for view 2", COLOURS[1])
    _write(pen, x, tops[3], "the last row: patches of")
    for line, (text, colour) in enumerate(zip(("view 1", "view 2"), COLOURS, strict=True)):
        middle = tops[3] + CAPTION + line * LINE + 10
        pen.rectangle((x, middle - 7, x + 14, middle + 7), tuple(255 - (255 - c) // 2 for c in colour), colour)
        _write(pen, x + 22, middle - 10, text, colour)
    return sheet


def _table(pen, example, x, y):
    """The numbers that were drawn for both views."""
    rows, area = {"": ["view 1", "view 2"]}, example.picture.width * example.picture.height
    for view, (box, pixels) in enumerate(zip(example.boxes.tolist(), example.views, strict=True)):
        drawn = {name: value[0, view] for name, value in vars(example.drawn).items()}
        for name, value in {
            "box, width x height": f"{box[3]} x {box[2]} px",
            "its left top corner": f"{box[1]}, {box[0]}",
            "share of the picture": f"{box[2] * box[3] / area:.1%}",
            "enlarged": f"{pixels.shape[1] / box[3]:.2f} x {pixels.shape[0] / box[2]:.2f}",
            "flipped": "yes" if example.flips[view] else "no",
            "brightness": f"x {drawn['brightness']:.2f}",
            "contrast": f"x {drawn['contrast']:.2f}",
            "saturation": f"x {drawn['saturation']:.2f}" if drawn["saturation"] else "grey",
            "hue": f"{360 * drawn['hue']:+.0f} degrees",
            "blur, sigma": f"{drawn['blur_sigma']:.2f} px" if drawn["blur_sigma"] else "no",
            "solarised": "yes" if drawn["solarise"] else "no",
        }.items():
            rows.setdefault(name, []).append(value)
    for line, (name, values) in enumerate(rows.items()):
        for column, text, colour in zip((0, 170, 285), (name, *values), (_INK, *COLOURS), strict=True):
            _write(pen, x + column, y + line * LINE, text, colour)
    _write(pen, x, y + (len(rows) + 0.5) * LINE, f"{example.covered:.0%} of the area of view 2 lies in view 1")


def head(config, patch, grid, keep, epoch, width):
    """What the sheet is, and how to read it."""
    numbers = {"groups": config.groups, "keep": keep, "patches": grid[0] * grid[1], "power": config.power}
    lines = [
        f"recipe {config.recipe}: {config.model}, crops of {config.image_size} px, {grid[0]} x {grid[1]} patches of "
        f"{patch} px, {keep} of them in each of {config.groups} groups; seed {config.seed}, epoch {epoch}",
        "",
    ]
    for text in _HOW.format(**numbers).splitlines():
        lines += textwrap.wrap(text, width // 7)
    image = Image.new("RGB", (width, 70 + LINE * len(lines)), "white")
    pen = ImageDraw.Draw(image)
    _write(pen, GAP, 16, "Asymmetric Patch Sampling: what training sees", size=28)
    for line, text in enumerate(lines):
        _write(pen, GAP, 56 + line * LINE, text)
    return image


def _write(pen, x, y, text, colour=_INK, size=15):
    pen.text((x, y), text, colour, ImageFont.load_default(size))


# ---- Program


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(message)


def main(arguments: list[str]) -> None:
    parser = _Parser(prog="python -m run.preview", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipe", default="toy", choices=RECIPES, help="default: toy")
    parser.add_argument("--data", type=argument, help="as train.py takes it; default: the generated dataset")
    parser.add_argument("--output", type=argument, required=True, help="the picture to write, .png or .jpg")
    parser.add_argument("--images", type=int, default=4, help=f"1 to {MOST}, the first ones of the epoch; default: 4")
    parser.add_argument("--seed", type=int, default=0, help="as of train.py; default: 0")
    parser.add_argument("--epoch", type=int, default=0, help="counted from 0, which is the default")
    with program.opening("run.preview"):
        options = parser.parse_args(arguments)
        output = options.output
        if not 1 <= options.images <= MOST:
            raise ValueError(f"--images {options.images}: expected 1 to {MOST}")
        if not 0 <= options.epoch < 2**31:
            raise ValueError(f"--epoch {options.epoch}: expected 0 or more")
        if output.suffix.lower() not in (".png", ".jpg", ".jpeg"):
            raise ValueError(f"--output {output}: expected a name that ends in .png, .jpg or .jpeg")
        if not output.parent.is_dir() or output.is_dir():
            raise ValueError(f"--output {output}: expected a file in a folder that exists")
        config = dataclasses.replace(RECIPES[options.recipe], seed=options.seed)
        patch, grid, keep = plan_patches(config)
        data = options.data or make_toy(TOY)[0]
        index = Index.scan(data, cache.place(None, None))
        images = min(options.images, len(index))
        side = max(1, 224 // config.image_size) * config.image_size  # whole pixels stay whole
        blocks = [block(example, grid, side) for example in examples(index, config, grid, keep, images, options.epoch)]
        parts = [head(config, patch, grid, keep, options.epoch, blocks[0].width), *blocks]
        Image.fromarray(np.concatenate(parts)).save(output, quality=95)
    print(f"{images} of {len(index):,} images: {output}")


if __name__ == "__main__":
    program.run("run.preview", main, goes_on="the same command begins anew", smaller="--images")
