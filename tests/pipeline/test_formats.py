"""Which files are admitted: each kind by the decoder and by Pillow against the pixels that it was made from; and what
kills the decoder, or makes it lie, is left out with a true reason."""

import io
import itertools
import re
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from pipeline import formats, graph, headers, pictures

H, W = 24, 40
RNG = np.random.default_rng(0)
RGB, INK = (RNG.integers(0, 256, (3, 5, n), np.uint8).repeat(8, 0).repeat(8, 1) for n in (3, 4))  # flat 8 x 8 blocks
GREY, ALPHA = RGB[..., 0], RGB[..., 1]
DEEP, BITS = RNG.integers(0, 65536, (H, W, 4)), RNG.integers(0, 256, (H, W))
PALETTE = RNG.integers(0, 256, (256, 3), np.uint8)
PRINTED = np.round((255.0 - INK[..., :3]) * (255.0 - INK[..., 3:]) / 255)


def shallow(deep):
    return np.round(deep / 257).astype(np.uint8)


def upright(pixels, orientation):
    """By EXIF's table: rows and columns of what is stored, seen as named."""
    pixels = pixels.swapaxes(0, 1) if orientation > 4 else pixels
    rows, columns = (1, 1, -1, -1, 1, 1, -1, -1), (1, -1, -1, 1, 1, -1, -1, 1)
    return pixels[:: rows[orientation - 1], :: columns[orientation - 1]]


def encoded(pixels, form, mode=None, **options):
    file = io.BytesIO()
    Image.fromarray(pixels, mode).save(file, form, **options)
    return file.getvalue()


# ---- Writers


def exif(*entries, order="<", count=None, magic=None):
    """An EXIF block of (tag, type, number, value)."""
    kinds = {1: "B3x", 3: "H2x", 4: "I", 2: "I", 5: "I"}
    packed = b"".join(struct.pack(f"{order}HHI{kinds[e[1]]}", *e) for e in entries)
    start = magic or (b"II*\0" if order == "<" else b"MM\0*")
    return start + struct.pack(order + "IH", 8, len(entries) if count is None else count) + packed + bytes(4)


def turned(orientation, order="<"):
    return exif((274, 3, 1, orientation), order=order)


def jpeg(*blocks, pixels=RGB, **options):
    data = encoded(pixels, "JPEG", **({"quality": 100, "subsampling": 0} | options))
    return with_segments(data, *blocks)


def with_segments(data, *blocks):
    segments = (b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block for block in blocks)
    return data[:2] + b"".join(segments) + data[2:]


def tagged(block):
    return b"Exif\0\0" + block


def frame(data, at, *values):
    """A JPEG with bytes of its frame header replaced; at 1 is the process, 4 the precision, 9 the components."""
    start = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2")) + at
    return data[:start] + bytes(values) + data[start + len(values) :]


def chunk(kind, data, right=True):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data) ^ (not right))


def packed(values, bits):
    """Rows of integers [H,W] or [H,W,C] as bytes, the highest bit first."""
    values = np.asarray(values).reshape(len(values), -1)
    each = (values[..., None] >> np.arange(bits)[::-1] & 1).astype(np.uint8)
    return np.packbits(each.reshape(len(values), -1), axis=1)


