"""Images in an object store: a stand-in on this machine; nothing here has seen a bucket."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import jpeg
from PIL import Image

from pipeline import Augmentation, Index, Loader, evaluation_batches, known, waiting

CPU = torch.device("cpu")
HOW = {"image_size": 24, "seed": 7, "device": CPU, "threads": 1}


def labelled(index):
    """{path: (class name, height, width)}"""
    names = [index.classes[n] if n >= 0 else None for n in index.labels.tolist()]
    return {p: (n, *size) for p, n, size in zip(index.paths, names, index.sizes.tolist(), strict=True)}


def test_s3_uris_are_taken_with_their_sizes(bucket, tmp_path):
    (tmp_path / "a.jpg").write_bytes(jpeg())
    (tmp_path / "list.txt").write_text("s3://bucket/my key.jpg\tdog\t300\t400\na.jpg cat\ns3://bucket/b.jpg\t\t5\t6\n")
    index = Index.scan(tmp_path / "list.txt")
    assert labelled(index) == {
        "s3://bucket/my key.jpg": ("dog", 300, 400), "a.jpg": ("cat", 40, 50), "s3://bucket/b.jpg": (None, 5, 6),
    }  # fmt: skip
    assert [index.file(i) for i in range(3)] == ["s3://bucket/my key.jpg", f"{tmp_path}/a.jpg", "s3://bucket/b.jpg"]


def test_s3_uris_are_read_by_one_request_each(bucket, tmp_path):
    """What is not there, or does not decode, is left out."""
    bucket.files |= {"/b/a%20b/%23%C3%A9%25.jpg": jpeg(1), "/b/short.jpg": jpeg()[:200], "/b/c.jpg": jpeg(2)}
    keys = ["a b/#é%.jpg", "gone.jpg", "short.jpg", "c.jpg"]
    lines = [f"s3://b/{key}\tdog\t40\t50\n" for key in keys] + ["c.jpg cat\n", "s3://b/c.jpg\tdog\t50\t40"]
    (tmp_path / "list.txt").write_text("".join(lines))
    (tmp_path / "c.jpg").write_bytes(jpeg(2))
    index = Index.scan(tmp_path / "list.txt")
    load = Loader(index, Augmentation(), batch_size=2, **HOW)
    sample = torch.cat([batch.sample for batch in load.batches(0, 6)])
    assert set(sample.tolist()) == {0, 3, 4}
    assert load.bad == {
        1: "no such object", 2: "damaged or truncated header",
        5: "not the image that was indexed: 40x50 pixels; 50x40 in the index",  # the list says so
    }  # fmt: skip
    bucket.forget()
    ((images, sample, _),) = evaluation_batches(
        index, np.array([0, 1, 3, 4]), batch_size=5, image_size=24, device=CPU, threads=1
    )
    assert sample.tolist() == [0, 3, 4] and torch.equal(images[1], images[2]) and not torch.equal(images[0], images[1])
    asked = [path for _, path in bucket.asked]
    assert sorted(asked) == ["/b/a%20b/%23%C3%A9%25.jpg", "/b/c.jpg", "/b/gone.jpg", "/b/gone.jpg"], "the batch once"


def test_sizes_that_no_line_has_are_read_by_one_request_each(bucket, tmp_path):
    """Or two, where a colour profile stands before the size. What cannot be had is asked for at the next start, and at
    each start the first, to see whether it can be."""
    bucket.files |= {f"/b/{i}": jpeg(i, 30 + i) for i in range(4)} | {"/b/a%20b.jpg": jpeg(), "/b/0.jpg": b""}
    bucket.files["/b/t"] = jpeg(5, 90, 100, icc_profile=bytes(40_000))
    bucket.answers = {"/b/2": 403}
    lines = "0", "1\tdog", "a b.jpg cat", "2", "3\t", "t", "0.jpg", "n"
    (tmp_path / "list.txt").write_text("\n".join(f"s3://b/{line}" for line in lines))
    index = Index.scan(tmp_path / "list.txt", tmp_path / "cache")
    found = {
        "s3://b/0": (None, 30, 50), "s3://b/1": ("dog", 31, 50), "s3://b/a b.jpg": ("cat", 40, 50),
        "s3://b/3": (None, 33, 50), "s3://b/t": (None, 90, 100),
    }  # fmt: skip
    assert labelled(index) == found and sorted(path for _, path in bucket.asked) == sorted(
        ["/b/0", "/b/0", "/b/0.jpg", "/b/1", "/b/2", "/b/3", "/b/a%20b.jpg", "/b/n", "/b/t", "/b/t"]
    )
    gone = {"s3://b/0.jpg": "empty file", "s3://b/n": "not to be had: no such object"}
    assert index.rejected == gone | {"s3://b/2": "not to be had: 403 Forbidden: AccessDenied: text"}
    bucket.asked.clear()
    assert Index.scan(tmp_path / "list.txt", tmp_path / "cache").fingerprint == index.fingerprint
    assert sorted(bucket.asked) == [("GET", "/b/0"), ("GET", "/b/2"), ("GET", "/b/n")]
    bucket.answers.clear(), bucket.asked.clear()
    index = Index.scan(tmp_path / "list.txt", tmp_path / "cache")
    assert bucket.asked.count(("GET", "/b/2")) == 2, "whether it can be had now, and as all are that were read with it"
    assert labelled(index) == found | {"s3://b/2": (None, 32, 50)} and index.rejected == gone


def test_a_png_of_many_pieces_takes_few_requests(bucket, tmp_path):
    """What turns it may stand at its end; libpng makes a chunk for each 8 kB."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (400, 500, 3), np.uint8)).save(file, "PNG")
    png = file.getvalue()
    chunk = b"\0\0\x20\0IDAT" + bytes(8192 + 4)
    bucket.files["/b/0.png"] = png[:33] + 64 * chunk + png[33:]  # the size is all that is read
    (tmp_path / "list.txt").write_text("s3://b/0.png\n")
    assert Index.scan(tmp_path / "list.txt").sizes.tolist() == [[400, 500]]
    assert len(bucket.files["/b/0.png"]) > 1_000_000 and len(bucket.asked) <= 6


