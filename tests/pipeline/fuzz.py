"""Damaged files of all admitted formats, by the thousand, through the whole reading path in a process that may die.

python -m tests.pipeline.fuzz --files 20000 --seed 0
python -m tests.pipeline.fuzz --write 1234 FILE        the file of a finding

A file is made of its number: a small picture, taken apart into segments, chunks or tags, which are doubled, left out,
exchanged, lengthened and rewritten, and put together again, with lengths and checksums that fit or do not. What the
index admits (``headers.read_headers``) is decoded three times: in a batch with others, alone, and in a batch of those
that decode, with other bytes in unused memory. A finding is a process that dies or hangs, pixels of another size than
the index has, and pixels that are not the same each time.
"""

import argparse
import collections
import ctypes
import io
import itertools
import json
import os
import random
import struct
import sys
import types
import zlib
from pathlib import Path

import numpy as np
from PIL import Image, TiffImagePlugin

ROOT = Path(__file__).resolve().parent.parent.parent
BATCH = 32
LARGE = 2_000_000  # pixels; such files are decoded by themselves
HEIGHT, WIDTH = 600, 48  # a portrait, so that a buffer of the other orientation is far too small


# ---- Pictures


def pictures():
    """{name: file} of each kind."""
    coarse = np.random.default_rng(0).integers(0, 256, (30, 3, 4), np.uint8)
    rgba = Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
    rgb, grey = rgba.convert("RGB"), rgba.convert("L")
    grey16 = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    upright, turned = Image.Exif(), Image.Exif()
    upright[274], turned[274] = 1, 6
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    kinds = {
        "JPEG": (rgb, {}), "JPEG exif": (rgb, {"exif": turned}), "JPEG upright": (rgb, {"exif": upright}),
        "JPEG progressive": (rgb, {"progressive": True, "exif": turned}), "JPEG grey": (grey, {"exif": turned}),
        "JPEG cmyk": (rgb.convert("CMYK"), {}), "JPEG 444": (rgb, {"subsampling": 0, "restart_marker_rows": 1}),
        "JPEG xmp": (rgb, {"xmp": xmp, "icc_profile": bytes(200)}),
        "PNG": (rgb, {}), "PNG exif": (rgb, {"exif": turned}), "PNG rgba": (rgba, {"exif": upright}),
        "PNG grey": (grey, {}), "PNG 16": (grey16, {"exif": turned}), "PNG palette": (rgb.quantize(16), {}),
        "PNG 1": (grey.convert("1"), {}),
        "BMP": (rgb, {}), "BMP grey": (grey, {}), "BMP rgba": (rgba, {}), "BMP 1": (grey.convert("1"), {}),
        "WEBP": (rgb, {}), "WEBP exif": (rgb, {"exif": turned}), "WEBP lossless": (rgba, {"lossless": True}),
        "TIFF": (rgb, {}), "TIFF exif": (rgb, {"exif": turned}), "TIFF lzw": (rgb, {"compression": "tiff_lzw"}),
        "TIFF deflate": (grey, {"compression": "tiff_adobe_deflate"}), "TIFF 16": (grey16, {}),
        "TIFF strips": (rgb, {"strip_size": 48 * 3 * 16}), "TIFF rgba": (rgba, {}),
        "PPM": (rgb, {}), "PPM grey": (grey, {}), "PPM 1": (grey.convert("1"), {}), "PPM 16": (grey16, {}),
    }  # fmt: skip
    made = {}
    for name, (image, how) in kinds.items():
        file = io.BytesIO()
        before, TiffImagePlugin.STRIP_SIZE = TiffImagePlugin.STRIP_SIZE, how.pop("strip_size", 1 << 20)
        image.save(file, name.split()[0], **how)
        TiffImagePlugin.STRIP_SIZE = before
        made[name] = file.getvalue()
    return made


# ---- Their parts


def parts(name, data):
    """(head, parts, rest) of a file: what changes are made of, and what is seldom touched."""
    kind, found = name.split()[0], []
    if kind == "JPEG":
        at = 2
        while data[at + 1] != 0xDA:
            length = 2 + int.from_bytes(data[at + 2 : at + 4], "big")
            found.append(data[at : at + length])
            at += length
        return data[:2], found, data[at:]
    if kind in ("PNG", "WEBP"):
        start, order, more = (8, ">", 12) if kind == "PNG" else (12, "<", 8)
        at = start
        while at < len(data):
            where = at if kind == "PNG" else at + 4
            (length,) = struct.unpack(f"{order}I", data[where : where + 4])
            end = at + more + length + (kind == "WEBP" and length % 2)
            found.append(data[at:end])
            at = end
        return data[:start], found, b""
    if kind == "TIFF":
        (where,) = struct.unpack("<I", data[4:8])
        (count,) = struct.unpack("<H", data[where : where + 2])
        tags = [data[where + 2 + 12 * i : where + 14 + 12 * i] for i in range(count)]
        return data[:4], tags, data[8:]
    if kind == "BMP":
        cuts = [0, 2, 6, 10, 14, 18, 22, 26, 28, 30, 34, 54]
        return b"", [data[a:b] for a, b in itertools.pairwise(cuts)], data[54:]
    fields = 2 if data[:2] in (b"P1", b"P4") else 3
    head = data.split(b"\n", fields)[:-1] if fields == 2 else data.split(None, 4)[:-1]
    length = len(b"\n".join(head)) + 1
    return b"", [field + b"\n" for field in head], data[length:]


