"""What an encoder looks at, and what it takes for alike, as a picture.

A row for each image: the image as the encoder sees it; the attention of the class token in the last block, as the mean
of all heads and by head; then its nearest neighbours, by the cosine similarity of features, among the images of a
folder (``--bank``) or else the others given. Where there is no class token, the maps show how much the patches attend
to each.
"""

import argparse
import os
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import Tensor

from bench import environment
from pipeline import Index, cache, evaluation_batches
from pipeline.headers import printable, read_headers
from pipeline.shown import shown
from run import quiet
from run.session import named
from transfer import knn
from transfer.pretrained import load_encoder

HEADS, NEIGHBOURS = 6, 5  # shown at most
CELL = 1.7  # inches


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench attention", description="Attention maps and neighbours.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run, what it exported, or a checkpoint of timm")
    parser.add_argument("images", type=Path, metavar="IMAGE", nargs="+")
    parser.add_argument("--model", help="the name in timm, for a checkpoint that does not say it")
    parser.add_argument("--image-size", type=int, help="pixels a side for the maps; default: the encoder's own")
    parser.add_argument("--bank", type=Path, help="where to look for neighbours, as train.py --data; default: IMAGE...")
    parser.add_argument("--limit", type=int, default=2000, help="images of the bank, evenly spaced; default: 2000")
    parser.add_argument("--output", type=Path, default=Path("attention.png"), help="default: attention.png")
    options = parser.parse_args(arguments)
    try:
        if options.limit < 1:
            raise ValueError(f"--limit {options.limit}: expected 1 or more")
        vit, description = load_encoder(options.run, model=options.model)
        larger, _ = load_encoder(options.run, model=options.model, image_size=options.image_size)
        given = index_of(options.images)
        bank = Index.scan(options.bank, cache.place(None, None)) if options.bank else given
        with quiet.decoder():
            picture = sheet(vit.eval(), larger.eval(), description, given, bank, options.limit)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # in names of files: there is no font for everything
            picture.savefig(options.output, dpi=100)
    except (ValueError, OSError) as error:
        print(f"bench attention: {error}", file=sys.stderr)
        return 2
    print(options.output)
    return 0


def index_of(files: list[Path]) -> Index:
    """An index of these files, in their order; ValueError naming those that are no images."""
    paths = [str(path.absolute()) for path in files]
    sizes = read_headers("", paths)
    wrong = [f"{printable(path)}: {size}" for path, size in zip(paths, sizes, strict=True) if isinstance(size, str)]
    if wrong:
        raise ValueError(f"expected images, got {'; '.join(wrong)}")
    return Index(Path("/"), paths, np.full(len(paths), -1), np.array(sizes, np.int32), (), {})


def attention_maps(vit: VisionTransformer, images: Tensor) -> Tensor:
    """What the class token attends to in the last block: shares [B, heads, Gh, Gw], which leave out what it spends on
    class and register tokens. Without a class token: their mean over all patches.

    ``images``: float [B, 3, H, W], normalised. ValueError for a model whose attention is not timm's usual one.
    """
    attention = getattr(vit.blocks[-1], "attn", None)
    if not isinstance(attention, Attention):
        raise ValueError(f"expected timm's Attention in every block, got a {type(vit.blocks[-1]).__name__} without it")
    attention.fused_attn, calls = False, []  # the fused form never has the weights in one piece
    with attention.attn_drop.register_forward_hook(lambda *call: calls.append(call[-1])), torch.inference_mode():
        vit(images)
    (weights,) = calls  # [B, heads, T, T], rows attend to columns
    first = vit.num_prefix_tokens
    rows = weights[:, :, 0] if vit.has_class_token else weights[:, :, first:].mean(2)
    return rows[..., first:].unflatten(-1, vit.patch_embed.grid_size)


