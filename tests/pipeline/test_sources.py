"""Lists and tar shards: what the index makes of them, and that batches from shards are those from the same files."""

import errno
import io
import itertools
import os
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import jpeg, photo
from PIL import Image

from pipeline import Index, evaluation_batches, headers, scan
from pipeline.shards import Shards
from pipeline.stream import replacement
from tests.pipeline.test_loader import all_same, loader, same, tensors


def write_tar(path, members, format=tarfile.GNU_FORMAT):
    """``members``: (name, content), or a TarInfo without content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as tar:
        for member in members:
            if isinstance(member, tuple):
                name, content = member
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            else:
                tar.addfile(member)


def special(name, kind, target=""):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def labelled(index):
    """{path: class name}"""
    return {p: index.classes[n] if n >= 0 else None for p, n in zip(index.paths, index.labels.tolist(), strict=True)}


# ---- Lists


def test_a_list_names_images_and_labels(tmp_path):
    for name in ("b.jpg", "my photo.jpg", "sub/a.jpg", "no suffix", "#1.jpg", "your photo.jpg", "x y.png"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(height=30))
    (tmp_path / "data/text.dat").write_text("hello, I am text")
    elsewhere = tmp_path / "elsewhere.jpg"
    elsewhere.write_bytes(jpeg())
    lines = [
        "# a comment", "# of old.jpg", "#gone.jpg 9", "#a.tar", "",
        "b.jpg 10", "sub/a.jpg 9\r", "my photo.jpg\tbig cat", "no suffix\t", f"{elsewhere} -1",
        "../elsewhere.jpg big", "gone.jpg\tonly bad", "text.dat\t10", "sub\t9", "é.jpg",
        "#1.jpg 9", "your photo.jpg", "x y.png 9",
    ]  # fmt: skip
    (tmp_path / "data/train.txt").write_text("\ufeff" + "\n".join(lines))
    index = Index.scan(tmp_path / "data/train.txt", tmp_path / "cache")
    assert index.classes == ("-1", "9", "10", "big", "big cat", "only bad")
    assert labelled(index) == {
        "b.jpg": "10", "sub/a.jpg": "9", "my photo.jpg": "big cat", "no suffix": None, str(elsewhere): "-1",
        "../elsewhere.jpg": "big", "#1.jpg": "9", "your photo.jpg": None, "x y.png": "9",
    }  # fmt: skip
    assert index.sizes.tolist() == [[30, 50]] * 4 + [[40, 50]] * 2 + [[30, 50]] * 3
    assert index.rejected == {
        "gone.jpg": "No such file or directory",
        "sub": "not a regular file",
        "text.dat": "not an image",
        "é.jpg": "No such file or directory",
    }
    assert all(os.path.isfile(index.file(i)) for i in range(len(index)))
    again = Index.scan(tmp_path / "data/train.txt", tmp_path / "cache")
    assert labelled(again) == labelled(index) and again.rejected == index.rejected and again.classes == index.classes
    (tmp_path / "data/gone.jpg").write_bytes(jpeg())
    assert "gone.jpg" in Index.scan(tmp_path / "data/train.txt", tmp_path / "cache").paths


def test_a_sorted_list_of_a_folder_is_that_folder(photos, tmp_path):
    folder = Index.scan(photos)
    lines = (f"{folder.file(i)}\t{folder.classes[folder.labels[i]]}\n" for i in range(len(folder)))
    (tmp_path / "all.tsv").write_text("".join(lines))
    assert_same_batches(folder, Index.scan(tmp_path / "all.tsv"))


BAD_LINES = [
    ("\tdog", r"line 2: no path before the label 'dog'; expected path<TAB>label"),
    ("path,label", r"line 2: no path before the label 'path,label'; expected path<TAB>label .*; no header, no commas"),
    ("a\0b.jpg", "line 2: a NUL character; expected text in UTF-8"),
    ("shard.tar dog", r"line 2: shard.tar is a tar; expected images"),
    ("gs://bucket/a.jpg", r"line 2: got gs://bucket/a.jpg; expected a path, or an s3:// URI"),
    (
        "s3://bucket/a.jpg\tdog\t30",
        r"line 2: got 's3:.*; expected uri, uri<TAB>label or uri<TAB>label<TAB>height<TAB>w",
    ),
    (
        "s3://bucket/a.jpg\tdog\t30\tmany",
        r"line 2: got 's3:.*; expected uri, uri<TAB>label or uri<TAB>label<TAB>height",
    ),
    (
        "s3://bucket/a.jpg\tdog\tmany\t30",
        r"line 2: got 's3:.*; expected uri, uri<TAB>label or uri<TAB>label<TAB>height",
    ),
    ("s3://bucket/a.tar\tdog\t5\t7", r"line 2: s3:.*/a.tar: .tar files are not read from S3; expected them on a local"),
    ("s3://bucket/a.tar", r"line 2: s3:.*/a.tar: .tar files are not read from S3; expected them on a local disk, or"),
    ("s3://bucket/../a.jpg", r"line 2: got 's3:.*a.jpg'; expected s3://BUCKET/KEY, whose key has no empty, . or .."),
    ("s3://bucket/a.jpg\tdog\t0\t7", r"line 2: size 0x7: expected sides of 1"),
    (
        "s3://bucket//a.jpg\tdog\t5\t7",
        r"line 2: got 's3:.*a.jpg'; expected s3://BUCKET/KEY, whose key has no empty, . or",
    ),
    ("s3://bucket/\tdog\t5\t7", r"line 2: got 's3://bucket/'; expected s3://BUCKET/KEY"),
    ("s3://bucket/a\x01.jpg", r"line 2: got 's3://bucket/a\\x01.jpg'; .* part, no control character, and is UTF-8"),
    ("s3://my bucket/a.jpg\tdog", r"line 2: got 's3://my bucket/a.jpg'; expected s3://BUCKET/KEY"),
]


@pytest.mark.parametrize("line, message", BAD_LINES, ids=[repr(line) for line, _ in BAD_LINES])
def test_a_line_that_cannot_be_parsed_is_named(tmp_path, line, message):
    (tmp_path / "a.jpg").write_bytes(jpeg())
    (tmp_path / "list.txt").write_text(f"a.jpg\n{line}\n")
    with pytest.raises(ValueError, match=message) as caught:
        Index.scan(tmp_path / "list.txt")
    assert str(caught.value).startswith(str(tmp_path / "list.txt")) and "\n" not in str(caught.value)


# ---- Shards: the index


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["gnu", "pax"])
def test_samples_of_shards(tmp_path, format):
    """Grouped by key, labelled by .cls or .json, sorted, long names and all; what is odd is named with the reason."""
    long = "é" * 90 + "/" + "n" * 120
    write_tar(
        tmp_path / "sub/b.tar",
        [
            ("z.jpg", jpeg(height=31)), ("a.PNG", jpeg(height=32)), ("./k.jpg", jpeg()), ("._k.jpg", b"x"),
            ("a.cls", b"7"),
        ],
        format,
    )  # fmt: skip
    write_tar(
        tmp_path / "a.tar",
        [
            special("folder", tarfile.DIRTYPE),
            ("2.cls", b" 12\n"), ("1.jpg", jpeg()), ("2.jpg", jpeg()), ("1.json", b'{"label": 7, "cls": 3}'),
            ("3.json", b'{"cls": "cat"}'), ("3.webp", jpeg()), ("4.json", b'{"caption": "x"}'), ("4.jpg", jpeg()),
            (f"{long}.jpg", jpeg(height=33)), (f"{long}.cls", b"dog"), ("5.txt", b"x"), ("5.seg.png", b"x"),
            ("6.cls", b"only bad"), ("6.jpg", b"no image"), ("7.jpg", jpeg()), ("7.json", b"[" * 10**5),
            ("8.jpg", jpeg()), ("8.json", b'{"label": [1]}'), ("9.jpg", jpeg()), ("9.png", jpeg()),
            ("10", jpeg()), ("11.cls", b"1"), ("11.txt", b"x"), ("12.jpg.gz", b"x"), ("4.txt", b"cat"),
        ],
        format,
    )  # fmt: skip
    index = Index.scan(tmp_path)
    assert labelled(index) == {
        "a.tar!1.jpg": "7", "a.tar!2.jpg": "12", "a.tar!3.webp": "cat", "a.tar!4.jpg": None, "a.tar!7.jpg": None,
        "a.tar!8.jpg": None, "a.tar!9.jpg": None, f"a.tar!{long}.jpg": "dog", "sub/b.tar!./k.jpg": None,
        "sub/b.tar!a.PNG": "7", "sub/b.tar!z.jpg": None,
    }  # fmt: skip
    assert index.paths == list(labelled(index)) and index.classes == ("7", "12", "cat", "dog", "only bad")
    assert index.sizes[-4:].tolist() == [[33, 50], [40, 50], [32, 50], [31, 50]]
    why = "has no class (.cls, or label or cls of .json; no other member is read)"
    assert {index.paths[i]: reason for i, reason in index.unlabelled().items()} == {
        path: why for path, label in labelled(index).items() if label is None
    }
    assert index.rejected == {
        "a.tar!10": "not named as an image",
        "a.tar!11.cls": "not named as an image, as no other of the 2 members of its sample",
        "a.tar!12.jpg.gz": "extension .jpg.gz, from the first dot of the name on; expected one dot",
        "a.tar!5.seg.png": "extension .seg.png, from the first dot of the name on; expected one dot",
        "a.tar!6.jpg": "not an image",
        "a.tar!7.json": "no label: nested too deeply",
        "a.tar!8.json": "no label: it is a list; expected text or an integer",
        "a.tar!9.png": "second image of a sample, of which .jpg is used",
    }


def test_hostile_members_do_no_harm(tmp_path, monkeypatch):
    names = ["/etc/passwd.jpg", "../../up.jpg", "line\nbreak\x1b[2J.jpg", "a/../b.jpg", "\udcff.jpg"]
    sparse, nul = special("sparse.jpg", tarfile.GNUTYPE_SPARSE), tarfile.TarInfo("x.jpg")
    nul.pax_headers = {"path": "nul\0.jpg"}
    write_tar(
        tmp_path / "data/s.tar",
        [
            special("soft.jpg", tarfile.SYMTYPE, "/etc/passwd"), special("hard.jpg", tarfile.LNKTYPE, "up.jpg"),
            special("pipe.jpg", tarfile.FIFOTYPE), special("zero", tarfile.CHRTYPE), sparse, ("empty.jpg", b""),
            *((name, jpeg()) for name in names), ("good.jpg", jpeg()), ("soft2.jpg", jpeg()),
            special("soft2.cls", tarfile.SYMTYPE, "/etc/hostname"), ("huge.jpg", jpeg()), ("huge.cls", b"x" * 2**21),
            ("large.jpg", jpeg()), ("large.cls", b"large".ljust(2**20)),
        ],
    )  # fmt: skip
    write_tar(tmp_path / "data/t.tar", [nul, ("u.jpg", jpeg())], tarfile.PAX_FORMAT)
    monkeypatch.chdir(tmp_path)
    index = Index.scan("data/s.tar")
    assert set(index.paths) == {f"s.tar!{name}" for name in [*names, "good.jpg", "huge.jpg", "large.jpg", "soft2.jpg"]}
    assert index.classes == ("large",) and index.rejected == {
        "s.tar!empty.jpg": "empty file",
        "s.tar!hard.jpg": "link inside a tar",
        "s.tar!huge.cls": "no label: 2097152 bytes; expected at most 1048576",
        "s.tar!pipe.jpg": "not a regular file",
        "s.tar!soft.jpg": "link inside a tar",
        "s.tar!soft2.cls": "no label: link inside a tar",
        "s.tar!sparse.jpg": "sparse member",
        "s.tar!zero": "not named as an image",
    }
    both = Index.scan(tmp_path / "data", tmp_path / "cache")
    assert both.rejected["t.tar!nul\0.jpg"] == "NUL in the name" and both.paths[-1] == "t.tar!u.jpg"
    assert Index.scan(tmp_path / "data", tmp_path / "cache").paths == both.paths
    assert sorted(p.name for p in tmp_path.rglob("*[a.r]")) == ["data", "s.tar", "t.tar"], "nothing is unpacked"


def test_a_damaged_shard_gives_what_lies_before_the_damage(tmp_path):
    write_tar(tmp_path / "whole.tar", [(f"{i}.jpg", jpeg(i)) for i in range(4)])
    whole = (tmp_path / "whole.tar").read_bytes()
    places = Index.scan(tmp_path / "whole.tar").places
    third, fourth = places[2:, 1].tolist()  # where their data begin, 512 bytes after their headers
    cases = [  # content, usable samples, what is said
        (whole[: third + 10], 2, "ends within 2.jpg"),
        (whole[: third + int(places[2, 2])], 3, "unexpected end of data"),
        (whole[: third - 512], 2, "no end mark"),
        (whole[: third - 100], 2, "no header at byte"),
        (whole[: third - 512] + b"\xff" * 512 + whole[third:], 2, "no header at byte"),
        (whole[: third - 512] + bytes(512) + whole[third:], 2, "no header at byte"),
        (whole[: fourth - 512] + bytes(4 << 20), 3, "no header at byte"),
        (whole + whole, 4, "no header at byte"),
        (b"", 0, "empty file"),
        (whole[:300], 0, "truncated header"),
        (b"\x1f\x8b" + whole, 0, "compressed: expected plain .tar files"),
    ]
    header = bytearray(whole[third - 512 : third])
    header[124:136] = b"\xff" * 12  # a negative size, as base 256
    header[148:156] = b"%06o\0 " % sum(header[:148] + b" " * 8 + header[156:])
    cases.append((whole[: third - 512] + header + whole[third:], 2, "impossible size"))
    for content, usable, said in cases:
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data/a.tar").write_bytes(content)
        write_tar(tmp_path / "data/b.tar", [("0.jpg", jpeg())])
        index = Index.scan(tmp_path / "data")
        assert index.paths == [*(f"a.tar!{i}.jpg" for i in range(usable)), "b.tar!0.jpg"], said
        assert list(index.rejected) == ["a.tar"] and said in index.rejected["a.tar"], index.rejected


def test_patterns_name_shards(tmp_path):
    for i in range(8, 12):
        write_tar(tmp_path / f"d{i % 2}/s-{i:03}.tar", [("a.jpg", jpeg())])
    write_tar(tmp_path / "s-{0..1}.tar", [("a.jpg", jpeg())])
    assert Index.scan(f"{tmp_path}/d0/s-{{008..008}}.tar").paths == ["s-008.tar!a.jpg"]
    assert len(Index.scan(tmp_path / "s-{0..1}.tar")) == 1, "a file of that very name"
    for i in range(8, 12):
        write_tar(tmp_path / f"d{(i + 1) % 2}/s-{i:03}.tar", [("a.jpg", jpeg())])
    index = Index.scan(tmp_path / "d{0..1}/s-{008..011}.tar")
    assert index.paths == [f"d{d}/s-{i:03}.tar!a.jpg" for d in range(2) for i in range(8, 12)]
    with pytest.raises(FileNotFoundError, match=r"2 of 6 files are missing, first: s-012.tar; expected all"):
        Index.scan(tmp_path / "d0/s-{008..013}.tar")
    for braces in ("{9..8}", "{0..100000}"):
        with pytest.raises(ValueError, match=f"{re.escape(braces)} does not count up, or beyond 100,000"):
            Index.scan(tmp_path / f"d0/s-{braces}.tar")
    with pytest.raises(FileNotFoundError, match=r"4 of 4 files are missing, first: d0/s-0.tar"):
        Index.scan(tmp_path / "d{0..1}/s-{0..1}.tar")


def test_the_cache_of_shards_is_used_until_a_shard_changes(tmp_path, monkeypatch):
    root, cache, scans, read = tmp_path / "data", tmp_path / "cache", [], headers.read_headers
    monkeypatch.setattr(headers, "read_headers", lambda *args: scans.append(1) or read(*args))
    write_tar(root / "a.tar", [("0.jpg", jpeg()), ("0.cls", b"dog"), ("1.jpg", b"bad"), ("\udcff.jpg", jpeg())])
    first, again = Index.scan(root, cache), Index.scan(root, cache)
    assert len(scans) == 1
    assert labelled(again) == labelled(first) == {"a.tar!0.jpg": "dog", "a.tar!\udcff.jpg": None}
    assert again.fingerprint == first.fingerprint and again.rejected == first.rejected
    assert np.array_equal(again.places, first.places) and again.shards == first.shards == ("a.tar",)
    with again.open() as shards:
        assert shards.read(0).tobytes() == jpeg()
    os.utime(root / "a.tar", ns=(1, 1))
    Index.scan(root, cache)
    write_tar(root / "b.tar", [("0.jpg", jpeg())])
    assert len(Index.scan(root, cache)) == 3 and len(scans) == 3
    monkeypatch.setattr(scan, "_PARALLEL", 0)
    monkeypatch.setattr(scan, "_PIECE", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    apart = Index.scan(root)
    assert len(scans) == 3 and apart.fingerprint == Index.scan(root, cache).fingerprint, "by worker processes"


def test_a_shard_of_the_time_0_is_known_by_its_size(tmp_path):
    """As files have it that are unpacked from reproducible archives."""
    stamps = []
    list(Shards(tmp_path, [["a.tar", 7, 0]]).rows(lambda *asked: stamps.append(asked[2].tolist()) or [[]]))
    assert stamps == [[[7, 0]]]


def test_errors_are_one_clear_line(tmp_path, monkeypatch):
    write_tar(tmp_path / "both/a.tar", [("a.jpg", jpeg())])
    many = "both/1.jpg both/sub/2.png images/1.jpg images/backup.tar.gz packed/a.tar.xz a.tgz zipped/a.Zip images/b.zip"
    for name in many.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(jpeg() if name.endswith(("jpg", "png")) else b"\x1f\x8b")
    write_tar(tmp_path / "no images.tar", [("a.cls", b"1"), ("a.jpg", b"\0")])
    (tmp_path / "empty.txt").write_text("# nothing\n")
    (tmp_path / "header.tsv").write_text("path\tlabel\nimages/1.jpg\tcat\nimages/2.jpg\tcat\n")
    (tmp_path / "gone.txt").write_text("a.jpg\n~/b.jpg")
    (tmp_path / "a.zip").write_bytes(b"PK")
    (tmp_path / "circle").symlink_to("circle")
    os.mkfifo(tmp_path / "pipe.tar")
    listdir = os.listdir

    def forbids(path):
        if path.endswith(b"locked/"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", forbids)  # root may read everything
    (tmp_path / "locked").mkdir()
    cases = [
        ("both", r"holds tar files \(1\) and images outside of them \(2\); expected one or .* as '.*/both/\*.tar'"),
        ("packed", r"holds 1 compressed file, first: a.tar.xz; expected plain .tar files"),
        ("a.tgz", r"a.tgz is compressed: expected plain .tar files"),
        ("no images.tar", r"no usable image in .*no images.tar \(1 file rejected, first: .*tar!a.jpg: not an image\)"),
        ("empty.txt", r"empty.txt names no image; expected path<TAB>label in each line"),
        ("header.tsv", r"no file 'path' at the top, of a label 'label' that no other line has; .*; no header"),
        ("a.zip", r"a.zip is a file: expected a folder of .*, a list \(.txt .*\), or a bucket: unpack it first"),
        ("zipped", r"zipped \(1 file rejected, first: a.Zip: an archive: unpack it first\); expected JPEG"),
        ("gone.txt", rf"first: a.jpg: No such .*, by paths that are absolute or begin in {re.escape(str(tmp_path))}$"),
        ("circle", r"no folder .*circle: expected a folder of images"),
        ("locked", r"^/.*/locked: Permission denied; expected what this user has permission for"),
        ("images/*.jpg", r"expected a pattern of .tar, or of .parquet, files; of images, their folder or a list"),
        ("pipe.tar", r"is a file: expected a folder of images"),
        ("gone.tar", r"no file .*gone.tar: expected a folder of images"),
    ]
    for name, message in cases:
        with pytest.raises((ValueError, OSError), match=message) as caught:
            Index.scan(tmp_path / name)
        assert "\n" not in str(caught.value)
    assert len(Index.scan(tmp_path / "images")) == 1, "among images a compressed tar is a file like any other"


ELSEWHERE = [
    ("s3://bucket/a-{0..9}.tar", "s3://bucket/a-{0..9}.tar: .tar files are not read from S3; expected them on a local"),
    (
        "s3://bucket/list.txt",
        "s3://bucket/list.txt: .txt files are not read from S3; expected them on a local disk, or",
    ),
    ("s3://bucket?x", "got 's3://bucket?x'; expected s3://BUCKET/FOLDER, whose folder has no empty, . or .. part"),
    ("s3://bucket/a/../b", "got 's3://bucket/a/../b'; expected s3://BUCKET/FOLDER, whose folder has no empty"),
    ("https://host/a.tar", "https://host/a.tar: https:// is not read; expected a folder of images, or "),
    ("https://host/a.tar", "a bucket, on a disk: fetch it first"),
    ("file:///data/images", "file:///data/images is a URI; expected the path alone: /data/images"),
    ("gs://bucket/images", "on a disk: gcloud storage cp -r gs://bucket/images FOLDER fetches it"),
    ("hf://datasets/owner/name", "on a disk: hf download --repo-type dataset owner/name --local-dir FOLDER fetches it"),
    ("https://huggingface.co/datasets/owner/name/tree/main", "hf download --repo-type dataset owner/name --local-dir"),
    ("owner/name", "no folder {cwd}/owner/name: expected a folder of images"),
    ("owner/name", "not found by its name: hf download --repo-type dataset owner/name --local-dir FOLDER fetches it"),
    ("cifar10", "not found by its name: hf download --repo-type dataset cifar10 --local-dir FOLDER fetches it"),
]


@pytest.mark.parametrize("root, message", ELSEWHERE, ids=[root for root, _ in ELSEWHERE])
def test_what_is_not_on_a_disk_is_refused_with_what_works(tmp_path, monkeypatch, root, message):
    monkeypatch.chdir(tmp_path)
    for given in (root, Path(root)):  # of a Path, a slash is lost
        with pytest.raises((ValueError, OSError)) as caught:
            Index.scan(given)
        assert message.replace("{cwd}", str(tmp_path)) in str(caught.value) and "\n" not in str(caught.value)
    (tmp_path / "images").mkdir()
    for given in ("images/gone", tmp_path / "gone", "../gone", "gone.tar"):
        with pytest.raises(FileNotFoundError, match=r"no f[a-z]+ .*gone") as caught:
            Index.scan(given)
        assert "hf download" not in str(caught.value)


# ---- Shards: batches


@pytest.fixture
def shards(photos, tmp_path):
    """The 48 photos in three shards, numbered as in the folder: 0 to 19, 20 to 39, 40 to 47."""
    folder = Index.scan(photos)
    for first in range(0, len(folder), 20):
        members = []
        for i in range(first, min(first + 20, len(folder))):
            with open(folder.file(i), "rb") as file:
                members.append((folder.paths[i], file.read()))
            members.append((folder.paths[i].replace(".jpg", ".cls"), folder.classes[folder.labels[i]].encode()))
        write_tar(tmp_path / f"shards/{first:02}.tar", members[::-1])
    return tmp_path / "shards"


def assert_same_batches(folder, index, **options):
    assert len(folder) == len(index) and folder.classes == index.classes
    assert all_same(loader(folder).batches(0, 6), loader(index, **options).batches(0, 6))


def test_shards_give_the_batches_of_the_folder(photos, shards, monkeypatch):
    folder, index = Index.scan(photos), Index.scan(shards)
    assert [p.partition("!")[2] for p in index.paths] == folder.paths
    before = len(os.listdir("/proc/self/fd"))
    assert_same_batches(folder, index)
    assert_same_batches(folder, index, threads=1)
    how = {"image_size": 24, "batch_size": 7, "device": torch.device("cpu"), "threads": 1}
    samples = np.arange(48)[::-1]
    pairs = [evaluation_batches(i, samples, **how) for i in (folder, index)]
    for expected, got in zip(*pairs, strict=True):
        assert same(expected, got)
    monkeypatch.setattr("pipeline.readers._OPEN", 1)  # shards are closed while other threads read
    assert_same_batches(folder, index)
    assert len(os.listdir("/proc/self/fd")) <= before, "every descriptor is closed"


def test_a_start_within_and_ranks_change_nothing(shards):
    index = Index.scan(shards)
    whole = list(loader(index).batches(0, 6))
    parts = [loader(index, rank=r, ranks=2).batches(3, 6) for r in range(2)]
    for expected, *slices in zip(whole[3:], *parts, strict=True):
        assert same(tensors(expected), [torch.cat(t) for t in zip(*(tensors(s) for s in slices), strict=True)])


def test_members_that_go_bad_are_replaced_and_named(shards):
    index = Index.scan(shards)
    clean = list(loader(index).batches(0, 8))
    bad = {3: "does not decode (truncated or corrupt)"}
    shard, offset, length = index.places[3].tolist()
    with open(shards / index.shards[shard], "r+b") as file:
        file.seek(offset + length // 2)
        file.write(bytes(length - length // 2))
    (shards / "40.tar").unlink()
    bad |= dict.fromkeys(range(40, 48), "No such file or directory")
    os.truncate(shards / "20.tar", int(index.places[37, 1] + 100))  # members are in reverse order
    bad |= dict.fromkeys(range(20, 38), "the shard ends before the image does")

    load = loader(index, max_bad=0.9)
    got = list(load.batches(0, 8))
    assert load.bad == bad
    assert index.paths[3] == "00.tar!a/09.jpg"
    for number, (before, after) in enumerate(zip(clean, got, strict=True)):
        for i, s in enumerate(before.sample.tolist()):
            if s in bad:
                candidates = (replacement(s, k, 48, 7, number // 4) for k in itertools.count())
                s = next(c for c in candidates if c not in bad)
            else:
                assert same([t[i] for t in tensors(before)], [t[i] for t in tensors(after)])
            assert after.sample[i] == s
    how = {"image_size": 24, "batch_size": 7, "device": torch.device("cpu"), "threads": 1}
    seen = [s for _, sample, _ in evaluation_batches(index, np.arange(48), **how) for s in sample.tolist()]
    assert seen == [s for s in range(48) if s not in bad]
    with pytest.raises(ValueError, match=r"2\d of 48 images in .* cannot be used, at most 20 may: .*\.tar!\w/\d\d.jpg"):
        list(loader(index).batches(0, 4))


def test_other_formats_are_read_from_shards(tmp_path):
    """Turned upright, with the header anywhere: the directory of a TIFF lies at its end."""
    exif = Image.Exif()
    exif[0x0112] = 6
    members = []
    for suffix in ("jpg", "png", "webp", "tiff", "bmp", "ppm"):
        file = io.BytesIO()
        photo(0, 40, 60).save(file, "JPEG" if suffix == "jpg" else suffix, exif=exif)
        members.append((f"{suffix}.{suffix}", file.getvalue()))
    write_tar(tmp_path / "a.tar", members)
    index = Index.scan(tmp_path / "a.tar")
    assert index.paths == [f"a.tar!{s}.{s}" for s in ("bmp", "jpg", "png", "ppm", "tiff", "webp")]
    assert index.sizes.tolist() == [[60, 40] if s not in (0, 3) else [40, 60] for s in range(6)], "BMP, PPM: no EXIF"
    how = {"image_size": 24, "batch_size": 6, "device": torch.device("cpu"), "threads": 1}
    ((_, sample, _),) = evaluation_batches(index, np.arange(6), **how)
    assert sample.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("size, far", [(40_000, True), (4_000, False)])
def test_of_a_tar_no_more_is_read_than_headers(tmp_path, monkeypatch, size, far):
    data = jpeg(0)
    samples = ((f"{i:02}.cls", b"7", f"{i:02}.jpg", data + bytes(size)) for i in range(30))
    members = [pair for sample in samples for pair in (sample[:2], sample[2:])]
    write_tar(tmp_path / "a.tar", [special("dir", tarfile.DIRTYPE), *members])
    pread, asked, advised = os.pread, [], []
    monkeypatch.setattr(os, "pread", lambda file, count, at: asked.append(count) or pread(file, count, at))
    monkeypatch.setattr(os, "posix_fadvise", lambda *how: advised.append(how[-1]))
    assert len(Index.scan(tmp_path / "a.tar")) == 30
    assert sum(asked) - (1 << 20) <= 62 * 1024 + 30 * (1024 + 1)  # the end mark; headers of members; images, labels
    assert set(advised) == ({os.POSIX_FADV_RANDOM} if far else set()), "read-ahead, unless it is in vain"


@pytest.mark.gpu
def test_a_gpu_takes_the_files_of_shards(photos, shards):
    on_gpu = {"device": torch.device("cuda")}
    pairs = [loader(Index.scan(root), **on_gpu).batches(0, 4) for root in (photos, shards)]
    for expected, got in zip(*pairs, strict=True):
        for one, other in zip(tensors(expected), tensors(got), strict=True):
            assert other.is_cuda and (one.float() - other.float()).abs().mean() < 0.1


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_reader_of_plain_tars_finds_what_tarfile_finds(tmp_path, kind):
    """Or declines: also where one byte is another, wherever that is."""
    members = [("a/b.jpg", b"x" * 700), ("a/b.cls", b"7"), ("c.jpg", b""), ("dir/", None), ("link.jpg", "c.jpg")]
    if kind != tarfile.USTAR_FORMAT:
        members += [("é" * 99 + "/" + "n" * 150 + ".jpg", b"y")]
    if kind == tarfile.GNU_FORMAT:
        members += [("\udcff.jpg", b"z" * 512)]
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=kind, encoding="utf-8", errors="surrogateescape") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.mtime = 1.5 if kind == tarfile.PAX_FORMAT else 1
            if not isinstance(content, bytes):
                member.type, member.linkname = tarfile.SYMTYPE if content else tarfile.DIRTYPE, content or ""
            member.size = len(content) if isinstance(content, bytes) else 0
            tar.addfile(member, io.BytesIO(content) if member.size else None)
    whole = path.read_bytes()

    def found(read):
        with open(path, "rb") as file:
            members, damage = read(file)
        return damage or [(m.name.rstrip("/"), m.size, m.type, m.offset_data) for m in members]

    def plainly(file):
        members = headers._plain_members(file.fileno())
        return (members, None) if members is not None else (None, "declined")

    assert found(plainly) == found(headers._members) and len(found(plainly)) == len(members)
    rng = np.random.default_rng(0)
    for place, value in zip(rng.integers(0, len(whole), 99).tolist(), rng.integers(0, 256, 99).tolist(), strict=True):
        path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
        assert found(plainly) in ("declined", found(headers._members)), (place, value)
    path.write_bytes(whole[:-9000])
    assert found(plainly) in ("declined", found(headers._members))