def whole(name, head, found, rest, honest):
    """The file of its parts; ``honest``: with counts and checksums that fit, where the format has them."""
    kind = name.split()[0]
    if kind == "PNG" and honest:
        found = [part[:-4] + struct.pack(">I", zlib.crc32(part[4:-4])) for part in found]
    body = b"".join(found)
    if kind == "WEBP" and honest:
        head = head[:4] + struct.pack("<I", len(body) + 4) + head[8:]
    if kind == "TIFF":  # the directory goes to the end; what tags point at stays where it was
        count = len(found) if honest else len(found) + 1
        return head + struct.pack("<I", 8 + len(rest)) + rest + struct.pack("<H", count) + body + bytes(4)
    return head + body + rest


def exif(rng):
    """A directory of EXIF that says something of the orientation, by a type that may not be right."""
    tags = b""
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        kind, value = rng.choice((1, 3, 3, 3, 4, 9)), rng.choice((0, 1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 0x600))
        tags += struct.pack("<HHII", 274, kind, rng.choice((0, 1, 1, 1, 2)), value)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags) // 12) + tags + bytes(4)


def block(name, rng):
    """A part with a directory of EXIF, or a tag of TIFF, or anything else."""
    kind, body = name.split()[0], exif(rng)
    if kind == "JPEG":
        body = b"Exif\0\0" + body
        return b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body
    if kind == "PNG":
        return struct.pack(">I", len(body)) + b"eXIf" + body + struct.pack(">I", zlib.crc32(b"eXIf" + body))
    if kind == "WEBP":
        return b"EXIF" + struct.pack("<I", len(body)) + body + bytes(len(body) % 2)
    if kind == "TIFF":
        tag = rng.choice((256, 257, 258, 259, 262, 273, 274, 274, 277, 278, 279, 284, 317, 322, 323, 338, 339))
        return struct.pack("<HHII", tag, rng.choice((1, 3, 4)), rng.choice((1, 1, 3)), rng.randrange(9))
    return bytes(rng.randrange(4))


# ---- Changes


def mutated(seed):
    """(what it is, the file) of a number."""
    rng = random.Random(seed)
    name, data = rng.choice(list(PICTURES.items()))
    head, found, rest = parts(name, data)
    said = [name]
    for _ in range(rng.choice((1, 1, 2, 3))):
        change = rng.choice(CHANGES)
        i = rng.randrange(max(1, len(found)))
        if found:
            said.append(f"{change.__name__} {i}")
            found = change(name, found, i, rng)
    honest = rng.random() < 0.8
    data = whole(name, head, found, rest, honest)
    if rng.random() < 0.05 and rest:
        at = rng.randrange(len(data) - len(rest), len(data))
        data = data[:at] + rng.randbytes(4) + data[at + 4 :]
        said.append(f"data at {at}")
    if rng.random() < 0.05:
        data = data[: rng.randrange(1, len(data))]
        said.append(f"cut to {len(data)}")
    return ", ".join(said) + ("" if honest else ", sums and counts as they were"), data


def doubled(name, found, i, rng):
    j = rng.randrange(len(found) + 1)
    return [*found[:j], found[i], *found[j:]]


def left_out(name, found, i, rng):
    return found[:i] + found[i + 1 :]


def exchanged(name, found, i, rng):
    j, found = rng.randrange(len(found)), list(found)
    found[i], found[j] = found[j], found[i]
    return found


def added(name, found, i, rng):
    return [*found[:i], block(name, rng), *found[i:]]


def lengthened(name, found, i, rng):
    part, found = found[i], list(found)
    where = rng.randrange(len(part) + 1)
    found[i] = part[:where] + rng.randbytes(rng.choice((1, 2, 4, 12))) + part[where:]
    return found


def shortened(name, found, i, rng):
    found = list(found)
    found[i] = found[i][: rng.randrange(len(found[i]) + 1)]
    return found


def flipped(name, found, i, rng):
    part, found = bytearray(found[i]), list(found)
    for _ in range(rng.choice((1, 1, 2, 8)) if part else 0):
        part[rng.randrange(len(part))] ^= 1 << rng.randrange(8)
    found[i] = bytes(part)
    return found