def png(values, bits, colour, before=b"", after=b"", interlaced=False):
    passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
    passes = passes if interlaced else [(0, 0, 1, 1)]
    rows = b"".join(b"\0" + row.tobytes() for y, x, v, h in passes for row in packed(values[y::v, x::h], bits))
    start = struct.pack(">IIBBBBB", values.shape[1], len(values), bits, colour, 0, 0, interlaced)
    parts = chunk(b"IHDR", start), before, chunk(b"IDAT", zlib.compress(rows)), after, chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def tiff(pixels, photometric, *, order="<", planar=1, tile=None, compress=None, big=False, tags=(), bits=None):
    """Strips of 7 rows, or tiles, of pixels [H,W] or [H,W,C]; ``tags``: {tag: (type, values)} to add or replace."""
    planes = pixels.reshape(*pixels.shape[:2], -1)
    samples, depth = planes.shape[2], bits or planes.itemsize * 8
    planes = planes.astype(planes.dtype.newbyteorder(order))
    step, across = tile or (7, W)
    planes = [planes] if planar == 1 else [planes[..., i : i + 1] for i in range(samples)]
    if tile:
        planes = [np.pad(p, ((0, -H % step), (0, -W % across), (0, 0))) for p in planes]
    parts = [p[y : y + step, x : x + across] for p in planes for y in range(0, H, step) for x in range(0, W, across)]
    parts = [(packed(p, bits) if bits else p).tobytes() for p in parts]
    parts = [zlib.compress(p) if compress else p for p in parts]
    head = 16 if big else 8
    places = list(itertools.accumulate(map(len, parts), initial=head))
    found = {256: (4, [W]), 257: (3, [H]), 258: (3, [depth] * samples), 259: (3, [compress or 1])}
    found |= {262: (3, [photometric]), 277: (3, [samples]), 284: (3, [planar])}
    found |= {322: (3, [across]), 323: (3, [step])} if tile else {278: (3, [step])}
    found |= {273 + 51 * bool(tile): (4, places[:-1]), 279 + 46 * bool(tile): (4, [len(p) for p in parts])}
    found |= dict(tags)
    body, entries, inline, long = b"".join(parts), b"", 8 if big else 4, "Q" if big else "I"
    for tag, (kind, values) in sorted(found.items()):
        raw = struct.pack(f"{order}{len(values)}{ {1: 'B', 3: 'H', 4: 'I'}[kind] }", *values)
        if len(raw) > inline:
            body, raw = body + raw, struct.pack(order + long, head + len(body))
        entries += struct.pack(f"{order}HH{long}", tag, kind, len(values)) + raw.ljust(inline, b"\0")
    start = b"II" if order == "<" else b"MM"
    start += struct.pack(f"{order}HHHQ" if big else f"{order}HI", *([43, 8, 0] if big else [42]), head + len(body))
    return start + body + struct.pack(order + ("Q" if big else "H"), len(found)) + entries + bytes(8)


def bmp(values, bits, *, header=40, compression=0, colours=(), fields=b"", down=False, shift=0):
    rows = packed(values, bits // np.atleast_3d(values).shape[2])
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 4)))[:: 1 if down else -1].tobytes()
    height, width = values.shape[:2]
    table = b"".join(bytes((*colour[::-1], *([0] if header > 12 else []))) for colour in colours)
    if header == 12:
        about = struct.pack("<IHHHH", 12, width, height, 1, bits)
    else:
        sizes = header, width, -height if down else height, 1, bits, compression, len(rows), 0, 0, len(colours) % 256, 0
        about = (struct.pack("<IiiHHIIiiII", *sizes) + fields).ljust(header, b"\0")
    start = 14 + len(about) + len(table)
    return b"BM" + struct.pack("<III", start + len(rows), 0, start + shift) + about + table + rows


def webp(*chunks, flags):
    body = b"VP8X" + struct.pack("<IB3xHBHB", 10, flags, W - 1, 0, H - 1, 0)
    for kind, data in chunks:
        body += kind + struct.pack("<I", len(data)) + data + bytes(len(data) % 2)
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def frame_of_webp():
    """A lossless picture as a chunk of even length."""
    data = encoded(RGB, "WEBP", lossless=True)
    size = int.from_bytes(data[16:20], "little")
    return b"VP8L", data[20 : 20 + size] + bytes(size % 2)


# ---- What is admitted: (name, file, pixels, levels that may be off)

XMP = (
    b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
)
JPEG_XMP = b"http://ns.adobe.com/xap/1.0/\0" + XMP


FRACTIONS = {282: 1, 283: 1, 318: 2, 319: 6, 529: 3, 532: 6}  # tags of EXIF: how many of 8 bytes each


def plain_jpegs():
    yield "baseline", jpeg(), RGB, 3
    yield "extended", frame(jpeg(), 1, 0xC1), RGB, 3
    yield "progressive, grey", jpeg(pixels=GREY, progressive=True), GREY, 3
    flat = np.full((H, W, 3), (200, 40, 90), np.uint8)
    yield "progressive, subsampled", jpeg(pixels=flat, subsampling=2, progressive=True), flat, 3
    yield "RGB", encoded(RGB, "JPEG", quality=100, keep_rgb=True), RGB, 3
    cmyk = encoded(INK, "JPEG", "CMYK", quality=100)
    adobe = cmyk.index(b"Adobe")
    yield "CMYK", cmyk, PRINTED, 4
    other = encoded(255 - INK, "JPEG", "CMYK", quality=100)  # Pillow inverts
    yield "CMYK without Adobe", other[: adobe - 4] + other[adobe + 12 :], PRINTED, 4
    ycc = np.asarray(Image.fromarray(INK[..., :3]).convert("YCbCr"))
    ycck = encoded(np.dstack([255 - ycc, INK[..., 3]]), "JPEG", "CMYK", quality=100)
    yield "YCCK", ycck[: adobe + 11] + b"\2" + ycck[adobe + 12 :], PRINTED, 6


