"""Sampling, gathering and the update against the alternatives: time, its spread, bytes, share of the copy bandwidth.

The alternatives are written from the formulas in ``kernels/sampling.py``: what one would write with numpy for one image
after the other, and what one would write with torch for the batch. Bytes are those that an operation has to move (each
input and output once), not what an alternative moves beside that. One that fails has a row that says why, and stops no
other; the exit code is 1 then.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
import torch.nn.functional as F

import kernels
from bench import environment
from bench.findings import PATH_BATCH, bar, failure, finding, number, plot, without_figures
from bench.timing import copy_bandwidth, measure_each
from kernels import reference
from kernels.update import Rule, State
from pipeline import Augmentation

Alternatives = dict[str, Callable]  # ours first
POWER = 3.0
WIDTH = 384  # of the embedding: ViT-S
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Size:
    """``side``: patches a side of the grid; ``keep`` K; ``patch`` P in pixels; ``batch`` B images; always 4 groups."""

    name: str
    side: int
    keep: int
    patch: int
    batch: int

    @property
    def grid(self) -> tuple[int, int]:
        return self.side, self.side


SIZES = (
    Size("imagenet 14x14, P 16", 14, 49, 16, 512),
    Size("cifar 16x16, P 2", 16, 64, 2, 512),
    Size("dino 37x37, P 14", 37, 342, 14, 64),
)
SMOKE_SIZES = Size("imagenet 14x14, P 16", 14, 49, 16, 8), Size("cifar 16x16, P 2", 16, 64, 2, 8)
GROUPS = 4
# Parameters of imagenet-vit-s by the units of its clip: embedding, blocks, norm, projector, predictor.
UNITS = 384, *12 * (1_774_464,), 768, 19_415_040, 2_105_344
SMOKE_UNITS = 384, 49_152, 768


def batch_of_boxes(b: int, device: torch.device):
    """Boxes int32 [B,2,4], flips bool [B,2] and sample ids int64 [B] of real random resized crops of 375 x 500 px."""
    sample = np.arange(b)
    drawn = Augmentation().draw(np.tile([[375, 500]], (b, 1)), sample, seed=0, epoch=0)
    return tuple(torch.from_numpy(x).to(device) for x in (drawn.boxes, drawn.flips, sample))


def edges(box, flip, grid):
    """Rectangles of one crop's patches, in pixels of the source: top, left, bottom, right, each float64 [N]."""
    (y, x, h, w), (rows, columns) = box, grid
    row, column = np.divmod(np.arange(rows * columns), columns)
    column = columns - 1 - column if flip else column
    top, left = y + row * h / rows, x + column * w / columns
    return top, left, top + h / rows, left + w / columns


def sample_one_by_one(boxes, flips, size: Size, rng):
    """One image after the other with numpy: arrays boxes [B,2,4], flips [B,2] -> two int arrays [B,R,K]."""
    first, second = [], []
    for pair, flip in zip(boxes, flips, strict=True):
        chosen = rng.permutation(math.prod(size.grid))[: GROUPS * size.keep].reshape(GROUPS, size.keep)
        t1, l1, b1, r1 = edges(pair[0], flip[0], size.grid)
        t2, l2, b2, r2 = (x[:, None] for x in edges(pair[1], flip[1], size.grid))
        drawn = []
        for kept in chosen:
            height = np.minimum(b2, b1[kept]) - np.maximum(t2, t1[kept])
            width = np.minimum(r2, r1[kept]) - np.maximum(l2, l1[kept])
            covered = (np.maximum(height, 0) * np.maximum(width, 0)).sum(1) / ((b2 - t2) * (r2 - l2))[:, 0]
            weight = np.maximum(1 - covered, 0) ** POWER + 1e-12  # patches of weight 0 fill up where others are too few
            drawn.append(rng.choice(len(weight), size.keep, replace=False, p=weight / weight.sum()))
        first.append(chosen)
        second.append(drawn)
    return np.stack(first), np.array(second)


