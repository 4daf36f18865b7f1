"""What a file holds: the size of an image, or the samples of a tar and theirs; nothing but headers is read for it.

This file is also the program of the processes that share the work, and therefore imports nothing of the package but
three neighbours, which import nothing else of it.
"""

import errno
import itertools
import json
import os
import re
import signal
import stat
import struct
import sys
import tarfile

if __package__:
    from pipeline import formats, objects
    from pipeline.latency import Threads, concurrently
else:
    import formats
    import objects
    from latency import Threads, concurrently

# Why a file cannot be read although nothing may be wrong with it: what network file systems say of their servers, and
# what a process has run out of. EREMOTEIO is that of ``objects.get``.
MAY_PASS = frozenset({
    errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH,
    errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ESHUTDOWN, errno.EREMOTEIO,
    errno.EAGAIN, errno.EBUSY, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
})  # fmt: skip
_SUFFIXES = re.compile(
    r"\.(jpg|jpeg|jpe|jfif|png|bmp|webp|tif|tiff|ppm|pgm|pbm|pnm|jp2|j2k|jxl|gif|avif|heic|heif|hif)", re.IGNORECASE
)
_COMPRESSED = re.compile(r"\.(gz|bz2|xz|zst|zip)", re.IGNORECASE)
UNPACK = "expected plain .tar files, whose members can be read where they lie: decompress them"
_MAX_SIDE, _MAX_PIXELS = 65535, 178_000_000
# Bytes of a file at most, as it is read whole: for each pixel, twice what the deepest kind has, and for what else is in
# it. A TIFF of a stack of images, of which the first is taken, may have more than there is memory.
_DEEPEST, _BESIDE = 16, 1 << 27
_WINDOW = 1024  # bytes read at once of a tar, where pages are far apart: a JPEG's header without EXIF has 650
# The header of a member of a tar: name, size, check sum, kind, prefix of the name. Kinds: file (NUL, 0 and 7), link,
# symbolic link, device (3 and 4), folder, pipe.
_HEADER = struct.Struct("100s24x12s12x8sc188x155s12x")
_ZEROS, _DATA, _KINDS = bytes(512), b"\x0007", b"\x0001234567"
_PAX = re.compile(r"path|size|linkpath|[amc]time|uid|gid|uname|gname|(SCHILY|LIBARCHIVE)\.xattr\..*", re.DOTALL)
# Looked at after every _SOME members: where they lie this far apart on average (bytes), the system's read-ahead reads
# what nobody needs, and is turned off.
_SOME, _FAR = 8, 16_384
_MAX_LABEL = 1 << 20  # bytes of a .cls or .json
_AT_ONCE = 64  # files, after which it is seen whether threads pay
_PASSING = {os.strerror(number) for number in MAY_PASS}
_NOT_HAD = "not to be had"  # of an object
MISSING = f"{_NOT_HAD}: {objects.GONE}"
# ENOENT: of a file that had just been listed, as of a disk that is no longer mounted.
_REFUSED = {os.strerror(errno.EACCES), os.strerror(errno.EPERM), os.strerror(errno.ENOENT), _NOT_HAD}
WHOLE = "/", objects.SCHEME  # what a path begins with that is not relative
# Bytes of an object that the first request asks for, as EXIF may hold a preview of some 10,000, and the most that later
# ones do, each for four times as many: a PNG is read to its end, and may have a chunk for each 8,192.
_FIRST, _MOST = 16_384, 1 << 20


def read_headers(root, paths):
    """[height, width] of each image file, or why it is rejected; the rows of each tar, see ``_read_shard``."""
    root = os.path.join(root, "")

    def one(path):
        return _read_file(path if path.startswith(WHOLE) else root + path)

    if any(path.startswith(objects.SCHEME) for path in paths):
        with Threads(objects.AT_A_TIME) as pool:
            return list(pool.map(one, paths))

    def read(first):
        return list(map(one, paths[first : first + _AT_ONCE]))

    return list(itertools.chain.from_iterable(concurrently(read, range(0, len(paths), _AT_ONCE))))


def unread(result):
    """Why a file could not be read, by its result, if the reason may pass; otherwise None."""
    return next((reason for reason in _reasons(result) if reason.split(": ")[0] in _PASSING), None)


def refused(result):
    """Whether a file with this result was refused or gone: another start may read it though it has not changed."""
    return any(reason.split(": ")[0] in _REFUSED for reason in _reasons(result))


def _reasons(result):
    if result and isinstance(result[0], int):  # as nearly all
        return []
    return [result] if isinstance(result, str) else [row[2] for row in result if isinstance(row[2], str)]