def jpegs():
    for name, data, pixels, off in plain_jpegs():  # what is turned takes another way through the decoder
        yield name, data, pixels, off
        if name != "CMYK without Adobe":
            yield f"{name}, turned", with_segments(data, tagged(turned(6))), upright(pixels, 6), off
    for number in (0, *range(1, 10)):
        expected = upright(RGB, number if 1 <= number <= 8 else 1)
        yield f"orientation {number}", jpeg(tagged(turned(number))), expected, 3
    yield "orientation MM", jpeg(tagged(turned(6, ">"))), upright(RGB, 6), 3
    whole = exif((271, 2, 9, 8), (274, 3, 1, 8), (282, 5, 1, 8), (306, 2, 4, 0))
    yield "a camera's", jpeg(tagged(whole), JPEG_XMP), upright(RGB, 8), 3
    yield "XMP alone", jpeg(JPEG_XMP), RGB, 3
    yield "XMP, and EXIF of nothing", jpeg(tagged(exif((296, 3, 1, 2))), JPEG_XMP), RGB, 3
    yield "damaged EXIF of nothing", jpeg(tagged(exif((305, 2, 99, 5000)))), RGB, 3
    yield "EXIF that is none", jpeg(tagged(b"garbage")), RGB, 3
    for tag, fractions in FRACTIONS.items():  # the last byte of the block is of the value
        block = exif((tag, 5, 1, 98 - 8 * fractions), (274, 3, 1, 6)) + bytes(60)
        yield f"whole value of {tag}", jpeg(tagged(block)), upright(RGB, 6), 3
    profile = jpeg(b"a" * 7000, tagged(turned(6)), b"b" * 65_000, b"c" * 900)  # more than is read at once
    yield "profiles around EXIF", profile, upright(RGB, 6), 3
    data = jpeg(tagged(turned(6)))
    yield "filled up, with a tail", data[:2] + b"\xff\xff" + data[2:] + data, upright(RGB, 6), 3