def rewritten(name, found, i, rng):
    part, found = bytearray(found[i]), list(found)
    width = rng.choice((1, 2, 4))
    if len(part) >= width:
        at = rng.randrange(len(part) - width + 1)
        value = rng.choice((0, 1, 2, 3, 6, 8, 16, 47, 49, 255, 599, 601, 65535, -1, 1 << 8 * width - 1))
        part[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, rng.choice(("big", "little")))
    found[i] = bytes(part)
    return found


CHANGES = (doubled, left_out, exchanged, added, added, lengthened, shortened, flipped, rewritten, rewritten)
PICTURES = pictures()


# ---- The process that may die


def scanned(read_headers, data):
    """What the index knows of a file: [height, width], or why it is rejected."""
    descriptor = os.memfd_create("picture")
    try:
        os.write(descriptor, data)
        return read_headers("/", [f"proc/self/fd/{descriptor}"])[0]
    finally:
        os.close(descriptor)


def answers(reader, read_headers, seeds):
    """For each number (reason of the index or None, finding or None)."""
    files = [(seed, mutated(seed)[1]) for seed in seeds]
    sizes = {seed: scanned(read_headers, data) for seed, data in files}
    contents = {seed: np.frombuffer(data, np.uint8) for seed, data in files if isinstance(sizes[seed], list)}
    small = [seed for seed in contents if np.prod(sizes[seed]) <= LARGE]
    reader.decode([contents[seed] for seed in small])
    _perturb(0)
    alone = {seed: reader.decode([content])[0] for seed, content in contents.items()}
    good = [seed for seed in small if alone[seed][0] is None]
    _perturb(0x5A)
    again = dict(zip(good, reader.decode([contents[seed] for seed in good]), strict=True))
    found = []
    for seed in seeds:
        said = None
        if seed in alone and alone[seed][0] is None:
            _, size, pixels = alone[seed]
            if list(size) != sizes[seed]:
                said = f"the index has {sizes[seed]}, the pixels are {list(size)}"
            elif seed in again and again[seed][2] != pixels:
                said = f"decodes differently each time ({again[seed][0] or 'other pixels'})"
        reason = sizes[seed] if seed not in contents else alone[seed][0] and "decoder: " + alone[seed][0]
        found.append([reason, said])
    return found


def _perturb(byte):
    """What memory that is given out holds from now on."""
    ctypes.CDLL(None).mallopt(-6, byte)


def serve():
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    package = types.ModuleType("pipeline")  # without torch, as pipeline/trial.py has it
    package.__path__ = [str(ROOT / "pipeline")]
    sys.modules["pipeline"] = package
    from pipeline import headers, trial

    Image.warnings.simplefilter("ignore")
    reader = trial._Files(BATCH, 2, None)
    for line in sys.stdin:
        print(json.dumps(answers(reader, headers.read_headers, json.loads(line))), file=out, flush=True)


# ---- The program


def fuzz(first, count, say=lambda done, findings: None):
    """Numbers first, ..., first + count - 1: (findings {number: what}, admitted, decoded)."""
    from pipeline import trial

    class Reader(trial.Decoder):
        def __init__(self, **how):
            super().__init__(**how)
            self._command = [sys.executable, __file__, "--serve"]

    findings, admitted, decoded, reasons = {}, 0, 0, collections.Counter()
    with Reader(batch=BATCH, seconds=120) as reader:
        pending = [list(range(i, min(i + BATCH, first + count))) for i in range(first, first + count, BATCH)][::-1]
        while pending:
            seeds = pending.pop()
            try:
                result = reader.decode(seeds)
            except trial.Died as died:
                by = trial.killers([seeds], decoder=Reader, batch=BATCH, seconds=120)
                findings |= by
                if by:
                    pending.append([seed for seed in seeds if seed not in by])
                else:
                    findings[seeds[0]] = f"{died}, once, of numbers {seeds}"
                continue
            for seed, (reason, said) in zip(seeds, result, strict=True):
                admitted += reason is None or reason.startswith("decoder: ")
                decoded += reason is None
                reasons[reason] += 1
                if said:
                    findings[seed] = said
            say(seeds[-1] - first + 1, findings)
    return findings, admitted, decoded


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first file, in millions")
    parser.add_argument("--write", nargs=2, metavar=("NUMBER", "FILE"))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve()
        return 0
    if options.write:
        Path(options.write[1]).write_bytes(mutated(int(options.write[0]))[1])
        return 0
    told = set()

    def say(done, findings):
        for seed in findings.keys() - told:
            print(f"{seed}: {mutated(seed)[0]}: {findings[seed]}", flush=True)
        told.update(findings)
        if done and done % (BATCH * 32) == 0:
            print(f"{done:,} of {options.files:,} files", file=sys.stderr, flush=True)

    findings, admitted, decoded = fuzz(options.seed * 1_000_000, options.files, say)
    say(0, findings)
    print(f"{options.files:,} files, {admitted:,} admitted, {decoded:,} decoded: {len(findings):,} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
