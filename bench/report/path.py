"""The data path as a picture, drawn by hand as SVG: what each stage takes and what passes between them.

Times are those that result files of one GPU say of the stages (``path`` of ``bench/findings.py``), of each stage the
quickest of the newest date; bytes follow from shapes, those of files and of decoded images from the mean over the
images measured.
"""

from bench.findings import PATH_BATCH, PATH_RECIPE, number
from bench.report.results import Result
from run.recipes import RECIPES
from run.training import plan_patches

STAGES = "input", "sample", "gather", "step", "decode"  # the last alone, which need not be there
CONFIG = RECIPES[PATH_RECIPE]
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


def measured(results: list[Result]) -> dict[str, tuple[dict, Result]] | None:
    """{stage: what is said of it, and where} of the GPU measured last of which all is there; None without one."""
    ours = [r for r in results if "path" in r.data and r.machine.get("driver") and r.scale != "smoke"]
    for device in dict.fromkeys(result.machine["device"] for result in ours):
        found = {}
        for stage in STAGES:
            of = [r for r in ours if r.machine["device"] == device and stage in r.data["path"]]
            said = [(result.data["path"][stage], result) for result in of if result.date == of[0].date]
            if said:
                found[stage] = min(said, key=lambda pair: pair[0]["seconds"])
        if found.keys() >= {*STAGES[:4]}:
            return found
    return None


def sizes(images: dict) -> dict[str, float]:
    """Bytes between the stages: of a batch, ``patches`` of a group. ``images``: their means, of the input path."""
    patch, _, keep = plan_patches(CONFIG)
    return {
        "files": PATH_BATCH * images["mean_file_bytes"],
        "decoded": PATH_BATCH * images["mean_height"] * images["mean_width"] * 3,
        "crops": 2 * PATH_BATCH * CONFIG.image_size**2 * 3,
        "boxes": PATH_BATCH * 2 * (16 + 1) + PATH_BATCH * 8,  # with flips, and sample ids
        "numbers": 2 * PATH_BATCH * CONFIG.groups * keep * 4,
        "patches": 2 * PATH_BATCH * keep * 3 * patch**2 * 2,
    }


def draw(results: list[Result]) -> str | None:
    """The picture; None where nothing that can be drawn was measured."""
    found = measured(results)
    if found is None:
        return None
    seconds = {stage: of["seconds"] for stage, (of, _) in found.items()}
    images, newest = found["input"]
    title = f"The data path of ViT-S/16, {PATH_BATCH} images a batch, on one {newest.machine['device']}"
    files = ", ".join(dict.fromkeys(result.path.name for _, result in found.values()))
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" class="data-path" viewBox="0 0 984 334" role="img">',
        f"<title>{title}</title>", f"<style>{STYLE}</style>", _text(8, 22, title, "name", "start"),
        *_stages(seconds, sizes(images), images["threads"]), *_lanes(seconds, 226),
        _text(8, 322, f"Measured {newest.date}: {files}. Bytes follow from shapes.", "small", "start"),
    ]  # fmt: skip
    return "\n".join([*lines, "</svg>\n"])


def _stages(seconds: dict[str, float], moved: dict[str, float], threads: str) -> list[str]:
    """A box for each, arrows with bytes between them, and below what takes how long."""
    (_, _, keep), side = plan_patches(CONFIG), CONFIG.image_size
    boxes = (  # name, two lines, who; what leaves it
        ("files", (f"{PATH_BATCH} JPEGs",), "disk, page cache", "files"),
        ("decode", ("once an image",), "DALI", "decoded"),
        ("augment", ("two views, uint8", f"{side} x {side} px"), "DALI", "boxes"),
        ("sample", (f"{CONFIG.groups} groups of {keep}", "patches a view"), "Triton", "numbers"),
        ("gather", ("kept patches only,", "normalised, bf16"), "Triton", "patches"),
        ("step", ("network, loss,", "backward, update"), "torch.compile", None),
    )
    width, high, gap, top, parts = 122, 78, 45, 72, []
    left = [8 + i * (width + gap) for i in range(len(boxes))]
    for x, (name, lines, who, leaves) in zip(left, boxes, strict=True):
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
    x, y, reach = left[3] - gap - 30, top - 17, 2 * gap + width + 55  # the crops pass over the sampler
    parts.append(f'<path d="M{x} {top}v-17h{reach}v9"/><path class="arrow" d="M{x + reach - 4} {top - 9}l4 8 4-8z"/>')
    parts.append(_text(x + reach / 2, y - 6, f"{number(moved['crops'] / 1e6)} MB", "number"))
    spans = (  # from which box to which
        (1, 2, f"{number(1e3 * seconds['input'])} ms a batch, {threads}"),
        (3, 3, f"{number(1e6 * seconds['sample'])} us a batch"),
        (4, 4, f"{number(1e6 * seconds['gather'])} us a group"),
        (5, 5, f"{number(1e3 * seconds['step'])} ms a group"),
    )
    for first, last, text in spans:
        middle = (left[first] + left[last] + width) / 2
        parts.append(f'<path d="M{left[first]} {top + high + 7}v6h{left[last] + width - left[first]}v-6"/>')
        parts.append(_text(middle, top + high + 29, text, "number"))
    if "decode" in seconds:
        text = f"decoding alone {number(1e3 * seconds['decode'])} ms"
        parts.append(_text((left[1] + left[2] + width) / 2, top + high + 46, text, "small"))
    return parts


def _lanes(seconds: dict[str, float], top: int) -> list[str]:
    """The times of a batch to scale: the input path, which works ahead, above the steps."""
    groups, (loading, sample, gather, step) = CONFIG.groups, (seconds[stage] for stage in STAGES[:4])
    left, right, total = 108, 976, max(loading, groups * step)
    scale = (right - left) / total
    share = f"decode and augment, {loading / (groups * step):.0%} of the time of its {groups} steps"
    parts = [
        f'<rect class="lane" x="{left}" y="{top}" width="{right - left}" height="22"/>',
        f'<rect class="lane" x="{left}" y="{top + 32}" width="{right - left}" height="22"/>',
        _text(8, top + 16, "next batch", anchor="start"), _text(8, top + 48, f"{groups} steps", anchor="start"),
        f'<rect class="input" x="{left}" y="{top}" width="{loading * scale:.1f}" height="22"/>',
        _text(left + loading * scale + 8, top + 16, share, "small", "start"),
    ]  # fmt: skip
    for group in range(groups):  # the step, as measured, includes its gather and its share of the sampling
        x, small = left + group * step * scale, gather + (sample if group == 0 else 0)
        bars = ("step", x + small * scale, (step - small) * scale - 1.5), ("gather", x, max(small * scale, 0.5))
        for name, start, width in bars:
            place = f'x="{start:.2f}" y="{top + 32}" width="{width:.2f}" height="22"'
            parts.append(f'<rect class="{name}" {place}/>')
    small = f"Sampling and gathering (orange) are {(gather + sample / groups) / step:.2%} of a step."
    parts.append(_text(left, top + 72, f"0 to {number(1e3 * total)} ms, to scale. {small}", "small", "start"))
    return parts


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{text}</text>'
