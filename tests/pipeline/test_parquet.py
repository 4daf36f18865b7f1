"""Parquet files: what they hold is what the same images in a folder are, unpacked once, and no row is lost unsaid."""

import errno
import io
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from conftest import jpeg

from pipeline import Index, parquet
from tests.pipeline.test_loader import loader
from tests.pipeline.test_outage import clock  # noqa: F401
from tests.pipeline.test_sources import assert_same_batches, labelled, write_tar

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def write(path, columns, classes=None, **how):
    """``classes``: {column: names}, as ``datasets`` notes them."""
    features = {name: {"names": names, "_type": "ClassLabel"} for name, names in (classes or {}).items()}
    about = {"huggingface": json.dumps({"info": {"features": features | {"image": {"_type": "Image"}}}})}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns).replace_schema_metadata(about), path, **how)


def images(contents):
    """A column of images as ``datasets`` has it."""
    return pa.array([{"bytes": content, "path": f"{i}.jpg"} for i, content in enumerate(contents)])


@pytest.fixture
def tables(photos, tmp_path):
    """The 48 photos in three files, numbered as in the folder: 0 to 19, 20 to 39, 40 to 47; and that folder's index."""
    folder = Index.scan(photos)
    for number, first in enumerate(range(0, 48, 20)):
        part = range(first, min(first + 20, 48))
        columns = {"image": images([Path(folder.file(i)).read_bytes() for i in part]), "label": folder.labels[part]}
        name = f"train-{number:05}-of-00003.parquet"
        write(tmp_path / "tables" / name, columns, {"label": list(folder.classes)}, row_group_size=7)
    return tmp_path / "tables", folder


def test_tables_give_the_batches_of_the_folder(tables, tmp_path, capsys):
    root, folder = tables
    index = Index.scan(root, tmp_path / "cache")
    assert index.paths[19:21] == ["train-00000-of-00003.parquet/19", "train-00001-of-00003.parquet/0"]
    assert index.root == root
    one, other = (parquet._Table(path, "") for path in list(root.iterdir())[:2])
    assert one.names == list(folder.classes) and one.names is other.names, "of thousands of files the same in memory"
    assert "unpacking the images of 3 Parquet files, once, as tars of 0.000" in capsys.readouterr().err
    with index.open() as shards:
        assert [shards.read(i).tobytes() for i in range(48)] == [Path(folder.file(i)).read_bytes() for i in range(48)]
    assert index.sizes.tolist() == folder.sizes.tolist()
    assert_same_batches(folder, index)


def test_files_of_one_split_are_named_by_patterns(tables, tmp_path):
    root, _ = tables
    write(root / "validation-00000-of-00001.parquet", {"image": images([jpeg()])})
    expected = rf"holds Parquet files of train and validation; .* a pattern such as '{root}/train\*.parquet'"
    with pytest.raises(ValueError, match=expected):
        Index.scan(root)
    for pattern, count in ("train*.parquet", 48), ("train-{00000..00001}-of-00003.parquet", 40), ("val*.parquet", 1):
        assert len(Index.scan(root / pattern)) == count
    assert len(Index.scan(root / "train-00002-of-00003.parquet")) == 8
    with pytest.raises(FileNotFoundError, match=r"1 of 1 files are missing, first: test\*.parquet"):
        Index.scan(root / "test*.parquet")
    (root / "notes.txt").write_text("text")
    with pytest.raises(ValueError, match=r"expected a pattern of .tar, or of .parquet, files"):
        Index.scan(root / "*")


def cases():
    """(columns, classes, the class of each of three rows)"""
    plain, none = [jpeg(i) for i in range(3)], (None, None, None)
    numbers, names = pa.array([1, -1, None]), ["cat", "dog"]
    yield "names of classes", {"image": images(plain), "label": numbers}, {"label": names}, ("dog", None, None)
    yield "numbers", {"image": images(plain), "label": numbers}, None, ("1", "-1", None)
    yield "bytes", {"image": plain, "label": ["é b", "", "a"]}, None, ("é b", None, "a")
    yield "many", {"image": pa.array(plain, pa.large_binary())}, None, none
    yield "of a web dataset", {"jpg": images(plain), "cls": [2, 1, 0], "json": ["{}"] * 3}, None, ("2", "1", "0")
    text = pa.array(["b", "a", "b"]).dictionary_encode()
    yield "categories", {"image": images(plain), "mask": images(plain), "label": text}, None, ("b", "a", "b")
    yield "one ClassLabel", {"img": plain, "kind": [0, 1, 1], "x": [1, 2, 3]}, {"kind": names}, ("cat", "dog", "dog")
    yield "no label", {"image": plain, "label": [[1], [2], [3]], "score": [0.5, 1.5, 2.5]}, None, none


CASES = list(cases())


