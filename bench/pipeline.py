"""The input path alone, from files to both augmented views, as ``pipeline.Loader`` gives them.

On a CPU three tables: this loader against what else there is, in images per second and processor time; what each stage
of the graph costs; how far its pixels are from torchvision's and Pillow's. On a GPU one: how many threads it wants.

``--images`` is what ``--data`` of train.py takes; otherwise JPEGs of 375 x 500 px are generated, smooth with some
noise (quality 90, about the bytes of a photograph of that size).
"""

import argparse
import collections
import contextlib
import dataclasses
import itertools
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps
from torch.profiler import ProfilerActivity, profile

from bench import environment
from bench.findings import PATH_BATCH, PATH_RECIPE, bar, finding, number, plot
from bench.timing import NO_KERNEL
from pipeline import Augmentation, Index, Loader, evaluation_batches, graph
from pipeline.loader import refuse_too_many
from run import quiet
from run.program import opening
from run.ranks import Ranks
from run.recipes import RECIPES
from run.session import named

TIMES = "times this loader's CPU"
AHEAD = 4  # batches at either end that the clock of images per second leaves out: no loader works further ahead


@contextlib.contextmanager
def folder_of_images(given: Path | None, count: int):
    """The folder given, or one with ``count`` generated images that goes away afterwards, and its index. What is wrong
    with the one given is said in a line, with exit code 2."""
    if given is not None:
        with opening("bench"):
            index = Index.scan(given)
        yield given, index
        return
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda number: generate(Path(folder) / f"{number:05}.jpg", number), range(count)))
        yield Path(folder), Index.scan(Path(folder))


def decodable(index: Index, count: int, **openers: Callable[[str], Any]) -> Index:
    """The index without those of its first ``count`` images that this project's reader does not decode, or one of the
    ``openers``, by the names of their packages; they are named on stderr. TooManyBadFiles as in training."""
    done, threads = 0, len(os.sched_getaffinity(0))

    def reason(i):
        for name, opener in openers.items():
            try:
                opener(index.file(i))
            except Exception:  # both have many kinds of them
                return f"{name} does not decode it"

    while done < (stop := min(count, len(index))):
        samples, bad = np.arange(done, stop), {}
        how = {"image_size": 32, "batch_size": 64, "device": torch.device("cpu"), "threads": threads}
        with quiet.decoder():
            collections.deque(evaluation_batches(index, samples, bad=bad, **how), maxlen=0)
        with ThreadPoolExecutor(threads) as pool:
            bad = {i: why for i, why in zip(samples.tolist(), pool.map(reason, samples), strict=True) if why} | bad
        refuse_too_many(bad, index, RECIPES[PATH_RECIPE].max_bad)
        if bad:
            print(f"left out: {named((index.paths[i], why) for i, why in bad.items())}", file=sys.stderr)
        index, done = index.without(bad), stop - len(bad)
    return index


def opened(path: str) -> Image.Image:
    """As torchvision's folders of images open one."""
    with Image.open(path) as image:
        return image.convert("RGB")


def tensor(path: str) -> torch.Tensor:
    """As torchvision reads one by itself: uint8 [3,H,W]."""
    from torchvision.io import decode_image, read_file

    return decode_image(read_file(path), mode="RGB")


def generate(path: Path, seed: int, height: int = 375, width: int = 500, progressive: bool = False) -> None:
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
    picture = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    noisy = picture + rng.integers(-12, 13, picture.shape, dtype=np.int16)
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=90, progressive=progressive)


def options_of(subject: str, description: str) -> argparse.ArgumentParser:
    """The options of the two subjects that read images."""
    parser = environment.parser(subject, description)
    parser.add_argument("--images", type=Path, help="as --data of train.py; default: generated ones")
    parser.add_argument("--recipe", choices=RECIPES, default="imagenet-vit-s")
    parser.add_argument("--batch-size", type=int, default=512, help="images")
    return parser


def without_dali() -> str:
    """Why DALI cannot be imported here; "" where it can."""
    try:
        import nvidia.dali  # noqa: F401
    except ImportError as error:
        return f"DALI cannot be imported: {error}"
    return ""


def skip(options: argparse.Namespace, reason: str) -> int:
    environment.save(options, {"not_run": reason, "findings": [finding(options.subject, f"not run: {reason}")]})
    print(f"not run: {reason}")
    return 0


