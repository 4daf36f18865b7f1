"""Which image files are admitted, told from their headers: what the decoder was shown to read right, and nothing else.

The decoder is DALI 2.4 on a CPU. Where two of its parts disagree about a file's orientation, one allocates a picture of
another shape than the other fills: the process dies, or unwritten memory comes back as pixels. So headers are read here
byte by byte, and a file is admitted only if all parts read the same orientation from it:

- Two EXIF blocks are refused.
- A faulty EXIF block is admitted only if it can say nothing but "upright". It is faulty if
  - its orientation is not one SHORT: the decoder takes two bytes of it, whatever its type;
  - a text or fraction lies outside of it: the decoder's parser of JPEG then drops the whole block, while OpenCV, which
    reads PNG and the JPEGs that libjpeg-turbo refuses, keeps what came before;
  - it begins with neither II nor MM, or its check sum in a PNG is wrong: the parts differ there too;
  - it begins with Exif, as only a JPEG's segment should: the decoder does not find it then, other readers do.
- XMP is not followed, nor EXIF as text in a PNG, nor EXIF that the header of a WebP does not announce.

The tables below are the white list. Each row was decoded three times, in a process that had filled its memory before,
and compared with the pixels that the file was made from; tests/pipeline/test_formats.py does it again.
"""

import os
import re
import struct
import zlib

# EXIF tags whose values the decoder reads outside of the entry: {tag: fractions of 8 bytes, or 0 for text, whose length
# the entry names}. ``_orientation`` looks whether they lie in the block.
_ELSEWHERE = {0x10E: 0, 0x10F: 0, 0x110: 0, 0x131: 0, 0x132: 0, 0x8298: 0, 0x11A: 1, 0x11B: 1, 0x13E: 2, 0x13F: 6}
_ELSEWHERE |= {0x211: 3, 0x214: 6}
_MOST_EXIF = 8_000_000  # bytes, in a PNG or WebP: libpng reads no longer chunk

# JPEG: baseline, extended (by Huffman codes) and progressive, of 8 bits. Arithmetic codes decode, but few can write
# them to show it; lossless ones, hierarchical ones and 12 bits do not. Four components are CMYK or YCCK, inverted where
# there is an Adobe segment. Turned ones without it are left out: OpenCV, which reads them, takes them for inverted.
_JPEG_PROCESSES = {0xC0, 0xC1, 0xC2}
_JPEG_OTHER = {0xC3: "lossless", 0xC9: "arithmetic", 0xCA: "arithmetic", 0xCB: "lossless arithmetic"}
_JPEG_COMPONENTS = {1, 3, 4}  # grey; YCbCr, or RGB where the Adobe segment or the components' names say it; CMYK, YCCK

# PNG: bits by colour type (grey, RGB, palette, grey and RGB with alpha, which is dropped), interlaced or not. All are
# exact, 16 bits are rounded to 8. Animated ones go wrong where EXIF follows the pixels or their frames are missing.
_PNG_BITS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}

# TIFF: photometric interpretation, bits, samples. All of them chunky, by the compressions below, in both byte orders,
# in strips or (not where white is zero) tiles; RGB of 8 bits also planar, in strips. Left out is what
# - decodes wrong: white is zero of 16 bits (read as if black were zero); grey with alpha, and planar RGB of 16 bits or
#   with alpha (each decode differs); floats (clipped to 0..1); turned ones, which OpenCV reads, in tiles or of 8 bits
#   with alpha; JPEG inside (where its size is not that of the TIFF, other memory shows);
# - does not decode: 2, 4 and 32 bits, signed; with them 1 bit, and Lab, which no two programs read alike.
_TIFF_KINDS = {(0, 8, 1), (1, 8, 1), (1, 16, 1), (2, 8, 3), (2, 16, 3), (2, 8, 4), (2, 16, 4), (3, 8, 1), (5, 8, 4)}
_TIFF_COMPRESSIONS = {1, 5, 8, 32773, 32946, 50000}  # none, LZW, Deflate, PackBits, Deflate, Zstandard
_TIFF_PHOTOMETRIC = {0: "white is zero", 1: "black is zero", 2: "RGB", 3: "palette", 5: "CMYK", 6: "YCbCr", 8: "Lab"}
_TIFF_SAMPLE = {1: "", 2: "signed ", 3: "float "}