def sample_with_multinomial(boxes, flips, size: Size):
    """The batch at once with torch: one-dimensional overlaps, their products as matrix products, torch.multinomial."""
    b, n = len(boxes), math.prod(size.grid)
    first = torch.rand(b, n, device=boxes.device).argsort(1)[:, : GROUPS * size.keep].view(b, GROUPS, size.keep)
    mask = torch.zeros(b, GROUPS, n, device=boxes.device).scatter_(2, first, 1.0).view(b, GROUPS, *size.grid)
    start, length = boxes[..., :2].float(), boxes[..., 2:].float()  # [B, view, axis]
    overlaps = []
    for axis in range(2):
        step = length[..., axis] / size.side  # [B, view]
        number = torch.arange(size.side, device=boxes.device).expand(b, 2, -1)
        if axis:
            number = torch.where(flips[..., None], size.side - 1 - number, number)
        low = start[..., axis, None] + number * step[..., None]
        high = low + step[..., None]
        top = torch.minimum(high[:, 1, :, None], high[:, 0, None]) - torch.maximum(low[:, 1, :, None], low[:, 0, None])
        overlaps.append(top.clamp_min(0) / step[:, 1, None, None])  # [B, side of view 2, side of view 1]
    rows, columns = (x[:, None] for x in overlaps)
    covered = (rows @ mask @ columns.transpose(2, 3)).flatten(2)
    weight = (1 - covered).clamp_min(0) ** POWER + 1e-12
    return first, torch.multinomial(weight.flatten(0, 1), size.keep).view(b, GROUPS, size.keep)