def main(arguments: list[str]) -> int:
    parser = options_of("pipeline", "Decoded and augmented images per second.")
    device = environment.device()
    on_gpu = device.type == "cuda"
    parser.add_argument(
        "--batches", type=int, default=40 if on_gpu else 10, help="timed ones of each, on a CPU in 5 rounds"
    )
    parser.set_defaults(batch_size=512 if on_gpu else 128)
    options = parser.parse_args(arguments)
    if reason := without_dali():
        return skip(options, reason)
    cores = len(os.sched_getaffinity(0))
    config, batch = RECIPES[options.recipe], options.batch_size
    batches, rounds, looked_at = options.batches, 1 if on_gpu else 5, 100
    if options.smoke:
        batch, batches, rounds, looked_at = 8, 1, 1, 4
    with folder_of_images(options.images, 4 * batch) as (_, index):
        batch = min(batch, len(index))
        if options.images and not on_gpu and read_by_dali(index):
            used = rounds * (max(1, batches // rounds) + 2 * AHEAD) * batch
            index = decodable(index, max(used, looked_at), Pillow=opened, torchvision=tensor)
            batch = min(batch, len(index))
        sampled = range(min(100, len(index)))
        file_bytes = [len(graph.read(*index.place(i))) for i in sampled]
        result = {
            "recipe": config.recipe, "image_size": config.image_size, "batch_size": batch, "batches": batches,
            "images": len(index), "source": "given" if options.images else "generated",
            "mean_file_bytes": round(float(np.mean(file_bytes))),
            "mean_height": float(index.sizes[:, 0].mean()), "mean_width": float(index.sizes[:, 1].mean()),
        }  # fmt: skip

        def note(rows):
            result["rates"] = rows
            environment.save(options, result | conclusions(result))

        tables = {"rates": lambda: rates(index, config, batch, batches, rounds, device, cores, note)}
        if not on_gpu and read_by_dali(index):
            tables["stages"] = lambda: stages(index, config, min(looked_at, batch), rounds)
            tables["parity"] = lambda: parity(index, config.image_size, looked_at)
        if on_gpu:
            tables["kernels"] = lambda: kernel_time(index, config, batch, device)
            tables["kernels_filtered"] = lambda: kernel_time(index, config, batch, device, blur=graph._filtered)
        print(f"{config.recipe}, {config.image_size} px, batch {batch}, {len(index)} images")
        for name, table in tables.items():
            result[name] = table()
            print()
            if result[name]:
                environment.print_table(result[name])
            environment.save(options, result | conclusions(result))
    return 0


def conclusions(d: dict) -> dict:
    """Against the alternatives by processor time; on a GPU by numbers of threads, and then for the data path too."""
    recipe, rows = d["recipe"], [row for row in d["rates"] if row["images/s"]]  # older results name one that has none
    what = f"files to both augmented views, {d['image_size']} px, batch {d['batch_size']}"
    headline = f"input, {recipe}" if recipe.startswith("imagenet") else ""
    best = max(rows, key=lambda row: row["images/s"])
    result, unit = {}, "CPU ms/image"
    if all(row["provider"].startswith("this loader") for row in rows):
        unit, threads = "images/s", best["provider"].removeprefix("this loader, ")
        found = finding(what, best[unit], unit=f"{unit} ({threads})", headline=headline)
        if recipe == PATH_RECIPE:
            path = {"seconds": PATH_BATCH / best[unit], "threads": threads}
            path |= {name: d[name] for name in ("mean_file_bytes", "mean_height", "mean_width")}
            result["path"] = {"input": path}
    else:
        ours, *others = rows
        text = f"{number(ours[unit])} ms of processor time an image, {number(ours['images/s'])} images/s"
        first, *more = (f"{row['provider'].split(',')[0]} {number(row[TIMES])} times that time" for row in others)
        for row in d.get("parity", ()):
            if row["operation"] == "crop, flip, resize":
                more.append(f"crop and resize differ from torchvision's by {row['mean']:.2f} levels on the mean")
        found = finding(what, f"{text}; {first}", *more, headline=headline)
    kernels = [
        finding(f"kernels of the input path, {what}{how}", f"{number(row['ms'])} ms a batch")
        for name, how in (("kernels", ""), ("kernels_filtered", ", blur by two filters"))
        for row in d.get(name, ())[:1]
    ]
    name = f"{recipe}, {d['image_size']} px"
    bars = [bar(row["provider"], row[unit], ours=row["provider"].startswith("this")) for row in rows]
    plots = [plot("Input path, both views", unit, {name: bars})]
    if "stages" in d:
        stages = {name: [bar(row["stage"], row["its own"]) for row in d["stages"]]}
        plots.append(plot("Its stages", "CPU ms/image", stages, name="stages"))
    return {"findings": [found, *kernels], "plots": plots, **result}


def read_by_dali(index) -> bool:
    """Whether every image is a file of its own."""
    with index.open() or contextlib.nullcontext() as reader:
        return reader is None


# Images per second and processor time, side by side


def rates(index, config, batch, batches, rounds, device, cores, note) -> list[dict]:
    """One row per provider, or on a GPU per number of threads of this loader: medians of rounds, all in turns.
    ``note`` gets what there is after each of them."""

    def ours(threads):
        loader = Loader(
            index, config.augmentation, image_size=config.image_size, batch_size=batch, seed=0, device=device,
            threads=threads,
        )  # fmt: skip
        return lambda first, last: (both.views[1] for both in loader.batches(first, last))

    if device.type == "cuda":
        threads = sorted({n for n in (4, 6, 8) if n < cores} | {cores})
        providers = {f"this loader, threads: {n}": ours(n) for n in threads}
    else:
        providers = {f"this loader, threads: {cores}": ours(cores)}
        if read_by_dali(index):
            providers |= torchvision_loaders(index, config, batch, cores)
    count = max(1, batches // rounds) + 2 * AHEAD
    measured = {}
    for turn in range(rounds):
        for name, provider in providers.items():
            measured.setdefault(name, []).append(drain(provider(turn * count, (turn + 1) * count), batch))
            rows = []
            for of, values in measured.items():
                rate, cost = (statistics.median(column) for column in zip(*values, strict=True))
                rows.append({"provider": of, "images/s": rate, "CPU ms/image": cost})
                rows[-1][TIMES] = cost / rows[0]["CPU ms/image"]
            note(rows)
    return rows


def kernel_time(index, config, batch, device, batches=8, blur=None) -> list[dict]:
    """The kernels of this loader by their time a batch, those of decoding by the cores included: what it takes away
    from the training. None, and a line, where the profiler may not look at the GPU. ``blur``: of (image, sigma), by
    default the loader's."""
    threads = Ranks(0, 1, 1, device).threads()
    loader = Loader(
        index, config.augmentation, image_size=config.image_size, batch_size=batch, seed=0, device=device,
        threads=threads,
    )  # fmt: skip
    given = loader.batches(0, batches + 2 * AHEAD)
    with patch.object(graph, "_blur", (lambda image, sigma, _: blur(image, sigma)) if blur else graph._blur):
        next(given)  # for which the graph is built
    for _ in range(AHEAD - 1):
        next(given)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(batches):
            next(given)
        torch.cuda.synchronize(device)
    given.close()
    events = [event for event in profiler.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    rows = [
        {"kernel": event.key[:80], "calls": event.count / batches, "ms": event.self_device_time_total / batches / 1e3}
        for event in sorted(events, key=lambda event: -event.self_device_time_total)
    ]
    if not rows:
        print(f"kernels of the input path: {NO_KERNEL}")
        return []
    total = {"kernel": "all, per batch", "calls": sum(r["calls"] for r in rows), "ms": sum(r["ms"] for r in rows)}
    return [total, *rows[:20]]


def drain(batches, batch) -> tuple[float, float]:
    """Images per second, and milliseconds of processor time per image, child processes included."""
    before, ends = processor_seconds(), []
    for view in batches:
        view[-1, -1, -1].tolist()  # waits for the device
        ends.append(time.perf_counter())
    cost = (processor_seconds() - before) / (batch * len(ends)) * 1000
    ends = ends[AHEAD - 1 : -AHEAD]
    return batch * (len(ends) - 1) / (ends[-1] - ends[0]), cost


def processor_seconds() -> float:
    """Of this process and of the children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def torchvision_loaders(index, config, batch, workers):
    """{name: function (first, last) -> second views} of torchvision with a DataLoader: the same law for both views.

    The blur of the first is Pillow's, as MoCo v3 has it; torchvision's takes ten times as long.
    """
    from torchvision import transforms
    from torchvision.transforms import v2

    a, side = config.augmentation, config.image_size
    window = 2 * int(np.ceil(3 * a.blur_sigma[1])) + 1

    def pillow_blur(image):
        return image.filter(ImageFilter.GaussianBlur(np.random.uniform(*a.blur_sigma)))

    def view(t, number, blur, last):
        jitter = t.ColorJitter(a.brightness, a.contrast, a.saturation, a.hue)
        steps = [
            t.RandomResizedCrop(side, a.area, a.aspect, t.InterpolationMode.BILINEAR, antialias=True),
            t.RandomHorizontalFlip(a.flip_p),
            t.RandomApply([jitter], a.jitter_p),
            t.RandomGrayscale(a.grey_p),
        ]
        steps += [t.RandomApply([blur], a.blur_p[number])] if a.blur_p[number] else []
        steps += [t.RandomSolarize(128, a.solarise_p[number])] if a.solarise_p[number] else []
        return t.Compose([*steps, *last])

    def provider(open_image, first_view, second_view):
        def batches(first, last):
            samples = [np.arange(number * batch, (number + 1) * batch) % len(index) for number in range(first, last)]
            files = Files([index.file(i) for i in np.concatenate(samples)], open_image, (first_view, second_view))
            loader = torch.utils.data.DataLoader(files, batch, num_workers=workers, multiprocessing_context="fork")
            yield from (views[1] for views in loader)

        return batches

    v1_views = [view(transforms, n, transforms.Lambda(pillow_blur), [transforms.PILToTensor()]) for n in range(2)]
    v2_views = [view(v2, n, v2.GaussianBlur(window, a.blur_sigma), []) for n in range(2)]
    return {
        f"torchvision on Pillow images, workers: {workers}": provider(opened, *v1_views),
        f"torchvision v2 on tensors, workers: {workers}": provider(tensor, *v2_views),
    }


@dataclasses.dataclass
class Files(torch.utils.data.Dataset):
    """Both views of each file."""

    paths: list[str]
    open_image: object  # path -> image
    views: tuple  # image -> uint8 [3,S,S]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        image = self.open_image(self.paths[i])
        return tuple(view(image) for view in self.views)


# Where the time of this loader's graph goes


def stages(index, config, batch, rounds) -> list[dict]:
    """Processor time of graphs that stop after each stage, with one thread; every row holds those above it."""
    full = config.augmentation.views()
    plain = tuple(graph.View() for _ in full)
    coloured = tuple(graph.Augmented(colour=view.colour) for view in full)
    blurred = tuple(dataclasses.replace(view, solarise=False) for view in full)
    views_of = {"read": None, "decode": None, "crops": plain, "colour": coloured, "blur": blurred, "solarise": full}
    costs, batches = {name: [] for name in views_of}, max(3, 1000 // config.image_size)
    for turn in range(rounds):
        for name, views in views_of.items():
            before = processor_seconds()
            source = fed(index, config, views, batch, range(turn * batches, (turn + 1) * batches))
            with contextlib.suppress(StopIteration):
                pipeline = build(name, source, views, config.image_size, batch)
                while True:
                    pipeline.run()
            costs[name].append((processor_seconds() - before) / (batch * batches) * 1000)
    until = [statistics.median(values) for values in costs.values()]
    own = [after - before for before, after in itertools.pairwise([0.0, *until])]
    return [
        {"stage": name, "CPU ms/image": total, "its own": part, "share": part / until[-1]}
        for name, total, part in zip(views_of, until, own, strict=True)
    ]


def fed(index, config, views, batch, turns):
    """The source of a graph: names of files, and the parameters of ``views``."""
    for turn in turns:
        sample = np.arange(turn * batch, (turn + 1) * batch) % len(index)
        sizes, names = index.sizes[sample], graph.names([index.file(s) for s in sample])
        drawn = config.augmentation.draw(sizes, sample, 0, turn) if views else None
        yield names, *(graph.feeds(views, sizes, drawn) if views else ())


def build(name, source, views, side, batch):
    """The whole graph of ``views`` or, without, one that only reads or decodes."""
    from nvidia.dali import fn, pipeline_def

    settings = {"batch_size": batch, "device_id": None}
    if views:
        return graph.pipeline(lambda: next(source), views, image_size=side, threads=1, **settings)

    @pipeline_def(num_threads=1, **settings)
    def first_stages():
        (encoded,) = fn.external_source(source=lambda: next(source), num_outputs=1, batch=True)
        encoded = fn.io.file.read(encoded, dont_use_mmap=True)
        return encoded if name == "read" else graph.decode(encoded, False)

    return first_stages()


# How far the pixels are from torchvision's and Pillow's

NOTHING = {
    "jitter_p": 1.0, "brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0, "grey_p": 0.0,
    "blur_p": (0.0, 0.0), "solarise_p": (0.0, 0.0),
}  # fmt: skip
# operation: (its options, largest mean difference in levels or None; hue is another operation, see graph.py)
OPERATIONS = {
    "crop, flip, resize": ({}, 0.3),
    "the same, by a box": ({}, 0.3),
    "brightness": ({"brightness": 0.4}, 1.0),
    "contrast": ({"contrast": 0.4}, 1.0),
    "saturation": ({"saturation": 0.4}, 1.0),
    "hue": ({"hue": 0.1}, None),
    "grey": ({"grey_p": 1.0}, 0.3),
    "blur": ({"blur_p": (1.0, 1.0)}, 0.6),
    "solarise": ({"solarise_p": (1.0, 1.0)}, 0.0),
}


def parity(index, side, count) -> list[dict]:
    """Differences in levels of 255 between the CPU graph and torchvision with the same parameters, both views.

    The first row compares with torchvision from the file on. It cuts a crop out before the resize, so that the filter
    meets an edge where the graph's reads the pixel beyond; so does Pillow's own resize of a box, in the second row. The
    others compare with what torchvision makes of the graph's own crop. Of the first ``count`` images.
    """
    import torchvision.transforms.v2.functional as F

    sample = np.arange(min(count, len(index)))

    def made(options):
        config = argparse.Namespace(augmentation=Augmentation(**NOTHING | options))
        views = config.augmentation.views()
        outputs = build("all", fed(index, config, views, len(sample), range(1)), views, side, len(sample)).run()
        drawn = config.augmentation.draw(index.sizes[sample], sample, 0, 0)
        return np.stack([np.array(output.as_tensor()) for output in outputs], 1), drawn

    def reference(name, crop, drawn, at):
        if name in ("brightness", "contrast", "saturation", "hue"):
            return getattr(F, f"adjust_{name}")(crop, float(getattr(drawn, name)[at]))
        if name == "grey":
            return F.rgb_to_grayscale(crop, num_output_channels=3)
        if name == "solarise":
            return F.solarize(crop, 128)
        sigma = float(drawn.blur_sigma[at])
        return F.gaussian_blur(crop, [23, 23], [sigma, sigma])  # Pillow's own is an approximation by boxes

    plain, drawn = made({})
    rows = []
    for name, (options, limit) in OPERATIONS.items():
        got, drawn = (plain, drawn) if not options else made(options)
        away = []
        for i, view in np.ndindex(len(sample), 2):
            if options:
                expected = reference(name, Image.fromarray(plain[i, view]), drawn, (i, view))
            else:
                with Image.open(index.file(i)) as image:
                    upright = ImageOps.exif_transpose(image).convert("RGB")
                y, x, h, w = drawn.boxes[i, view].tolist()
                if name == "the same, by a box":
                    expected = upright.resize((side, side), Image.Resampling.BILINEAR, (x, y, x + w, y + h))
                else:
                    expected = F.resized_crop(upright, y, x, h, w, [side, side])
                expected = F.horizontal_flip(expected) if drawn.flips[i, view] else expected
            away.append(np.abs(got[i, view] - np.asarray(expected).astype(float)))
        means = [x.mean() for x in away]
        rows.append({
            "operation": name, "mean": float(np.mean(means)), "worst image": float(max(means)),
            "worst pixel": float(max(x.max() for x in away)), "limit of the mean": limit,
        })  # fmt: skip
    return rows