# BMP: bits a pixel by kind of compression; of fields only those of 8 bits in the usual order. Run lengths leave pixels
# out, which nothing defines; of 16 bits, 5 become 8 without reaching white.
_BMP_BITS = {0: (1, 4, 8, 24, 32), 3: (32,)}
_BMP_HEADERS = {12, 40, 52, 56, 64, 108, 124}
_BMP_FIELDS = (0xFF0000, 0xFF00, 0xFF)

# PNM: P4, P5 and P6, of these largest values. Others are read as if they were one of these; text is declined.
_PNM_LARGEST = {255, 65535}
_SPACE = rb"\s(?:\s|#[^\r\n]*\n)*"
# One byte of space follows the last number, then the pixels: a CR LF there would shift them by one byte.
_PNM_BITS = re.compile(rb"P(4)%s(\d{1,9})%s(\d{1,9})[ \t\n]" % (_SPACE, _SPACE))
_PNM_BYTES = re.compile(rb"P([56])%s(\d{1,9})%s(\d{1,9})%s(\d{1,9})[ \t\n]" % (_SPACE, _SPACE, _SPACE))

_WEBP_CHUNKS = {b"ICCP", b"ALPH", b"VP8 ", b"EXIF", b"XMP "}  # of one picture, each once

_DAMAGED = "damaged or truncated header"
_WINDOW = 4096  # bytes read at once


_SEGMENT = struct.Struct(">HH").unpack_from  # of a JPEG: marker and length


class Bytes:
    """An open file, or a part of one. A read takes ``window`` bytes, or as many as are asked for if these are more."""

    def __init__(self, descriptor, start, length, window=_WINDOW):
        self.length, self._window = length, window
        self._descriptor, self._start = descriptor, start
        self._at, self._held = 0, b""

    def at(self, offset, count):
        """``count`` bytes from ``offset`` on; ValueError where it ends before, OSError where it cannot be read."""
        begin = self._hold(offset, count)
        return self._held[begin : begin + count]

    def on(self, offset, count):
        """What is in memory from ``offset`` on, at least ``count`` bytes; errors as of ``at``."""
        begin = self._hold(offset, count)  # first: it may be other bytes that are held then
        return self._held[begin:]

    def _hold(self, offset, count):
        begin = offset - self._at
        if begin < 0 or begin + count > len(self._held):
            size = min(max(count, self._window), self.length - offset)
            if size < count:
                raise ValueError(_DAMAGED)
            self._held = self._read(offset, size)
            self._at, begin = offset, 0
            if len(self._held) < count:
                raise ValueError(_DAMAGED)
        return begin

    def _read(self, offset, count):
        return os.pread(self._descriptor, count, self._start + offset)


class Held:
    """The same for bytes in memory."""

    def __init__(self, data):
        self.length, self._data = len(data), data

    def at(self, offset, count):
        if offset + count > self.length:
            raise ValueError(_DAMAGED)
        return self._data[offset : offset + count]

    def on(self, offset, count):
        return self.at(offset, max(count, self.length - offset))


def parse(file):
    """(height, width, orientation) of the image in ``Bytes`` or ``Held``: the size before the rotation, the orientation
    1 to 8 by EXIF's numbers; ValueError with the reason for what is not admitted."""
    if not file.length:
        raise ValueError("empty file")
    start = file.at(0, min(12, file.length))
    for magic, name, read in _FORMATS:
        if magic.match(start):
            if read is None:
                raise ValueError(f"format {name} is not supported by the decoder")
            return read(file)
    raise ValueError("not an image")