def _read_file(path):
    if path.startswith(objects.SCHEME):
        return _read_object(path)
    if path.lower().endswith(".tar"):
        return _read_shard(path)
    try:
        descriptor = opened(path)
    except OSError as error:
        return error.strerror or "not readable"
    try:
        return header(descriptor, 0, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def opened(path, _=None):
    """A descriptor of a regular file; OSError where it cannot be opened or is something else, such as a pipe, which
    would keep its reader waiting. Fits ``opener`` of Python's ``open``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return descriptor


def _read_object(uri):
    try:
        return checked(*upright(_Object(uri)))
    except ValueError as error:
        return str(error)
    except OSError as error:
        kind = os.strerror(error.errno) if error.errno in MAY_PASS else _NOT_HAD
        return f"{kind}: {error.strerror}"


class _Object(formats.Bytes):
    """An object, whose length comes with its first bytes."""

    def __init__(self, uri):
        self._uri = uri
        first, length = objects.begin(uri, _FIRST)
        super().__init__(None, 0, length, _FIRST)
        self._held = first

    def _read(self, offset, count):
        self._window = min(4 * self._window, _MOST)
        return objects.get(self._uri, offset, count).tobytes()


def header(descriptor, start, length, **how):
    """[height, width] of the upright image in so many bytes of an open file, or the reason why there is none."""
    try:
        return checked(*upright(formats.Bytes(descriptor, start, length, **how)))
    except ValueError as error:
        return str(error)
    except OSError as error:
        return error.strerror or "not readable"


def upright(file):
    """[height, width] of the upright image in ``formats.Bytes`` or ``Held``; ValueError or OSError if there is none."""
    height, width, orientation = formats.parse(file)
    if file.length > _DEEPEST * height * width + _BESIDE:
        raise ValueError(f"{file.length / 1e6:,.0f} MB for {height}x{width} pixels: expected one image a file")
    return [width, height] if orientation >= 5 else [height, width]


def checked(height, width):
    """[height, width], or what is wrong with it."""
    if min(height, width) < 1 or max(height, width) > _MAX_SIDE or height * width > _MAX_PIXELS:
        return f"size {height}x{width}: expected sides of 1 to {_MAX_SIDE} and at most {_MAX_PIXELS} pixels"
    return [height, width]


# ---- Tar shards


def _read_shard(path):
    """What a tar holds: rows of member (None: the tar itself), label, [height, width] or reason, offset, length."""
    try:
        with open(path, "rb") as file:
            if re.match(formats.COMPRESSED, file.read(6)):
                return [[None, None, f"compressed: {UNPACK}", 0, 0]]
            file.seek(0)
            members, damage = _plain_members(file.fileno()), None
            if members is None:
                members, damage = _members(file)
            rows = [row for sample in _samples(members) for row in _sample(file.fileno(), *sample)]
    except OSError as error:
        return [[None, None, error.strerror or "not readable", 0, 0]]
    return rows + ([[None, None, damage, 0, 0]] if damage else [])


def _plain_members(descriptor):
    """What ``_members`` finds, by reading headers only, in a tar that is whole and holds nothing unusual; None for any
    other.

    tarfile takes 30 us for a member, and read-ahead half of the tar from the disk.
    """
    size = os.fstat(descriptor).st_size
    tar, at, members, given = formats.Bytes(descriptor, 0, size, _WINDOW), 0, [], {}
    try:
        while (block := tar.at(at, 512)) != _ZEROS:
            name, length, check, kind, prefix = _HEADER.unpack(block)
            if sum(block) - sum(check) + 8 * 32 != _octal(check):
                return None
            begin, length = at + 512, _octal(length)
            if kind in b"xL":
                data = tar.at(begin, length)
                given |= _pax(data) if kind == b"x" else {"path": data.split(b"\0", 1)[0]}
                at = begin + (length + 511) // 512 * 512
                continue
            name, prefix = name.split(b"\0", 1)[0], prefix.split(b"\0", 1)[0]
            name = prefix + b"/" + name if prefix else name
            if kind == b"\0" and name.endswith(b"/"):
                kind = b"5"
            name = given.get("path", name)
            if kind in _DATA:
                length = int(given.get("size", length))
                at = begin + (length + 511) // 512 * 512
                if length < 0 or begin + length > size or name.endswith(b"/"):
                    return None
            elif kind in _KINDS:
                at = begin
            else:
                return None
            member = tarfile.TarInfo(name.decode("utf-8", "surrogateescape"))
            member.size, member.type, member.offset_data = length, kind, begin
            members.append(member)
            given = {}
            if len(members) % _SOME == 0 and at > len(members) * _FAR:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        rest = os.pread(descriptor, 1 << 20, at)
    except ValueError:
        return None
    return None if given or rest.strip(b"\0") or len(rest) == 1 << 20 else members


def _octal(field):
    value = int(field.rstrip(b" \0") or b"0", 8)
    if value < 0:
        raise ValueError("negative")
    return value


def _pax(data):
    """The records of an extended header, {name: bytes}; ValueError where more than name and size matters."""
    given = {}
    while data:
        length, _, _ = data.partition(b" ")
        length = int(length)
        key, equals, value = data[:length].partition(b" ")[2].partition(b"=")
        key = key.decode()
        if not (equals and value.endswith(b"\n") and length > 0) or not _PAX.fullmatch(key):
            raise ValueError("unusual")
        given[key] = value[:-1]
        data = data[length:]
    return given


def _members(file):
    """The whole members of a tar in their order, and what is wrong with the rest of it or None."""
    size, members, end = os.fstat(file.fileno()).st_size, [], -1
    try:
        with tarfile.open(fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape") as tar:
            for member in tar:
                # A negative size leads some versions of tarfile round in circles.
                if member.size < 0 or member.offset <= end:
                    raise tarfile.ReadError("impossible size")
                if member.isreg() and not member.issparse() and member.offset_data + member.size > size:
                    raise tarfile.ReadError(f"ends within {printable(member.name)}")
                members.append(member)
                end = member.offset
            # tarfile stops silently at what is no header. The end is zeros: two blocks, and more to fill a record.
            file.seek(tar.offset)
            rest = file.read(1 << 20)
            if not rest:
                raise tarfile.ReadError("no end mark")
            if any(rest) or len(rest) == 1 << 20:
                raise tarfile.ReadError(f"no header at byte {tar.offset} of {size}")
    except OSError:
        raise
    except Exception as error:  # tarfile's parsers raise nearly anything on damaged headers
        said = str(error) or type(error).__name__
        whole = counted(len(members), "member")
        return members, f"damaged or truncated after {whole} ({said}); what follows is left out"
    return members, None


def _samples(members):
    """(key, {extension: member}) sorted by key; folders and hidden files are passed over."""
    samples = {}
    for member in members:
        folder, slash, base = member.name.rpartition("/")
        stem, _, extension = base.partition(".")
        if stem and not member.isdir():
            samples.setdefault(folder + slash + stem, {})[extension.lower()] = member  # of equal names the last, as tar
    return sorted(samples.items())


def _sample(descriptor, key, parts):
    """The rows of one sample, see ``_read_shard``."""
    images = sorted(extension for extension in parts if _SUFFIXES.fullmatch("." + extension))
    if not images:
        for extension, member in parts.items():
            if named_as_image(member.name):
                reason = f"extension .{printable(extension)}, from the first dot of the name on; expected one dot"
                return [[member.name, None, reason, 0, 0]]
        others = f", as no other of the {len(parts)} members of its sample" if len(parts) > 1 else ""
        return [[next(iter(parts.values())).name, None, f"not named as an image{others}", 0, 0]]
    label, rows = None, []
    for extension in ("json", "cls"):
        if extension in parts:
            try:
                text = _label(descriptor, parts[extension], extension)
                label = label if text is None else text
            except (ValueError, RecursionError) as error:
                reason = f"no label: {error}" if isinstance(error, ValueError) else "no label: nested too deeply"
                rows.append([parts[extension].name, None, reason, 0, 0])
    for extension in images:
        member = parts[extension]
        place = member.offset_data, member.size
        if extension != images[0]:
            result = f"second image of a sample, of which .{images[0]} is used"
        elif reason := _not_plain(member):
            result = reason
        else:
            result = header(descriptor, *place, window=_WINDOW)
        rows.append([member.name, label, result, *place])
    return rows


def _not_plain(member):
    """Why the bytes of a member are not simply there, or None."""
    if "\0" in member.name:
        return "NUL in the name"
    if member.issparse():
        return "sparse member"
    return None if member.isreg() else "link inside a tar" if member.islnk() or member.issym() else "not a regular file"


def _label(descriptor, member, extension):
    """The class name in a .cls or .json member, None if that names none; ValueError if it cannot be told."""
    if reason := _not_plain(member):
        raise ValueError(reason)
    if member.size > _MAX_LABEL:
        raise ValueError(f"{member.size} bytes; expected at most {_MAX_LABEL}")
    text = os.pread(descriptor, member.size, member.offset_data).decode("utf-8-sig", "surrogateescape").strip()
    if extension == "cls":
        return text or None
    content = json.loads(text)
    value = content.get("label", content.get("cls")) if isinstance(content, dict) else None
    if isinstance(value, str):
        return value.strip() or None
    if value is not None and type(value) is not int:
        raise ValueError(f"it is a {type(value).__name__}; expected text or an integer")
    return None if value is None else str(value)


# ---- Names


def named_as_image(path):
    stem, suffix = os.path.splitext(path)
    return bool(_SUFFIXES.fullmatch(os.path.splitext(stem)[1] if _COMPRESSED.fullmatch(suffix) else suffix))


def printable(path: str) -> str:
    """A file name for the screen: line breaks, control characters and undecodable bytes as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in path)


def counted(number: int, noun: str) -> str:
    """A noun with its number, for the screen: 1 image, 2,000 images."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end of the input is the end
    for line in sys.stdin:
        print(json.dumps(read_headers(sys.argv[1], json.loads(line))), flush=True)
