"""The data path as a picture, drawn by hand as SVG: what each stage takes and what passes between them.

Times are those of result files of one GPU, the newest of each kind; bytes follow from shapes, those of files and of
decoded images from the mean over the images measured.
"""

from collections.abc import Callable
from typing import NamedTuple

from bench.report.results import Result, number
from run.recipes import RECIPES
from run.training import plan_patches

RECIPE = "imagenet-vit-s"
BATCH = 512
KERNELS = {  # of the files that were measured by hand, the rows that became the code
    "gathering": "gather pair imagenet 14x14 lanes 128 warps 2", "sampling": "sample imagenet 14x14 warps 1"
}  # fmt: skip
STYLE = """
.data-path { --ink: #1f2328; --soft: #59636e; --edge: #8c959f; --fill: #f6f8fa; --lane: #d1d9e0 }
@media (prefers-color-scheme: dark) {
.data-path { --ink: #f0f6fc; --soft: #9198a1; --edge: #656c76; --fill: #151b23; --lane: #3d444d } }
.data-path text { font: 13px system-ui, sans-serif; fill: var(--ink) }
.data-path .small { font-size: 11.5px; fill: var(--soft) } .data-path :is(.name, .number) { font-weight: 600 }
.data-path :is(.box, line, path) { stroke: var(--edge); fill: none } .data-path .box { fill: var(--fill) }
.data-path .arrow { fill: var(--edge) } .data-path .lane { fill: none; stroke: var(--lane) }
.data-path .input { fill: #2f7ed8 } .data-path .gather { fill: #c2410c } .data-path .step { fill: #2da44e }
"""


class Measured(NamedTuple):
    """Seconds for a batch of BATCH images, ``step`` and ``gather`` for one of its groups; where they come from."""

    device: str
    images: dict  # of the input path: mean_file_bytes, mean_height, mean_width
    input: float
    threads: str
    decode: float | None
    sample: float
    gather: float
    step: float
    sources: tuple[Result, ...]


def measured(results: list[Result]) -> Measured | None:
    """The newest figures of one GPU that has them all; None if there is none. ``results``: newest first."""
    for device in dict.fromkeys(result.machine["device"] for result in results if result.on_gpu and result.reported):
        ours = [result for result in results if result.machine["device"] == device and result.reported]
        found = [_newest(ours, find) for find in (_input, _kernels, _step)]
        if all(found):
            (seconds, images, threads, *a), (sample, gather, *b), (step, *c) = found
            decode = _newest(ours, _decode) or [None]
            sources = (*a, *b, *c, *decode[1:])
            return Measured(device, images, seconds, threads, decode[0], sample, gather, step, sources)
    return None


def _newest(results: list[Result], find: Callable) -> tuple | None:
    """The quickest of what ``find`` finds in results of the newest date that has any; the source is last in it."""
    found = [x for result in results if (x := find(result))]
    return min((x for x in found if x[-1].date == found[0][-1].date), key=lambda x: x[0], default=None)


def _input(result: Result):
    data = result.data
    if data.get("recipe") != RECIPE:
        return None
    if result.subject == "input":
        return BATCH / data["images_per_second"], data, f"{data['threads']} threads", result
    if result.subject == "pipeline":
        best = max((row for row in data["rates"] if row["images/s"]), key=lambda row: row["images/s"])
        return BATCH / best["images/s"], data, best["provider"], result
    return None


def _decode(result: Result):
    """Decoding alone; from the file that was measured by hand."""
    if result.subject != "DALI on CPU and GPU":
        return None
    return BATCH / max(v for name, v in result.data["rows"].items() if name.startswith("decode ")), result


def _kernels(result: Result):
    rows = result.data.get("rows")
    if result.subject == "kernel variants":
        return rows[KERNELS["sampling"]]["p50"], rows[KERNELS["gathering"]]["p50"], result
    if result.subject == "kernels":
        ours = {row["operation"]: row["p50_us"] / 1e6 for row in reversed(rows) if row["size"].startswith("imagenet")
                and row["batch"] == BATCH and row["provider"] in ("sample_views", "gather_patches")}  # fmt: skip
        return (ours["sampling"], ours["gathering"], result) if len(ours) == 2 else None
    return None


def _step(result: Result):
    data = result.data
    if result.subject == "step variants":
        row = max((r for r in data["rows"] if r["variant"].startswith("ViT-S")), key=lambda r: r["pairs_per_second"])
        return row["step_seconds"]["p50"], result
    if result.subject == "step" and data["recipe"] == RECIPE and data["batch_size"] == BATCH and "compiled" in data:
        return data["compiled"]["step_seconds"]["p50"], result
    return None


def sizes(found: Measured) -> dict[str, float]:
    """Bytes between the stages: of a batch, ``patches`` of a group."""
    config = RECIPES[RECIPE]
    patch, _, keep = plan_patches(config)
    return {
        "files": BATCH * found.images["mean_file_bytes"],
        "decoded": BATCH * found.images["mean_height"] * found.images["mean_width"] * 3,
        "crops": 2 * BATCH * config.image_size**2 * 3,
        "boxes": BATCH * 2 * (16 + 1) + BATCH * 8,  # with flips, and sample ids
        "numbers": 2 * BATCH * config.groups * keep * 4,
        "patches": 2 * BATCH * keep * 3 * patch**2 * 2,
    }