def named(start):
    """The format of what starts with these 12 bytes."""
    return next((name for magic, name, _ in _FORMATS if magic.match(start)), "other")


def _orientation(block, fault=None):
    """The orientation that an EXIF block names, 1 if none; ValueError if it turns the image and is faulty, see above.

    ``fault``: what is already known to be wrong with the block.
    """
    while block[:6] == b"Exif\0\0":
        block, fault = block[6:], "begins with Exif once too often, where the decoder does not find it"
    order = "<" if block[:2] == b"II" else ">"
    try:
        magic, start = struct.unpack_from(order + "HI", block, 2)
        (count,) = struct.unpack_from(order + "H", block, start)
    except struct.error:
        return 1
    if magic != 42:
        return 1
    if block[:2] not in (b"II", b"MM"):
        fault = "begins with neither II nor MM"
    entries = block[start + 2 : start + 2 + 12 * count]
    if len(entries) < 12 * count:
        fault = "ends before its last entry"
        entries += bytes(-len(entries) % 12)  # the decoder may read what there is of that
    found = None
    for tag, kind, number, value in struct.iter_unpack(order + "HHII", entries):
        if tag == 274:
            short = value & 0xFFFF if order == "<" else value >> 16
            if (kind, number) != (3, 1):
                fault = "has an orientation of another type than one SHORT"
                short = max((v for v in (short, value, value & 0xFF, value >> 24) if 1 <= v <= 8), default=1)
            short = short if 1 <= short <= 8 else 1
            if found not in (None, short):
                raise ValueError("EXIF block has two orientations")
            found = short
        elif tag in _ELSEWHERE:
            size = 8 * _ELSEWHERE[tag] or number * (number > 4)
            if size and value + size > len(block):
                fault = "has a value outside of it"
    if fault and found not in (None, 1):
        raise ValueError(f"EXIF block {fault}, and turns the image")
    return found or 1


# ---- JPEG


def _jpeg(file):
    at, frame, exif, adobe = 2, None, None, False
    held, base = b"", 0
    while True:
        if at + 4 > base + len(held):
            held, base = file.on(at, 4), at
        marker, size = _SEGMENT(held, at - base)
        kind = marker & 0xFF
        if marker == 0xFFFF:  # any number of these may come before a marker
            at += 1
            continue
        # In front of the pixels there are segments and nothing between them.
        if marker < 0xFFC0 or 0xD0 <= kind <= 0xD9 or size < 2:
            raise ValueError(_DAMAGED)
        if kind == 0xDA:
            break
        if kind == 0xE1:
            if size >= 8 and file.at(at + 4, 6) == b"Exif\0\0":
                if exif is not None:
                    raise ValueError("two EXIF blocks")
                exif = file.at(at + 10, size - 8)
        elif kind == 0xEE:
            adobe = adobe or (size >= 14 and file.at(at + 4, 5) == b"Adobe")
        elif kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            if frame:
                raise ValueError("two frame headers")
            frame = kind, size, *struct.unpack(">BHHB", file.at(at + 4, 6))
        at += 2 + size
    if not frame:
        raise ValueError(_DAMAGED)
    process, size, bits, height, width, components = frame
    if process not in _JPEG_PROCESSES:
        raise ValueError(f"{_JPEG_OTHER.get(process, 'hierarchical or arithmetic')} JPEG is not supported")
    if bits != 8:
        raise ValueError(f"JPEG of {bits} bits is not supported")
    if components not in _JPEG_COMPONENTS:
        raise ValueError(f"JPEG of {components} components is not supported")
    if size != 8 + 3 * components:
        raise ValueError(_DAMAGED)
    orientation = 1 if exif is None else _orientation(exif)
    if components == 4 and orientation > 1 and not adobe:
        raise ValueError("JPEG of CMYK without an Adobe segment, turned, is not supported")
    return height, width, orientation