def patchify(crops, patch: int):
    """[B,H,W,3] -> all patches [B,N,3*P*P] of the same type, as a patch embedding flattens them."""
    b, h, w, _ = crops.shape
    tiles = crops.view(b, h // patch, patch, w // patch, patch, 3)
    return tiles.permute(0, 1, 3, 5, 2, 4).reshape(b, -1, 3 * patch**2)


def normalise(patches, patch: int, dtype):
    constants = (torch.tensor(x, device=patches.device) for x in reference.normalisation(MEAN, STD))
    offset, factor = (x.repeat_interleave(patch**2) for x in constants)
    return ((patches - offset) * factor).to(dtype)


def sampling(size: Size, device: torch.device) -> tuple[int, Alternatives]:
    """Bytes to move, and the alternatives, of drawing all groups of both views."""
    moved = size.batch * (42 + 8 * GROUPS * size.keep)
    boxes, flips, sample = batch_of_boxes(size.batch, device)
    arrays, rng = (boxes.cpu().numpy(), flips.cpu().numpy()), np.random.default_rng(0)
    shape = {"grid": size.grid, "keep": size.keep, "groups": GROUPS, "power": POWER, "seed": 0, "epoch": 0}
    batched = {
        "sample_views": lambda: kernels.sample_views(boxes, flips, sample, **shape),
        "torch.multinomial": lambda: sample_with_multinomial(boxes, flips, size),
    }
    if device.type == "cpu":  # beside a GPU it would take longer than all the rest
        batched["image by image, numpy"] = lambda: sample_one_by_one(*arrays, size, rng)
    return moved, batched


def overlap(size: Size, device: torch.device) -> tuple[int, Alternatives]:
    """The same of the overlap alone, which only analysis calls."""
    boxes, flips, sample = batch_of_boxes(size.batch, device)
    shape = {"grid": size.grid, "keep": size.keep, "groups": GROUPS, "power": POWER, "seed": 0, "epoch": 0}
    first, _ = kernels.sample_views(boxes, flips, sample, **shape)
    moved = size.batch * (34 + 4 * GROUPS * (size.keep + math.prod(size.grid)))
    return moved, {"patch_overlap": lambda: kernels.patch_overlap(boxes, flips, first, grid=size.grid)}


def gathering(size: Size, device: torch.device) -> tuple[int, Alternatives]:
    """The same of cutting out and normalising the kept patches of both views, of all groups."""
    views, dtype = [crops_and_index(size, device, GROUPS) for _ in range(2)], type_of_training(device)
    crops, indices = zip(*views, strict=True)
    index = torch.stack(indices).unflatten(2, (GROUPS, size.keep))
    settings = {"patch": size.patch, "mean": MEAN, "std": STD, "dtype": dtype}
    rows = torch.arange(size.batch, device=device)[:, None]

    def by_index():
        return [normalise(patchify(c, size.patch)[rows, i], size.patch, dtype) for c, i in views]

    def everything():
        return [normalise(patchify(c, size.patch), size.patch, dtype)[rows, i] for c, i in views]

    calls = {
        "gather_patches": lambda: kernels.gather_patches(crops, index, **settings),
        "torch indexing": by_index,
        "normalise all, index": everything,
    }
    pixels = index.numel() * 3 * size.patch**2
    moved = pixels * (1 + torch.finfo(dtype).bits // 8) + index.nbytes
    return moved, calls


def embedding(size: Size, device: torch.device) -> tuple[int, Alternatives]:
    """The same up to the embedded tokens: the kept patches only, or all of them and then a choice."""
    (crops, index), dtype = crops_and_index(size, device), type_of_training(device)
    weight = torch.randn(WIDTH, 3 * size.patch**2, device=device, dtype=dtype)
    long = index.long()[:, :, None].expand(-1, -1, WIDTH)

    def kept():
        return F.linear(kernels.gather_patches(crops, index, patch=size.patch, mean=MEAN, std=STD, dtype=dtype), weight)

    def everything():
        return F.linear(normalise(patchify(crops, size.patch), size.patch, dtype), weight).gather(1, long)

    pixels = size.batch * size.keep * 3 * size.patch**2
    moved = pixels + size.batch * size.keep * (4 + WIDTH * torch.finfo(dtype).bits // 8)
    return moved, {"gather, embed": kept, "embed all, gather": everything}


def attending(size: Size, device: torch.device) -> tuple[int, Alternatives]:
    """Attention over the kept patches and a class token of both views, six heads of 64, forward and backward.

    For a GPU: on a CPU ours is torch's.
    """
    tokens, heads = size.keep + 1, WIDTH // 64
    shape, settings = (2 * size.batch, tokens, WIDTH), {"device": device, "dtype": type_of_training(device)}
    qkv, gradient = torch.randn(*shape[:2], 3 * WIDTH, **settings).requires_grad_(), torch.randn(shape, **settings)

    def by_torch():
        q, k, v = qkv.unflatten(2, (3, heads, 64)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    calls = {
        "attention": lambda: torch.autograd.grad(kernels.attention(qkv, heads=heads), qkv, gradient),
        "torch's attention": lambda: torch.autograd.grad(by_torch(), qkv, gradient),
    }
    return 11 * gradient.nbytes, calls


def updating(units: tuple[int, ...], device: torch.device) -> tuple[int, Alternatives]:
    """Clip by a vector, AdamW, momentum network and, on a GPU, copies in bfloat16, of so many parameters in each unit;
    the momentum network lacks the last. The alternative is torch's operations, with nothing read back."""
    bounds = [0, *accumulate(units)]
    n, shared, half = bounds[-1], bounds[-2], type_of_training(device)
    values, first, gradient, average, keys = (torch.randn(m, device=device) for m in (n, n, n, n, shared))
    copies, key_copies = (torch.zeros(m * (half != torch.float32), dtype=half, device=device) for m in (n, shared))
    step, rates = torch.ones((), device=device), torch.tensor([1e-3, 0.01], dtype=torch.float64, device=device)
    state = State(values, first, first.square(), step, average, keys, copies, key_copies)
    rule = Rule(beta1=0.9, beta2=0.999, eps=1e-8, decay=0.1, clip_momentum=0.4, alpha=1.05)
    settings = {"lr": 1e-3, "betas": rule[:2], "eps": rule.eps, "weight_decay": rule.decay, "fused": True}
    optimizer = torch.optim.AdamW([torch.nn.Parameter(values)], **settings)
    optimizer.param_groups[0]["params"][0].grad = gradient

    def norms(flat):
        return torch.stack(torch._foreach_norm([flat[a:b] for a, b in pairwise(bounds)]))

    def by_operations():
        found, before = norms(gradient), norms(average)
        finite = found.isfinite().all()
        gradient.masked_fill_(~finite, 0)
        average.lerp_(gradient, 0.6 * finite)
        factors = torch.where(found > rule.alpha * before, before / found, 1.0)
        for (a, b), factor in zip(pairwise(bounds), factors.unbind(), strict=True):
            gradient[a:b] *= factor
        optimizer.found_inf = 1 - finite.float()
        optimizer.step()
        keys.lerp_(values[:shared], 0.01 * finite)
        copies.copy_(values[: len(copies)])
        key_copies.copy_(keys[: len(key_copies)])

    def ours():
        found = kernels.unit_norms([gradient, average], bounds=bounds)
        kernels.update_parameters(state, gradient, found, rates, bounds=bounds, rule=rule)

    moved = 4 * (11 * n + 2 * shared) + copies.nbytes + key_copies.nbytes
    return moved, {"update_parameters": ours, "operation by operation": by_operations}


def type_of_training(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def crops_and_index(size: Size, device: torch.device, groups: int = 1):
    """Crops of one view, uint8 [B,H,W,3], and the kept patches of so many groups, int32 [B,R*K]."""
    pixels = size.side * size.patch
    crops = torch.randint(0, 256, (size.batch, pixels, pixels, 3), dtype=torch.uint8, device=device)
    return crops, torch.rand(size.batch, math.prod(size.grid), device=device).argsort(1)[:, : groups * size.keep].int()


def conclusions(d: dict) -> dict:
    """A row for each operation that has alternatives, its sizes side by side ("-": failed), and for each failure; those
    that ran as bars, a panel a size."""
    rows, found, panels = [row for row in d["rows"] if "failed" not in row], [], {}
    for operation in dict.fromkeys(row["operation"] for row in rows):
        providers = {}
        for row in d["rows"]:
            if row["operation"] == operation and "provider" in row:
                providers.setdefault(row["provider"], []).append(row)
        (_, ours), *others = providers.items()
        if others:
            times = ", ".join(f"{row['p50_us'] / 1e3:.3g}" if row in rows else "-" for row in ours)
            first, *rest = (
                f"{name} {', '.join(number(row['times_ours']) if 'times_ours' in row else '-' for row in of)}"
                for name, of in others
            )
            sizes = "; ".join(map(size_of, ours))
            found.append(finding(f"{operation} ({sizes})", f"{times} ms", f"times that: {first}", *rest))
    for row in d["rows"]:
        if "failed" in row:
            what = ": ".join(row[key] for key in ("operation", "provider") if key in row)
            found.append(finding(f"{what} ({size_of(row)})", without_figures(row)))
    for row in rows:
        times = [row[f"{name}_us"] / 1e3 for name in ("p50", "p20", "p80")]
        label, ours = f"{row['operation']}: {row['provider']}", row.get("times_ours") == 1
        panels.setdefault(size_of(row), []).append(bar(label, *times, ours=ours))
    stages = {"sample_views": "sample", "gather_patches": "gather"}
    path = {  # which has a group's gather
        stages[row["provider"]]: {"seconds": row["p50_us"] / 1e6 / row.get("groups", 1)}
        for row in rows
        if row["provider"] in stages and row["size"] == SIZES[0].name and row["batch"] == PATH_BATCH
    }
    plots = [plot("Kernels and their alternatives", "ms (p20 to p80)", panels)]
    return {"findings": found, "plots": plots, "path": path}


def size_of(row: dict) -> str:
    return row["size"] + (f", batch {row['batch']}" if row["batch"] else "")


def rows_of(about: dict, prepare: Callable, device: torch.device, seconds: float, bandwidth: float) -> list[dict]:
    """A row for each alternative that ``prepare()`` gives, or one where that fails."""
    try:
        moved, calls = prepare()
        found = measure_each(calls, device, seconds=seconds * len(calls))
    except Exception as error:
        return [about | {"failed": failure(error)}]
    rows, ours = [], next(iter(found.values()))
    for name, time in found.items():
        row = about | {"provider": name}
        if "failed" in time:
            rows.append(row | time)
            continue
        rate = moved / time["p50"]
        row |= {f"{key}_us": time[key] * 1e6 for key in ("p20", "p50", "p80")} | {"runs": time["runs"]}
        row |= {} if "failed" in ours else {"times_ours": time["p50"] / ours["p50"]}
        row |= {"bytes": moved} | ({"groups": GROUPS} if about["operation"] == "gathering" else {})
        rows.append(row | {"gb_per_second": rate / 1e9, "share_of_copy": rate / bandwidth})
    return rows


def main(arguments: list[str]) -> int:
    options = environment.parser("kernels", "Sampling, gathering and the update against the alternatives.").parse_args(
        arguments
    )
    device = environment.device()
    seconds = 0.03 if options.smoke else 1  # of each alternative
    bandwidth = copy_bandwidth(device, seconds)["p50"]
    units = SMOKE_UNITS if options.smoke else UNITS
    work = {}
    for size in SMOKE_SIZES if options.smoke else SIZES:
        for operation in (sampling, overlap, gathering, embedding) + (attending,) * (device.type == "cuda"):
            work[size.name, size.batch, operation.__name__] = functools.partial(operation, size, device)
    of_all = f"{sum(units) / 1e6:.1f} M parameters", None, updating.__name__
    work[of_all] = functools.partial(updating, units, device)
    result = {"copy_bytes_per_second": bandwidth, "rows": []}
    for about, prepare in work.items():
        about = dict(zip(("size", "batch", "operation"), about, strict=True))
        result["rows"] += rows_of(about, prepare, device, seconds, bandwidth)
        environment.save(options, result | conclusions(result))
    columns = ("size", "batch", "operation", "provider", "p20_us", "p50_us", "p80_us", "times_ours", "share_of_copy")
    environment.print_table([{name: row.get(name) for name in (*columns, "failed")} for row in result["rows"]])
    return int(any("failed" in row for row in result["rows"]))