@pytest.mark.parametrize("columns, classes, expected", [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_columns_of_images_and_labels(tmp_path, columns, classes, expected):
    write(tmp_path / "a.parquet", columns, classes)
    index = Index.scan(tmp_path / "a.parquet", tmp_path / "cache")
    assert labelled(index) == {f"a.parquet/{i}": label for i, label in enumerate(expected)} and not index.rejected
    assert set(index.unlabelled().values()) <= {"has no class"}


REFUSED = [
    ({"a": [1], "b": ["x"]}, None, r"a.parquet: no column of bytes, which images are; got a \(int64\), b \(string\)"),
    ({"a": [b"x"], "b": [b"x"]}, None, r"2 columns may be the images \(a, b\); expected one, or one named image"),
    (
        {"image": [b"x"], "fine": [0], "coarse": [0]}, {"fine": ["a"], "coarse": ["b"]},
        r"a.parquet: 2 columns may be the labels \(fine, coarse\); expected one, or one named label, or DATA#fine",
    ),
    ({"image": [b"x"] * 2, "label": [1, 2]}, {"label": ["a", "b"]}, r"label 2 in row 1; expected -1 to 1, as its"),
    (pa.table([pa.array([b"x"])] * 2, ["image", "image"]), None, r"a.parquet: two columns are named image; expected o"),
]  # fmt: skip


@pytest.mark.parametrize("columns, classes, message", REFUSED, ids=["no bytes", "images", "labels", "beyond", "twice"])
def test_what_is_not_clear_is_refused(tmp_path, columns, classes, message):
    write(tmp_path / "data/a.parquet", columns, classes)
    with pytest.raises(ValueError, match=message) as caught:
        Index.scan(tmp_path / "data", tmp_path / "cache")
    assert "\n" not in str(caught.value) and not list(tmp_path.glob("cache/parquet/*-*")), "nothing is left"


def test_a_column_of_labels_is_chosen_behind_the_data(tmp_path):
    """Of a folder, a file and a pattern; what was unpacked for another one stays."""
    root, cache = tmp_path / "data", tmp_path / "cache"
    columns = {"image": images([jpeg(0), jpeg(1)]), "fine": [0, 1], "coarse": [0, 0]}
    columns |= {"x": [0.5, 1.5], "y": [True, False]}
    write(root / "a.parquet", columns, {"fine": ["ant", "bee"], "coarse": ["insect"]})
    for data, expected in (
        (f"{root}#fine", ["ant", "bee"]), (f"{root}/a.parquet#coarse", ["insect"] * 2),
        (f"{root}#y", ["True", "False"]),
        (f"{root}/*.parquet#fine", ["ant", "bee"]),
    ):  # fmt: skip
        index = Index.scan(data, cache)
        assert [index.classes[label] for label in index.labels] == expected and index.root == root
    assert len(list(cache.glob("parquet/*.tar"))) == 3
    (tmp_path / "a#b").mkdir()
    (tmp_path / "a#b/0.jpg").write_bytes(jpeg())
    assert len(Index.scan(tmp_path / "a#b", cache)) == 1, "a name is a name"
    for data, said in (
        (f"{root}#x", r"no column x of integers or text, .* expected one of fine, coarse, y"),
        (f"{tmp_path}/a#b#c", "is not there; expected, around a #"),
        (f"{tmp_path}/gone#c", f"no folder {tmp_path}/gone: expected a folder"),
    ):  # fmt: skip
        with pytest.raises((ValueError, OSError), match=said):
            Index.scan(data, cache)


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    write(tmp_path / "a.parquet", {"image": images([jpeg()])})
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 2000))
        with pytest.raises(ValueError, match=r"where 2e-06 GB are free; expected more room, or --index-cache"):
            Index.scan(tmp_path / "a.parquet", tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(ValueError, match=r"pyarrow, which is not installed; .* pip install -e '.\[parquet\]'$"):
            Index.scan(tmp_path / "a.parquet", tmp_path / "cache")
    write_tar(tmp_path / "b.tar", [("a.jpg", jpeg())])
    (tmp_path / "c.jpg").write_bytes(jpeg())
    with pytest.raises(ValueError, match=r"tar files \(1\) and Parquet files \(1\) and images outside of them \(1\); "):
        Index.scan(tmp_path)


def test_bad_rows_and_files_are_named(tmp_path):
    root = tmp_path / "data"
    short = jpeg(4)[:-300]
    write(root / "a.parquet", {"image": images([jpeg(), None, b"", b"text", short, jpeg(5)]), "label": list("abcdef")})
    write(root / "b.parquet", {"image": images([jpeg(i) for i in range(20)])}, row_group_size=2)
    whole = (root / "b.parquet").read_bytes()
    (root / "c.parquet").write_bytes(whole[:-9])
    (root / "d.parquet").write_bytes(whole[:4] + bytes(60) + whole[64:])
    (root / "e.parquet").write_bytes(b"")
    (root / "f.parquet").symlink_to("gone")
    latin = pa.array([b"\xe9"]).view(pa.string())
    write(root / "g.parquet", {"image": images([jpeg()]), "label": latin}, use_dictionary=False)
    index = Index.scan(root, tmp_path / "cache")
    assert index.paths == ["a.parquet/0", "a.parquet/4", "a.parquet/5", *(f"b.parquet/{i}" for i in range(20))]
    assert index.classes == tuple("abcdef")
    damaged = {name: index.rejected.pop(f"{name}.parquet") for name in "cde"}
    assert all(said.startswith("damaged or truncated, or no Parquet file (") for said in damaged.values()), damaged
    none = "no bytes (a path alone is not followed)"
    assert index.rejected == {
        "a.parquet/1": none, "a.parquet/2": none, "a.parquet/3": "not an image", "f.parquet": "broken link",
        "g.parquet": "text that is not UTF-8",
    }  # fmt: skip
    load = loader(index, batch_size=23, max_bad=0.9)
    list(load.batches(0, 1))
    assert {index.paths[i]: reason for i, reason in load.bad.items()} == {
        "a.parquet/4": "does not decode (truncated or corrupt)"
    }
    for name in "cde":
        with pytest.raises(
            ValueError, match=rf"no usable image in .*{name}.parquet \(1 file rejected, first"
        ) as caught:
            Index.scan(root / f"{name}.parquet", tmp_path / "cache")
        assert "\n" not in str(caught.value)


def test_files_are_unpacked_once_and_anew_where_they_changed(tmp_path, monkeypatch):
    root, cache, folder = tmp_path / "up/data", tmp_path / "cache", tmp_path / "cache/parquet"
    for name in "abc":
        write(root / f"{name}.parquet", {"image": images([jpeg(ord(name) + i) for i in range(70)])})
    read, tables = parquet._Table.read, []
    monkeypatch.setattr(parquet._Table, "read", lambda table: tables.append(table.path.stem) or read(table))

    def scan(**how):
        tables.clear()
        return Index.scan(root, cache, **how), "".join(tables)

    def stop(done, rows, doing):
        if done > 80:
            assert (done, rows, doing) == (134, 210, "unpacking") and len(list(folder.glob("*.part"))) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scan(progress=stop)
    assert len(list(folder.glob("*.tar"))) == 1 and not list(folder.glob("*.part")), "what was begun is taken away"
    (left,) = folder.glob("*.tar")
    left.rename(left.with_suffix(".1.part"))  # as of a process that was killed
    first, read_now = scan()
    assert read_now == "abc" and not list(folder.glob("*.part"))
    again, read_now = scan()
    assert read_now == "" and again.fingerprint == first.fingerprint and again.stored == first.stored
    assert Index.scan(root.parent, cache).paths[0] == "data/a.parquet/0" and not tables, "the same under other names"

    write(root / "b.parquet", {"image": images([jpeg(i) for i in range(3)])})
    changed, read_now = scan()
    assert read_now == "b" and len(changed) == 143 and len(list(folder.glob("*.tar"))) == 3
    assert {path.partition("/")[0] for path in first.changes(changed)["gone"]} == {"b.parquet"}

    os.utime(root / "c.parquet")
    assert scan()[1] == "c"

    for tar in folder.glob("*.tar"):
        tar.unlink()
    index, read_now = scan(trust=True)
    with pytest.raises(OSError, match=f"{folder} lacks what the Parquet files of {root} were unpacked into; expected"):
        index.open()
    index, read_now = scan()
    assert read_now == "abc" and index.fingerprint == changed.fingerprint
    with index.open() as shards:
        assert shards.read(70).tobytes() == jpeg(0)


@pytest.mark.parametrize("first", [1, 2], ids=["its end", "its rows"])
def test_a_disk_that_fails_is_waited_for(tmp_path, clock, capfd, monkeypatch, first):  # noqa: F811
    """From the first, or the second, time on that the file is opened."""
    write(tmp_path / "a.parquet", {"image": images([jpeg(i) for i in range(5)])})
    expected, down, files = Index.scan(tmp_path / "a.parquet", tmp_path / "other"), [1], []

    class File(io.FileIO):
        def readall(self):
            return self.read()

        def read(self, *size):
            if down and len(files) >= first:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(*size)

    def opened(path, how):
        if how == "rb":
            files.append(path)
        return File(path) if how == "rb" else path.open(how)

    monkeypatch.setattr(parquet, "open", opened, raising=False)
    with pytest.raises(OSError, match=r"a.parquet cannot be read \(Input/output error\), nor could it for 8 minutes"):
        Index.scan(tmp_path / "a.parquet", tmp_path / "cache")
    clock.then = down.clear
    files.clear()
    capfd.readouterr()
    assert Index.scan(tmp_path / "a.parquet", tmp_path / "cache").fingerprint == expected.fingerprint
    said = capfd.readouterr().err.splitlines()
    unpacking = said.pop(1 if first == 1 else 0)  # once
    assert "unpacking" in unpacking and len(said) == 2 and said[1].endswith("a.parquet can be read again, after 1 s")