# ---- PNG


def _png(file):
    size, kind, width, height, bits, colour, *methods = struct.unpack(">I4sIIBBBBB", file.at(8, 21))
    if (size, kind) != (13, b"IHDR") or bits not in _PNG_BITS.get(colour, ()) or methods not in ([0, 0, 0], [0, 0, 1]):
        raise ValueError(_DAMAGED)
    # To the end: EXIF may follow the pixels, and the decoder looks there.
    at, exif, pixels = 33, None, False
    while kind != b"IEND":
        size, kind = struct.unpack(">I4s", file.at(at, 8))
        if kind == b"IDAT":
            pixels = True
        elif kind == b"eXIf":
            if exif is not None:
                raise ValueError("two EXIF blocks")
            exif = _exif(file, at + 8, size)
            right = int.from_bytes(file.at(at + 8 + size, 4), "big") == zlib.crc32(b"eXIf" + exif)
        elif kind == b"acTL":
            raise ValueError("animated PNG is not supported")
        at += 12 + size
    if not pixels:
        raise ValueError(_DAMAGED)
    return height, width, 1 if exif is None else _orientation(exif, None if right else "has a wrong check sum")


def _exif(file, at, size):
    if size > _MOST_EXIF:
        raise ValueError(f"EXIF block of {size:,} bytes; expected at most {_MOST_EXIF:,}")
    return file.at(at, size)


# ---- TIFF


def _tiff(file):
    """The first image of it: Pillow and the decoder read that."""
    start = file.at(0, 8)
    order, big = "<" if start[:2] == b"II" else ">", 43 in start[2:4]
    if big:  # offsets of 8 bytes
        at, head, entry, inline = struct.unpack(order + "Q", file.at(8, 8))[0], "Q", "HHQ8s", 8
        if struct.unpack(order + "HH", start[4:]) != (8, 0):
            raise ValueError(_DAMAGED)
    else:
        at, head, entry, inline = struct.unpack(order + "I", start[4:])[0], "H", "HHI4s", 4
    (count,) = struct.unpack(order + head, file.at(at, 8 if big else 2))
    if not 0 < count <= 4096:
        raise ValueError(_DAMAGED)
    entries = file.at(at + (8 if big else 2), count * (12 + 8 * big))
    tags, last = {}, 0
    for tag, kind, number, value in struct.iter_unpack(order + entry, entries):
        # The decoder takes the last of two and stops early in a palette's, libtiff the first.
        if tag <= last:
            raise ValueError("TIFF tags out of order, or two of one kind")
        tags[tag], last = (kind, number, value), tag

    def values(tag, *default):
        """The integers of a tag."""
        if tag not in tags:
            return default
        kind, number, value = tags[tag]
        code = {3: "H", 4: "I"}.get(kind)
        if code is None or number > 1024 or (kind == 4 and tag in (258, 339)):
            raise ValueError(f"TIFF tag {tag} of type {kind} and length {number} is not supported")
        size = number * (2 if kind == 3 else 4)
        if size > inline:
            value = file.at(struct.unpack(order + ("Q" if big else "I"), value)[0], size)
        return struct.unpack(f"{order}{number}{code}", value[:size])

    def one(tag, *default):
        found = values(tag, *default)
        if len(found) != 1:
            raise ValueError(f"TIFF with {len(found)} values of tag {tag}; expected one")
        return found[0]

    width, height, photometric, samples = one(256), one(257), one(262), one(277, 1)
    compression, planar, orientation = one(259, 1), one(284, 1), one(274, 1)
    bits, formats = values(258), values(339, 1)
    extra, tile = values(338), (one(322, 0), one(323, 0))
    if one(254, 0) & 1:
        raise ValueError("TIFF that begins with a preview, as a camera's raw file does, is not supported")
    if len(set(bits)) != 1 or len(bits) != samples or len(set(formats)) != 1 or len(formats) not in (1, samples):
        raise ValueError(f"TIFF of {samples} samples with {bits} bits of formats {formats} is not supported")
    kind = photometric, bits[0], samples
    name = _TIFF_PHOTOMETRIC.get(photometric, f"photometric interpretation {photometric}")
    what = f"{_TIFF_SAMPLE.get(formats[0], 'untyped ')}TIFF of {samples} x {bits[0]} bits, {name}"
    if kind not in _TIFF_KINDS or formats[0] != 1:
        raise ValueError(f"{what}, is not supported")
    if planar != 1 and (planar != 2 or kind != (2, 8, 3) or tile != (0, 0)) and samples > 1:
        raise ValueError(f"{what}, planar, is not supported")
    if compression not in _TIFF_COMPRESSIONS:
        raise ValueError(f"{what}, of compression {compression}, is not supported")
    if extra and (kind[::2] != (2, 4) or extra not in ((0,), (2,))):
        raise ValueError(f"{what}, of which some are of kind {extra} (1: premultiplied alpha), is not supported")
    if one(266, 1) != 1 or one(317, 1) not in (1, 2):
        raise ValueError(f"{what}, of another order of bits or predictor, is not supported")
    if tile != (0, 0) and (tile[0] % 16 or tile[1] % 16 or 0 in tile or 278 in tags or photometric == 0):
        raise ValueError(f"{what}, in tiles of {tile[1]} x {tile[0]}, is not supported")
    if 2 <= orientation <= 8 and (tile != (0, 0) or (bits[0] == 8 and extra == (2,))):
        raise ValueError(f"{what}, turned, in tiles or with alpha, is not supported")
    if big and order == ">":
        raise ValueError("BigTIFF of the byte order MM is not supported")
    if photometric == 3:
        palette = values(320)
        if len(palette) != 3 * 256 or max(palette) < 256:
            raise ValueError("TIFF palette of another size, or of 8 instead of 16 bits, is not supported")
    return height, width, orientation if 1 <= orientation <= 8 else 1