def nearest(vit: VisionTransformer, given: Index, bank: Index, limit: int, **how) -> list[list[tuple[int, float]]]:
    """For each given image its neighbours in the bank, nearest first, as (sample, cosine similarity); itself left out.

    ``how``: the further arguments of ``knn.features``. ValueError for a given image that does not decode; of the bank
    such are left out, and named on stderr.
    """
    bad, everything = {}, np.arange(len(given))
    samples = np.linspace(0, len(bank) - 1, min(limit, len(bank))).round().astype(np.int64)
    (queries,), _ = knn.features([vit], given, everything, bad=bad, **how)
    if bad:
        raise ValueError("; ".join(f"{printable(given.paths[i])}: {reason}" for i, reason in bad.items()))
    (rows,), _ = knn.features([vit], bank, samples, bad=bad, **how)
    if bad:
        left_out = named((bank.paths[sample], reason) for sample, reason in bad.items())
        print(f"left out of the bank: {left_out}", file=sys.stderr)
    samples = [sample for sample in samples.tolist() if sample not in bad]
    similarity = queries @ rows.T
    files = [os.path.realpath(bank.file(sample)) for sample in samples]
    found = []
    for i, row in enumerate(similarity):
        order = [j for j in row.argsort(descending=True).tolist() if files[j] != os.path.realpath(given.file(i))]
        found.append([(samples[j], row[j].item()) for j in order[:NEIGHBOURS]])
    return found


def pictures(index: Index, samples: list[int], side: int, device: torch.device) -> dict[int, Tensor]:
    """{sample: uint8 [S,S,3]} of whole images, as evaluation sees them."""
    return {
        sample: image
        for images, batch, _ in evaluation_batches(
            index, samples, image_size=side, batch_size=16, device=device, threads=len(os.sched_getaffinity(0))
        )
        for sample, image in zip(batch.tolist(), images, strict=True)
    }


def sheet(vit: VisionTransformer, larger: VisionTransformer, description: dict, given: Index, bank: Index, limit: int):
    """The picture, as a figure of matplotlib; ``larger`` is the encoder at the size of the maps."""
    from matplotlib.figure import Figure

    device = environment.device()
    mean, std = (torch.tensor(description[name], device=device) for name in ("mean", "std"))
    for height, width in (vit.patch_embed.img_size, larger.patch_embed.img_size):
        if height != width:
            raise ValueError(f"the encoder takes images of {height} x {width} pixels; expected a square")
    vit, larger = vit.to(device), larger.to(device)
    seen = pictures(given, range(len(given)), larger.patch_embed.img_size[0], device)
    maps = []
    for image in seen.values():
        normalised = ((image / 255 - mean) / std).permute(2, 0, 1)
        maps.append(attention_maps(larger, normalised[None])[0].cpu().numpy())
    with shown("nearest neighbours", "embedding images") as progress:
        alike = nearest(
            vit, given, bank, limit, mean=description["mean"], std=description["std"], device=device,
            threads=len(os.sched_getaffinity(0)), progress=progress,
        )  # fmt: skip
    others = pictures(bank, sorted({i for row in alike for i, _ in row}), vit.patch_embed.img_size[0], device)

    heads = min(HEADS, len(maps[0]))
    columns = 2 + heads + len(max(alike, key=len))
    figure = Figure(figsize=(CELL * columns, (CELL + 0.3) * len(given) + 0.5), layout="constrained")
    axes = figure.subplots(len(given), columns, squeeze=False)
    for i, (row, neighbours) in enumerate(zip(axes, alike, strict=True)):
        for axis in row:
            axis.axis("off")
        image = seen[i].cpu().numpy()
        row[0].imshow(image)
        row[0].set_title(_name(given, i), size=7)
        named = {"mean of all heads": maps[i].mean(0)} | {f"head {n + 1}": maps[i][n] for n in range(heads)}
        for axis, (name, shares) in zip(row[1:], named.items(), strict=False):
            axis.imshow(image.mean(-1), cmap="gray")
            axis.imshow(shares, cmap="inferno", alpha=0.7, extent=axis.images[0].get_extent())
            axis.set_title(name, size=7)
        for axis, (sample, similarity) in zip(row[2 + heads :], neighbours, strict=False):
            axis.imshow(others[sample].cpu().numpy())
            axis.set_title(f"{_name(bank, sample)}\n{similarity:.3f}", size=7)
    who = "the class token" if vit.has_class_token else "the patches, on average (there is no class token)"
    figure.suptitle(
        f"{description['model']}: what {who} attends to in the last block, each map from its own least to its most; "
        "nearest neighbours by cosine similarity",
        size=9,
    )
    return figure


def _name(index: Index, sample: int) -> str:
    return printable("/".join(Path(index.paths[sample]).parts[-2:]))[-26:]