def pngs():
    alphas = {0: (GREY, 1), 2: (RGB, 3), 4: (np.dstack([GREY, ALPHA]), 1), 6: (np.dstack([RGB, ALPHA]), 3)}
    for colour, (pixels, kept) in alphas.items():
        deep = DEEP[..., : np.atleast_3d(pixels).shape[2]]
        for interlaced in (False, True):
            seen = np.atleast_3d(pixels)[..., :kept]
            yield f"{colour} 8 {interlaced}", png(pixels, 8, colour, interlaced=interlaced), seen, 0
            seen = shallow(deep[..., :kept])
            yield f"{colour} 16 {interlaced}", png(deep, 16, colour, interlaced=interlaced), seen, 0
    for bits in (1, 2, 4, 8):
        values = BITS % 2**bits
        yield f"0 {bits}", png(values, bits, 0), values * (255 // (2**bits - 1)), 0
        for clear in (b"", chunk(b"tRNS", bytes(2**bits))):
            colours = chunk(b"PLTE", PALETTE[: 2**bits].tobytes()) + clear
            yield f"3 {bits} {len(clear)}", png(values, bits, 3, colours), PALETTE[values], 0
    for number in range(1, 9):
        block = chunk(b"eXIf", turned(number))
        yield f"orientation {number}", png(RGB, 8, 2, block), upright(RGB, number), 0
        yield f"orientation {number} after", png(RGB, 8, 2, b"", block), upright(RGB, number), 0
    yield "XMP", png(RGB, 8, 2, chunk(b"iTXt", b"XML:com.adobe.xmp" + bytes(5) + XMP)), RGB, 0


def tiffs():
    rows = {
        (0, 8, 1): (255 - GREY, GREY, 0), (1, 8, 1): (GREY, GREY, 0), (2, 8, 3): (RGB, RGB, 0),
        (1, 16, 1): (DEEP[..., 0].astype(np.uint16), shallow(DEEP[..., 0]), 0),
        (2, 16, 3): (DEEP[..., :3].astype(np.uint16), shallow(DEEP[..., :3]), 1),
        (2, 8, 4): (np.dstack([RGB, ALPHA]), RGB, 0), (3, 8, 1): (BITS.astype(np.uint8), PALETTE[BITS], 0),
        (2, 16, 4): (DEEP.astype(np.uint16), shallow(DEEP[..., :3]), 1),
        (5, 8, 4): (INK, PRINTED, 2),
    }  # fmt: skip
    assert rows.keys() == formats._TIFF_KINDS
    for (photometric, depth, samples), (pixels, expected, off) in rows.items():
        tags = {320: (3, (PALETTE.T.astype(int) * 257).ravel().tolist())} if photometric == 3 else {}
        tags |= {338: (3, [2])} if (photometric, samples) == (2, 4) else {}
        tiles = (None, (16, 32)) if photometric else (None,)
        for order, compress, tile in itertools.product("<>", (None, 8, 32946), tiles):
            name = f"{photometric} {depth} {samples} {order} {compress} {tile}"
            data = tiff(pixels, photometric, order=order, compress=compress, tile=tile, tags=tags)
            yield name, data, expected, off
        yield f"{photometric} {depth} {samples} big", tiff(pixels, photometric, big=True, tags=tags), expected, off
        if (photometric, depth, samples) == (2, 8, 4):
            tags = {338: (3, [0])}  # not alpha
        for number, order in itertools.product(range(1, 9), "<>"):
            turn = tags | {274: (3 + number % 2, [number])}
            name = f"{photometric} {depth} {samples} {order} turned {number}"
            yield name, tiff(pixels, photometric, order=order, tags=turn), upright(expected, number), off
    yield "XMP", tiff(RGB, 2, tags={700: (1, XMP)}), RGB, 0
    for compress, number in itertools.product((None, 8), (1, 6)):
        data = tiff(RGB, 2, planar=2, compress=compress, tags={274: (3, [number])})
        yield f"planar {compress} {number}", data, upright(RGB, number), 0
    for name, pixels, number in itertools.product(("tiff_lzw", "packbits", "zstd"), (GREY, RGB), (1, 6)):
        data = encoded(pixels, "TIFF", compression=name, tiffinfo={274: number})
        yield f"{name} {number}", data, upright(pixels, number), 0
    yield "predictor", encoded(RGB, "TIFF", compression="tiff_lzw", tiffinfo={317: 2}), RGB, 0


def others():
    for header in (12, 40, 52, 56, 64, 108, 124):
        yield f"BMP {header}", bmp(RGB[..., ::-1], 24, header=header), RGB, 0
        for bits in (1, 4, 8):
            values = BITS[:, :37] % 2**bits
            yield (
                f"BMP {header} {bits}",
                bmp(values, bits, header=header, colours=PALETTE[: 2**bits]),
                (PALETTE[values]),
                0,
            )
        if header > 12:
            four = np.dstack([RGB[..., ::-1], ALPHA])
            yield f"BMP {header} 32 down", bmp(four, 32, header=header, down=True), RGB, 0
            if header != 64:
                fields = struct.pack("<IIII", 0xFF0000, 0xFF00, 0xFF, 0)[: 12 if header in (40, 52) else 16]
                yield f"BMP {header} fields", bmp(four, 32, header=header, compression=3, fields=fields), RGB, 0
    for data, expected in ((RGB, RGB), (GREY, GREY)):
        kind, deep = (b"P6", DEEP[..., :3]) if data.ndim == 3 else (b"P5", DEEP[..., 0])
        yield f"{kind} 255", kind + b"\n# x\n40\t24 255\n" + data.tobytes(), expected, 0
        yield f"{kind} 65535", kind + b" 40 24\n65535\n" + deep.astype(">u2").tobytes(), shallow(deep), 0
    yield "P4", b"P4\n37 24\n" + packed(BITS[:, :37] % 2, 1).tobytes(), 255 - 255 * (BITS[:, :37] % 2), 0
    yield "WebP", encoded(RGB, "WEBP", lossless=True), RGB, 0
    yield "WebP alpha", encoded(np.dstack([RGB, ALPHA]), "WEBP", lossless=True, exact=True), RGB, 0
    flat = np.full((H, W, 3), (200, 40, 90), np.uint8)
    yield "WebP lossy", encoded(flat, "WEBP", quality=100), flat, 4
    still = frame_of_webp()
    for number in range(1, 9):
        block = b"EXIF", turned(number)
        yield f"WebP {number}", webp(still, block, flags=8), upright(RGB, number), 0
        yield f"WebP {number} first", webp(block, still, flags=8), upright(RGB, number), 0
    yield "WebP with EXIF that is not announced", webp(still, (b"EXIF", turned(6)), flags=0), RGB, 0
    yield "WebP EXIF upright that begins with Exif", webp(still, (b"EXIF", tagged(turned(1))), flags=8), RGB, 0
    yield "WebP XMP", webp(still, (b"XMP ", XMP), flags=4), RGB, 0


@pytest.fixture(scope="module")
def decoded():
    """The decoder of the graph, of one file at a time: bytes -> uint8 [H,W,3]."""
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    def alone():
        file, size = (fn.external_source(name=name, batch=True) for name in ("file", "size"))
        return graph.decode(file, False, size)

    pipeline = alone()

    def decode(data, before, size):
        waste = np.full(1 << 16, before, np.uint8)  # what is freed here is what a careless decoder shows
        del waste
        return np.array(pipeline.run(file=[np.frombuffer(data, np.uint8)], size=[np.int32(size)])[0].at(0))

    return decode


@pytest.mark.parametrize("kinds", [jpegs, pngs, tiffs, others])
def test_what_is_admitted_has_its_size_and_its_pixels(kinds, decoded, tmp_path):
    """In the index, by the decoder three times, and by Pillow."""
    for name, data, pixels, off in kinds():
        pixels = np.asarray(pixels, np.float64)
        pixels = np.broadcast_to(pixels.reshape(*pixels.shape[:2], -1), (*pixels.shape[:2], 3))
        (tmp_path / "file").write_bytes(data)
        assert headers.read_headers(tmp_path, ["file"]) == [list(pixels.shape[:2])], name
        first, *more = (decoded(data, before, pixels.shape[:2]) for before in (0, 99, 200))
        assert first.shape == pixels.shape and np.abs(first - pixels).max() <= off, name
        assert all(np.array_equal(first, again) for again in more), name
        picture = pictures.read(data)
        assert picture.shape == pixels.shape and np.abs(picture - first.astype(int)).max() <= 1, name


# ---- What is left out: (name, file, the reason)


def broken():
    """EXIF blocks with an orientation of 6 that readers take otherwise, or the parts of the decoder do."""
    turn = 274, 3, 1, 6
    yield "value outside", exif(turn, (305, 2, 100, 5000))
    yield "value outside", exif((282, 5, 1, 5000), turn)
    for tag, fractions in FRACTIONS.items():
        yield "value outside", exif((tag, 5, 1, 99 - 8 * fractions), turn) + bytes(60)
    yield "ends before", exif(turn, count=5)
    yield "ends before", exif(turn)[:20]
    yield "II nor MM", exif(turn, order=">", magic=b"XX\0*")
    yield "than one SHORT", exif((274, 4, 1, 6))
    yield "than one SHORT", exif((274, 4, 1, 6), order=">")
    yield "than one SHORT", exif((274, 1, 1, 6))
    yield "than one SHORT", exif((274, 3, 2, 6))
    yield "two orientations", exif(turn, (274, 3, 1, 1))
    yield "two orientations", exif((274, 3, 1, 1), turn)
    yield "once too often", tagged(exif(turn))
    yield "once too often", tagged(tagged(exif(turn)))


def left_out():
    for reason, block in broken():
        yield reason, jpeg(tagged(block))
        yield reason, png(RGB, 8, 2, chunk(b"eXIf", block))
        yield reason, png(RGB, 8, 2, b"", chunk(b"eXIf", block))
        yield reason, webp(frame_of_webp(), (b"EXIF", block), flags=8)
    for one, two in itertools.permutations((1, 3, 6, 8), 2):
        yield "two EXIF", jpeg(tagged(turned(one)), tagged(turned(two)))
        blocks = chunk(b"eXIf", turned(one)), chunk(b"eXIf", turned(two))
        for before in range(3):
            yield "two EXIF", png(RGB, 8, 2, b"".join(blocks[:before]), b"".join(blocks[before:]))
    plain = jpeg()
    for process in (0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF):
        yield "JPEG is not supported", frame(plain, 1, process)
    yield "12 bits", frame(plain, 4, 12)
    yield "2 components", frame(plain, 9, 2)
    yield "two frame", plain[: plain.index(b"\xff\xc0")] + plain[plain.index(b"\xff\xc0") :][:19] + plain[158:]
    for between in (b"abc", b"\xff\xd0", b"\xff\xd8", b"\xff\x01", b"\xff\xe1\0\1"):
        yield "damaged", plain[:20] + between + plain[20:]
    yield "damaged", plain[: plain.index(b"\xff\xda")]
    yield "wrong check sum", png(RGB, 8, 2, chunk(b"eXIf", turned(6), right=False))
    yield "animated", encoded(RGB, "PNG", save_all=True, append_images=[Image.fromarray(255 - RGB)])
    yield "animated", encoded(RGB, "WEBP", save_all=True, append_images=[Image.fromarray(255 - RGB)])
    for bits, colour in ((4, 2), (16, 3), (3, 0), (8, 1), (8, 5)):
        yield "damaged", png(RGB, 8, 2)[:24] + bytes((bits, colour)) + png(RGB, 8, 2)[26:]
    yield "damaged", png(RGB, 8, 2)[:-12]
    yield "4,026,531,840 bytes", png(RGB, 8, 2)[:33] + b"\xf0\0\0\0eXIf" + png(RGB, 8, 2)[33:]
    yield "8,000,001 bytes", png(RGB, 8, 2, chunk(b"eXIf", bytes(8_000_001)))
    deep = DEEP.astype(np.uint16)
    yield "3 x 16 bits, RGB, planar", tiff(deep[..., :3], 2, planar=2)
    yield "4 x 8 bits, RGB, planar", tiff(np.dstack([RGB, ALPHA]), 2, planar=2)
    yield "3 x 8 bits, RGB, planar", tiff(RGB, 2, planar=2, tile=(16, 16))
    yield "2 x 8 bits, black is zero", tiff(np.dstack([GREY, ALPHA]), 1, tags={338: (3, [2])})
    yield "premultiplied", tiff(np.dstack([RGB, ALPHA]), 2, tags={338: (3, [1])})
    yield "1 x 16 bits, white is zero", tiff(deep[..., 0], 0)
    for kind, code in ((np.float32, 3), (np.float64, 3), (np.int8, 2), (np.int16, 2), (np.int32, 2), (np.uint32, 1)):
        word = {1: "TIFF of", 2: "signed TIFF of", 3: "float TIFF of"}[code]
        yield f"{word} 1 x", tiff(GREY.astype(kind), 1, tags={339: (3, [code])})
        yield f"{word} 3 x", tiff(RGB.astype(kind), 2, tags={339: (3, [code] * 3)})
    for bits in (1, 2, 4):
        yield f"1 x {bits} bits", tiff(BITS % 2**bits, 1, bits=bits)
    yield "Lab", tiff(RGB, 8)
    yield "YCbCr", tiff(RGB, 6)
    yield "compression 7", encoded(RGB, "TIFF", compression="jpeg")
    yield "turned", tiff(RGB, 2, tile=(16, 16), tags={274: (3, [6])})
    yield "turned", tiff(np.dstack([RGB, ALPHA]), 2, tags={338: (3, [2]), 274: (3, [6])})
    unmarked = next(data for name, data, _, _ in plain_jpegs() if name == "CMYK without Adobe")
    yield "turned", with_segments(unmarked, tagged(turned(6)))
    yield "compression 34925", encoded(RGB, "TIFF", compression="lzma")
    yield "palette", tiff(BITS.astype(np.uint8), 3, tags={320: (3, PALETTE.T.astype(int).ravel().tolist())})
    yield "palette", tiff(BITS.astype(np.uint8), 3, tags={320: (3, [9999] * 30)})
    yield "tiles of 24", tiff(RGB, 2, tile=(24, 24))
    yield "tiles of 16", tiff(RGB, 2, tile=(16, 16), tags={278: (3, [H])})
    yield "order of bits", tiff(RGB, 2, tags={266: (3, [2])})
    yield "predictor", tiff(RGB, 2, compress=8, tags={317: (3, [3])})
    yield "tiles of 16", tiff(GREY, 0, tile=(16, 16))
    yield "tag 274", tiff(RGB, 2, tags={274: (1, [6])})
    double = tiff(RGB, 2, tags={274: (3, [1]), 275: (3, [6])})
    yield "two of one kind", double.replace(struct.pack("<HHI", 275, 3, 1), struct.pack("<HHI", 274, 3, 1))
    yield "order MM", tiff(RGB, 2, big=True, order=">")
    yield "begins with a preview", tiff(RGB, 2, tags={254: (4, [1])})
    yield "16 bits", bmp(BITS, 16)
    yield "compression 1", bmp(BITS, 8, compression=1, colours=PALETTE)
    yield (
        "bit fields",
        bmp(np.dstack([RGB, ALPHA]), 32, compression=3, fields=struct.pack("<III", 255, 65280, 16711680)),
    )
    for shift in (-1, 10_000):
        yield "damaged", bmp(RGB, 24, shift=shift)
        yield "damaged", bmp(BITS, 8, colours=PALETTE, shift=shift)
    for cut in (1, 4, 500):
        yield "last row", bmp(np.dstack([RGB, ALPHA]), 32, down=cut == 4)[:-cut]
        yield "last row", bmp(RGB[:, :37], 24)[:-cut]
    for largest in (1, 15, 127, 254, 256, 1023, 4095, 65534):
        raw = (GREY.astype(int) * largest // 255).astype(">u2" if largest > 255 else np.uint8).tobytes()
        yield f"largest value of {largest}", b"P5\n40 24\n%d\n" % largest + raw
    yield "damaged", b"P6\r\n40 24\r\n255\r\n" + RGB.tobytes()
    yield "damaged", b"P6\n40 24\n255# x\n" + RGB.tobytes()
    yield "text", b"P2\n40 24\n255\n" + b"1 " * H * W
    yield "odd length", webp(frame_of_webp(), (b"ICCP", b"abc"), (b"EXIF", turned(6)), flags=8)
    # What libwebp's parser refuses, which ends the decoder.
    still, other = frame_of_webp(), encoded(RGB[:-2], "WEBP", lossless=True)
    for chunks in ((still, still), ((b"VP8X", bytes(10)), still), (still, (b"ALPH", b"ab")), (still, (b"ABCD", b""))):
        yield "none is expected", webp(*chunks, flags=0)
    yield "not that of its header", webp((b"VP8L", other[20:] + bytes(len(other) % 2)), flags=0)
    yield "not that of its header", webp((b"ALPH", b"ab"), still, flags=16)
    for flags in (0x40, 0x80, 0x01):
        yield "damaged", webp(still, flags=flags)
    whole = webp(still, flags=0)
    for more, size in ((b"xyz", 3), (b"XMP \x05\0\0\0ab", 10), (b"", -2)):  # within the size that the file names
        yield "damaged", whole[:4] + struct.pack("<I", len(whole) - 8 + size) + whole[8:] + more
    yield "damaged", webp((b"XMP ", b"ab"), flags=0)


def test_what_the_decoder_reads_wrongly_is_left_out_with_the_reason(tmp_path):
    for reason, data in left_out():
        (tmp_path / "file").write_bytes(data)
        (got,) = headers.read_headers(tmp_path, ["file"])
        assert isinstance(got, str) and reason in got, (reason, got)
        with pytest.raises(ValueError, match=re.escape(got)):
            pictures.read(data)


def test_every_cut_and_every_byte_of_a_header_is_survived(tmp_path):
    """A size or a reason for whatever was made of a file, the same from a part of one, however much is read at once,
    and from memory."""
    for data in (jpeg(tagged(turned(6))), png(RGB, 8, 2, chunk(b"eXIf", turned(6))), tiff(RGB, 2), bmp(RGB, 24)):
        for at in range(0, min(len(data), 300), 7):
            for changed in (data[:at], data[:at] + b"\xff" + data[at + 1 :]):
                with (tmp_path / "file").open("w+b") as file:
                    file.write(b"before" + changed + b"after")
                    file.flush()
                    got, *others = (
                        headers.header(file.fileno(), 6, len(changed), window=window) for window in (4096, 1, 50)
                    )
                assert others == [got, got]
                assert (isinstance(got, str) and got) or len(got) == 2
                try:
                    height, width, turn = formats.parse(formats.Held(changed))
                    assert got == headers.checked(*((width, height) if turn > 4 else (height, width)))
                except ValueError as error:
                    assert got == str(error)