# ---- WebP


def _webp(file):
    size, kind, length = struct.unpack("<I4x4sI", file.at(4, 16))
    if size + 8 > file.length:
        raise ValueError(_DAMAGED)
    if kind != b"VP8X":
        return *_webp_frame(file, 12), 1
    # What libwebp's parser of such a container refuses ends the process: so all chunks of it are looked at.
    field = file.at(20, 10)
    if field[0] & 2:
        raise ValueError("animated WebP is not supported")
    if length != 10 or field[0] & 0xC1 or any(field[1:4]):
        raise ValueError(_DAMAGED)
    width, height = (int.from_bytes(field[i : i + 3], "little") + 1 for i in (4, 7))
    at, found, odd = 30, {}, False
    while at < size + 8:
        kind, length = struct.unpack("<4sI", file.at(at, 8))
        kind = b"VP8 " if kind == b"VP8L" else kind
        if kind in found or kind not in _WEBP_CHUNKS or (kind == b"ALPH" and b"VP8 " in found):
            raise ValueError(f"WebP with a chunk {kind!r}, where none is expected, is not supported")
        if kind == b"EXIF" and field[0] & 8 and odd:  # of which the decoder does not skip the byte that fills it up
            raise ValueError("WebP with EXIF after a chunk of odd length, where the decoder does not find it")
        found[kind], odd = (at, length), odd or length % 2
        at += 8 + length + length % 2
    if at != size + 8 or b"VP8 " not in found or (field[0] & 8 and b"EXIF" not in found):
        raise ValueError(_DAMAGED)
    place = found[b"VP8 "][0]
    if _webp_frame(file, place) != (height, width) or (b"ALPH" in found and file.at(place, 4) != b"VP8 "):
        raise ValueError("WebP whose picture is not that of its header")
    if not field[0] & 8:
        return height, width, 1
    at, length = found[b"EXIF"]
    return height, width, _orientation(_exif(file, at + 8, length))