def test_a_bad_object_that_is_replaced_is_tried_again(bucket, tmp_path):
    bucket.files |= {f"/b/{i}.jpg": jpeg(i) for i in range(3)}
    index = Index.scan("s3://b")
    known.add(tmp_path / known.FILE, index, {0: "bad", 1: "worse"})
    assert known.read(tmp_path / known.FILE, index) == {0: "bad", 1: "worse"}
    bucket.files["/b/1.jpg"] += b"repaired"
    assert known.read(tmp_path / known.FILE, index) == {0: "bad"}


@pytest.mark.parametrize("answer", [429, 503, "nothing", "part"])
def test_a_scan_waits_for_a_store_that_fails(bucket, tmp_path, monkeypatch, capfd, answer):
    bucket.files["/b/0.jpg"] = jpeg()
    bucket.answers["GET"] = answer
    (tmp_path / "list.txt").write_text("s3://b/0.jpg\n")
    for source in (tmp_path / "list.txt", "s3://b"):
        bucket.answers["GET"] = answer
        monkeypatch.setattr(waiting, "pause", lambda seconds: bucket.answers.clear())
        assert len(Index.scan(source, tmp_path / "cache")) == 1
        said = capfd.readouterr().err
        assert (
            f"{'s3://b' if source == 's3://b' else 's3://b/0.jpg'} cannot be read (" in said
            and "can be read again" in said
        )


REFUSALS = {
    301: "the bucket is in another region; expected AWS_REGION to name it",
    400: "400 Bad Request: ExpiredToken: text; expected credentials",
    403: "403 Forbidden: AccessDenied: text; expected credentials",
    501: "501 Not Implemented: NotImplemented: text; expected credentials",
}


@pytest.mark.parametrize("answer", REFUSALS)
def test_what_no_waiting_changes_ends_a_start(bucket, tmp_path, monkeypatch, answer):
    """Of a bucket, and of a list whose images have been read before, also where nothing else is asked for."""
    monkeypatch.setattr(waiting, "pause", lambda seconds: pytest.fail("it waits"))
    bucket.files |= {f"/b/{i}.jpg": jpeg(i) for i in range(3)}
    (tmp_path / "list.txt").write_text("".join(f"s3://b/{i}.jpg\t\t40\t50\n" for i in range(3)))
    Index.scan(tmp_path / "list.txt", tmp_path / "cache")
    bucket.answers["GET"] = answer
    for source, name in [("s3://b", "s3://b"), (tmp_path / "list.txt", "s3://b/0.jpg")]:
        for trust in (False, True):
            with pytest.raises(OSError, match=f"^{name} cannot be read: {REFUSALS[answer]}"):
                Index.scan(source, tmp_path / "cache", trust=trust)
    bucket.answers = {"/b/0.jpg": answer}
    assert len(Index.scan(tmp_path / "list.txt")) == 3, "others can be had"