def draw(results: list[Result]) -> str | None:
    """The picture; None where nothing that can be drawn was measured."""
    found = measured(results)
    if found is None:
        return None
    groups, moved = RECIPES[RECIPE].groups, sizes(found)
    _, _, keep = plan_patches(RECIPES[RECIPE])
    milli, shape = [f"{number(1e3 * x)} ms" for x in (found.input, found.step)], RECIPES[RECIPE].image_size
    boxes = (  # name, two lines, who; what leaves it, with its bytes
        ("files", (f"{BATCH} JPEGs",), "disk, page cache", "files"),
        ("decode", ("once an image",), "DALI", "decoded"),
        ("augment", ("two views, uint8", f"{shape} x {shape} px"), "DALI", "boxes"),
        ("sample", (f"{groups} groups of {keep}", "patches a view"), "Triton", "numbers"),
        ("gather", ("kept patches only,", "normalised, bf16"), "Triton", "patches"),
        ("step", ("network, loss,", "backward, update"), "torch.compile", None),
    )
    width, high, gap, top = 122, 78, 45, 72
    parts = []
    for i, (name, lines, who, leaves) in enumerate(boxes):
        x = 8 + i * (width + gap)
        parts.append(f'<rect class="box" x="{x}" y="{top}" width="{width}" height="{high}" rx="6"/>')
        parts.append(_text(x + width / 2, top + 20, name, "name"))
        parts += [_text(x + width / 2, top + 38 + 15 * j, line, "small") for j, line in enumerate(lines)]
        parts.append(_text(x + width / 2, top + high - 6, who, "small"))
        if leaves:
            x, y = x + width, top + high / 2
            parts.append(f'<line x1="{x + 3}" y1="{y}" x2="{x + gap - 9}" y2="{y}"/>')
            parts.append(f'<path class="arrow" d="M{x + gap - 11} {y - 4}l8 4l-8 4z"/>')
            amount, unit = (moved[leaves] / 1e6, "MB") if moved[leaves] >= 1e6 else (moved[leaves] / 1e3, "kB")
            parts.append(_text(x + gap / 2, y - 8, number(amount), "number"))
            parts.append(_text(x + gap / 2, y + 16, unit, "small"))
    x, y, reach = 8 + 3 * width + 2 * gap - 30, top - 17, 2 * gap + width + 55  # the crops pass over the sampler
    parts.append(f'<path d="M{x} {top}v-17h{reach}v9"/><path class="arrow" d="M{x + reach - 4} {top - 9}l4 8 4-8z"/>')
    parts.append(_text(x + reach / 2, y - 6, f"{number(moved['crops'] / 1e6)} MB", "number"))
    per = 8 + 3 * (width + gap)
    spans = (
        (8 + width + gap, per - gap, f"{milli[0]} a batch, {found.threads}"),
        (per, per + width, f"{number(1e6 * found.sample)} us a batch"),
        (per + width + gap, per + 2 * width + gap, f"{number(1e6 * found.gather)} us a group"),
        (per + 2 * (width + gap), per + 3 * width + 2 * gap, f"{milli[1]} a group"),
    )
    for left, right, text in spans:
        parts.append(f'<path d="M{left} {top + high + 7}v6h{right - left}v-6"/>')
        parts.append(_text((left + right) / 2, top + high + 29, text, "number"))
    if found.decode:
        text = f"decoding alone {number(1e3 * found.decode)} ms"
        parts.append(_text((spans[0][0] + spans[0][1]) / 2, top + high + 46, text, "small"))
    return _svg(found, parts + _lanes(found, groups, 226))


def _lanes(found: Measured, groups: int, top: int) -> list[str]:
    """The times of a batch to scale: the input path, which works ahead, above the steps."""
    left, right, total = 108, 976, max(found.input, groups * found.step)
    scale = (right - left) / total
    input_share = found.input / (groups * found.step)
    parts = [
        f'<rect class="lane" x="{left}" y="{top}" width="{right - left}" height="22"/>',
        f'<rect class="lane" x="{left}" y="{top + 32}" width="{right - left}" height="22"/>',
        _text(8, top + 16, "next batch", anchor="start"), _text(8, top + 48, f"{groups} steps", anchor="start"),
        f'<rect class="input" x="{left}" y="{top}" width="{found.input * scale:.1f}" height="22"/>',
        _text(left + found.input * scale + 8, top + 16, f"decode and augment, {input_share:.0%} of the time of its "
              f"{groups} steps", "small", "start"),
    ]  # fmt: skip
    for group in range(groups):  # the step, as measured, includes its gather and its share of the sampling
        x, small = left + group * found.step * scale, found.gather + (found.sample if group == 0 else 0)
        parts.append(
            f'<rect class="step" x="{x + small * scale:.2f}" y="{top + 32}" '
            f'width="{(found.step - small) * scale - 1.5:.2f}" height="22"/>'
        )
        parts.append(
            f'<rect class="gather" x="{x:.2f}" y="{top + 32}" width="{max(small * scale, 0.5):.2f}" height="22"/>'
        )
    both = found.gather + found.sample / groups
    parts.append(
        _text(left, top + 72, f"0 to {number(1e3 * total)} ms, to scale. Sampling and gathering (orange) are "
              f"{both / found.step:.2%} of a step.", "small", "start")
    )  # fmt: skip
    return parts


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{text}</text>'


def _svg(found: Measured, parts: list[str]) -> str:
    title = f"The data path of ViT-S/16, {BATCH} images a batch, on one {found.device}"
    sources = dict.fromkeys(result.path.name for result in found.sources)
    head = '<svg xmlns="http://www.w3.org/2000/svg" class="data-path" viewBox="0 0 984 334" role="img">'
    lines = [head, f"<title>{title}</title>", f"<style>{STYLE}</style>", *parts]
    lines.insert(3, _text(8, 22, title, "name", "start"))
    foot = f"Measured {found.sources[0].date}: {', '.join(sources)}. Bytes follow from shapes."
    lines.append(_text(8, 322, foot, "small", "start"))
    return "\n".join([*lines, "</svg>\n"])