def _webp_frame(file, at):
    """(height, width) of the picture in a chunk."""
    kind = file.at(at, 4)
    if kind == b"VP8 ":
        frame, sync, width, height = struct.unpack("<B2x3sHH", file.at(at + 8, 10))
        if not frame & 1 and sync == b"\x9d\x01\x2a":
            return height & 0x3FFF, width & 0x3FFF
    elif kind == b"VP8L":
        magic, sides = struct.unpack("<BI", file.at(at + 8, 5))
        if magic == 0x2F and not sides >> 29:
            return (sides >> 14 & 0x3FFF) + 1, (sides & 0x3FFF) + 1
    raise ValueError(_DAMAGED)


# ---- BMP


def _bmp(file):
    offset, size = struct.unpack("<II", file.at(10, 8))
    compression = colours = 0
    if size == 12:
        width, height, _, bits = struct.unpack("<HHHH", file.at(18, 8))
    elif size in _BMP_HEADERS:
        width, height, _, bits, compression, _, _, _, colours, _ = struct.unpack("<iiHHIIiiII", file.at(18, 36))
    else:
        raise ValueError(_DAMAGED)
    if bits not in _BMP_BITS.get(compression, ()) or (compression and size == 64):
        raise ValueError(f"BMP of {bits} bits and compression {compression} is not supported")
    end = 14 + size
    if compression == 3:
        if struct.unpack("<III", file.at(54, 12)) != _BMP_FIELDS:
            raise ValueError("BMP of unusual bit fields is not supported")
        end = max(end, 66)
    if bits <= 8:
        colours = colours or 1 << bits
        end += colours * (3 if size == 12 else 4)
    if (bits <= 8 and colours > 1 << bits) or width < 1 or not end <= offset < file.length:
        raise ValueError(_DAMAGED)
    # A part of the decoder reads what is cut, by rows that are not filled up, or leaves the rest black.
    if offset + abs(height) * ((width * bits + 31) // 32 * 4) > file.length:
        raise ValueError("BMP that ends before its last row does")
    return abs(height), width, 1


# ---- PNM


def _pnm(file):
    start = file.at(0, min(_WINDOW, file.length))
    found = _PNM_BITS.match(start) or _PNM_BYTES.match(start)
    if not found:
        raise ValueError(_DAMAGED)
    _, width, height, *largest = map(int, found.groups())
    if largest and largest[0] not in _PNM_LARGEST:
        raise ValueError(f"PNM of a largest value of {largest[0]} is not supported; expected 255 or 65535")
    return height, width, 1


COMPRESSED = rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd"  # gzip, bzip2, xz, zstd
_FORMATS = [
    (re.compile(magic, re.DOTALL), name, read)
    for magic, name, read in (
        (rb"\xff\xd8", "JPEG", _jpeg),
        (rb"\x89PNG\r\n\x1a\n", "PNG", _png),
        (rb"RIFF....WEBP", "WebP", _webp),
        (rb"II[*+]\0|MM\0[*+]", "TIFF", _tiff),
        (rb"BM", "BMP", _bmp),
        (rb"P[456]\s", "PNM", _pnm),
        (rb"GIF8", "GIF", None),
        (rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51", "JPEG2000", None),
        (rb"....ftypavi", "AVIF", None),
        (rb"....ftyp(hei|hev|mif)", "HEIF", None),
        (rb"\xff\x0a|\0\0\0\x0cJXL ", "JPEG XL", None),
        (rb"P[123]\s", "PNM as text", None),
        (rb"P7\s", "PAM", None),
        (rb"P[Ff]\s", "PFM", None),
        (rb"8BPS", "PSD", None),
        (COMPRESSED + b"|PK", "of compressed files", None),
        (rb"version http", "of Git LFS's pointers (git lfs pull fetches the files)", None),
    )
]