def test_a_store_without_tls_ends_a_start(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://127.0.0.1:{bucket.port}")
    with pytest.raises(OSError, match=r"^s3://tls cannot be read: it does not speak TLS; expected http://"):
        Index.scan("s3://tls")


def test_a_bucket_is_a_folder(bucket, tmp_path, monkeypatch):
    """Of class folders, or part of one. It is listed at each start, and no more where nothing has changed."""
    keys = {f"/b/data/{'xy'[i % 2]}/{i}%20%C3%A9.jpg": jpeg(i, 30 + i) for i in range(5)}
    bucket.files = keys | {
        "/b/data/dir/": b"", "/b/data/.x/0.jpg": jpeg(), "/b/data/text": b"text", "/b/data/x/bad.jpg": b"text",
        "/b/data2/0.jpg": jpeg(),
    }  # fmt: skip
    index = Index.scan("s3://b/data", tmp_path)
    expected = {f"s3://b/data/{'xy'[i % 2]}/{i} é.jpg": ("xy"[i % 2], 30 + i, 50) for i in range(5)}
    assert labelled(index) == expected and list(index.paths) == sorted(expected)
    assert index.rejected == {"s3://b/data/x/bad.jpg": "not an image"}
    bucket.asked.clear()
    again = Index.scan(Path("s3://b/data/"), tmp_path)
    assert again.fingerprint == index.fingerprint and f"{again.root} {index.root}" == "s3://b/data s3://b/data"
    bucket.files["/b/data/x/0%20%C3%A9.jpg"] = jpeg(0, 70)
    assert all("list-type=2" in path for _, path in bucket.asked)
    assert labelled(Index.scan("s3://b/data", tmp_path))["s3://b/data/x/0 é.jpg"] == ("x", 70, 50)
    (batch,) = Loader(Index.scan("s3://b/data", tmp_path), Augmentation(), batch_size=4, **HOW).batches(0, 1)
    assert sorted(set(batch.label.tolist())) == [0, 1]
    assert len(Index.scan("s3://b", tmp_path)) == len(Index.scan("S3://b", tmp_path)) == 6
    bucket.files["/b/c%23/0.jpg"] = jpeg()
    assert list(Index.scan("s3://b/c#").paths) == ["s3://b/c#/0.jpg"]
    bucket.files |= {"/b/ab%3A/c/0.jpg": jpeg(), "/b//e/0.jpg": jpeg()}
    assert "begins or ends with / has to be renamed" in Index.scan("s3://b").rejected["s3://b/e/0.jpg"]
    found = Index.scan("s3://b/ab:/c")
    assert str(found.root) == "s3://b/ab:/c" and list(found.paths) == ["s3://b/ab:/c/0.jpg"]
    cases = [
        ("s3://b/none", "s3://b/none: nothing is there; expected s3://BUCKET, or s3://BUCKET/FOLDER, with images"),
        ("s3://b/data/text", "s3://b/data/text: nothing is there"),
    ]
    for root, message in cases:
        with pytest.raises(ValueError, match=message):
            Index.scan(root)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="'localhost:9000': expected http://HOST or"):
        patch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
        Index.scan("s3://b/data")
    bucket.files["/b/data2/a.tar"] = b""
    with pytest.raises(
        ValueError, match=r"s3://b/data2: \.tar files are not read from S3; expected them on a local disk"
    ):
        Index.scan("s3://b/data2")
    bucket.files |= {"/b/c/0.jpg": jpeg(), "/b/c//%0A.jpg": jpeg(), "/b/d/../0.jpg": jpeg()}
    for root, key in [("s3://b/c", "c//\n.jpg"), ("s3://b/d", "d/../0.jpg")]:
        with pytest.raises(ValueError, match=f"^{root}: the key {re.escape(repr(key))} ends the listing by an empty"):
            Index.scan(root)
