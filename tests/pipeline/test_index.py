"""The scan of an image folder: labels, sizes, rejections, cache."""

import errno
import itertools
import os
import pickle
import platform
import pwd
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from pipeline import Index, cache, headers, latency, scan, walk
from pipeline.paths import Paths


def save(path, size=(30, 20), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, "red").save(path, **options)


def fill(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_class_folders(tmp_path):
    root = tmp_path / "some data"
    for name in ("dog/b.JPEG", "dog/nested/deep/a.jpg", "été 猫/ö x.png", "loose.jpg"):
        save(root / name)
    save(root / "dog/really a png.jpg", format="PNG")
    save(root / "dog/no suffix", format="JPEG")
    for name in ("dog/.hidden.jpg", "dog/._b.JPEG", ".thumbs/a.jpg", "dog/@eaDir/b.JPEG/M.jpg", "lost+found/a.jpg"):
        save(root / name, format="JPEG")
    fill(root / "README.md", b"about")
    fill(root / "dog/annotation.json", b"{}")
    save(root / "dog/run/curves.png", format="PNG")  # of a run, as the next two say
    fill(root / "dog/run/metrics.jsonl", b"{}")
    fill(root / "dog/run/config.json", b"{}")
    save(root / "dog/run/checkpoints/a.jpg")
    save(tmp_path / "elsewhere/linked.jpg")
    (root / "ant").symlink_to(tmp_path / "elsewhere")
    (root / "dog/loop").symlink_to(root)
    (root / "dog/link.jpg").symlink_to(root / "loose.jpg")

    index = Index.scan(root)
    expected = {
        "ant/linked.jpg": 0,
        "dog/b.JPEG": 1,
        "dog/link.jpg": 1,
        "dog/nested/deep/a.jpg": 1,
        "dog/no suffix": 1,
        "dog/really a png.jpg": 1,
        "loose.jpg": -1,
        "été 猫/ö x.png": 2,
    }
    assert index.classes == ("ant", "dog", "été 猫") and index.rejected == {}
    assert dict(zip(index.paths, index.labels.tolist(), strict=True)) == expected and index.paths == sorted(expected)
    assert len(index) == 8 and index.labels.dtype == np.int64
    assert index.sizes.dtype == np.int32 and (index.sizes == [20, 30]).all()
    assert all(os.path.samefile(index.file(i), root / path) for i, path in enumerate(index.paths))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("calls", [walk._CALLS, walk._CALLS[-1:]])
def test_a_walk_says_of_each_file_what_the_system_says(tmp_path, monkeypatch, late, calls):
    names = "a.d/x", "a/b", "a/é.jpg", "a/\udcff\n.jpg", "a/deep/c", "a0", "b/.hidden/x", "empty/.x", "z"
    for name in (*names, *(f"b/{number}" for number in range(1, 5))):
        fill(tmp_path / name, os.fsencode(name) * 3)
    os.truncate(tmp_path / "b/1", 5 << 30)
    os.utime(tmp_path / "b/2", ns=(0, -1_500_000_001))
    os.utime(tmp_path / "b/3", ns=(0, 2**32 * 10**9 + 7))
    (tmp_path / "b/0").symlink_to(tmp_path / "a")
    for name in ("a/a.jpg", "b/5.jpg", "z.jpg"):  # each where a file was the one that was asked before
        (tmp_path / name).symlink_to(tmp_path / "nowhere")
    (tmp_path / "b/6").symlink_to("6")
    os.mkfifo(tmp_path / "b/7")
    monkeypatch.setattr(walk, "_AT_ONCE", 2)
    monkeypatch.setattr(walk, "_CALLS", calls)
    call = walk._call.__wrapped__()
    monkeypatch.setattr(walk, "_call", lambda: call)
    if late:
        monkeypatch.setattr(latency, "_WAITED", -1)
        turns, ask = itertools.count(), call.function

        def asked(folder, name, *how):
            time.sleep(0.002)  # others come between
            return name in (b"4", b"deep") or ask(folder, name, *how)  # of the first two it fails

        monkeypatch.setattr(walk, "_LIBRARY", SimpleNamespace(**{ask.__name__: asked}))
        call.function = asked
        used = {"ru_utime": 0, "ru_stime": 0, "ru_nivcsw": 0}
        monkeypatch.setattr(latency.resource, "getrusage", lambda _: SimpleNamespace(ru_nvcsw=next(turns), **used))

    found = walk.walk(str(tmp_path), lambda name: name.endswith(".jpg"))
    seen = {}
    for folder, folders, files in os.walk(tmp_path, followlinks=True):
        folders[:] = [name for name in folders if name[0] != "."]
        paths = [os.path.join(folder, name) for name in files if name[0] != "."]
        seen |= {os.path.relpath(path, tmp_path): os.stat(path) for path in paths if os.path.isfile(path)}
    assert list(Paths.joined(found.names)) == sorted(seen, key=os.fsencode)
    assert found.stamps.tolist() == [[seen[x].st_size, seen[x].st_mtime_ns] for x in Paths.joined(found.names)]
    broken = dict.fromkeys(["a/a.jpg", "b/0/a.jpg", "b/5.jpg", "z.jpg"], "broken link")
    assert found.unreadable == broken | {"b/6": os.strerror(errno.ELOOP)}


def test_a_call_that_says_something_else_is_not_used(monkeypatch):
    if hasattr(walk._LIBRARY, "fstatat") and platform.machine() in ("x86_64", "aarch64"):
        assert walk._call.__wrapped__().function.__name__ == "fstatat"
    good = walk._CALLS[0]
    for field, place in {"mode": 0, "size": 56, "seconds": 64, "nanoseconds": 104}.items():
        kind = good[1][field].str
        fields = {name: (kind.str, at) for name, (kind, at) in good[1].fields.items()} | {field: (kind, place)}
        wrong = good[0], walk._layout(144, **fields), good[2]
        monkeypatch.setattr(walk, "_CALLS", [("there_is_no_such_call", *good[1:]), wrong, walk._CALLS[-1]])
        assert walk._call.__wrapped__().function.__name__ == "statx", field


def test_a_flat_folder_below_home_has_no_classes(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save(tmp_path / "flat/a.jpg")
    save(tmp_path / "flat/b.png")
    index = Index.scan("~/flat")
    assert index.classes == () and index.labels.tolist() == [-1, -1]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tiff"])
def test_sizes_are_those_of_the_upright_image(tmp_path, orientation, suffix):
    exif = Image.Exif()
    exif[0x0112] = orientation
    save(tmp_path / f"a.{suffix}", size=(30, 20), exif=exif)
    assert Index.scan(tmp_path).sizes.tolist() == [[20, 30] if orientation < 5 else [30, 20]]


def test_rejected_files_are_named_with_the_reason(tmp_path):
    save(tmp_path / "a/good.jpg")
    jpeg = (tmp_path / "a/good.jpg").read_bytes()
    png = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
    fill(tmp_path / "a/empty.jpg", b"")
    fill(tmp_path / "a/text.jpg", b"hello, I am text")
    fill(tmp_path / "a/packed.jpg.gz", b"\x1f\x8b")
    fill(tmp_path / "a/pointer.jpg", b"version https://git-lfs.github.com/spec/v1\noid sha256:")
    fill(tmp_path / "a/head.jpg", jpeg[:15])
    fill(tmp_path / "a/head.png", png)
    fill(tmp_path / "a/huge.ppm", b"P6 60000 60000 255\n")
    fill(tmp_path / "a/long.ppm", b"P6 70000 2 255\n")
    fill(tmp_path / "raw/1.NEF", b"II*\0")
    fill(tmp_path / "raw/2.psd", b"8BPS")
    save(tmp_path / "a/stack.tif")
    os.truncate(tmp_path / "a/stack.tif", 135_000_000)  # sparse
    save(tmp_path / "only bad/a.gif")
    save(tmp_path / "only bad/b.jp2")
    (tmp_path / "only bad/broken.jpg").symlink_to(tmp_path / "nowhere")
    index = Index.scan(tmp_path)
    assert index.paths == ["a/good.jpg"]
    assert index.classes == ("a", "only bad"), "the numbers of classes must not depend on which files are damaged"
    expected = {
        "a/empty.jpg": "empty file",
        "a/head.jpg": "",
        "a/head.png": "",
        "a/huge.ppm": "pixels",
        "a/long.ppm": "size 2x70000",
        "a/packed.jpg.gz": "format of compressed files is not supported",
        "a/pointer.jpg": "format of Git LFS's pointers (git lfs pull fetches the files) is not",
        "a/stack.tif": "135 MB for 20x30 pixels: expected one image a file",
        "a/text.jpg": "not an image",
        "only bad/a.gif": "format GIF is not supported",
        "only bad/b.jp2": "format JPEG2000 is not supported",
        "only bad/broken.jpg": "broken link",
        "raw/1.NEF": "one of 2 files of camera raw or Photoshop, which are not read",
    }
    assert list(index.rejected) == sorted(expected)
    for path, reason in expected.items():
        assert reason in index.rejected[path] and index.rejected[path], path


def test_worker_processes_give_the_same_index(tmp_path, monkeypatch):
    for i in range(7):
        save(tmp_path / f"class {i % 2}/é{i}.png", size=(i + 1, 5))
    fill(tmp_path / "class 0/bad.jpg", b"")
    (tmp_path / os.fsdecode(b"class 0/\xff.png")).write_bytes((tmp_path / "class 0/é0.png").read_bytes())
    alone, done = Index.scan(tmp_path), []
    monkeypatch.setattr(scan, "_PARALLEL", 1)
    monkeypatch.setattr(scan, "_PIECE", 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(headers, "read_headers", None)  # not in this process
    shared = Index.scan(tmp_path, progress=lambda *files: done.append(files))
    assert len(shared) == 8 and shared.fingerprint == alone.fingerprint and shared.rejected == alone.rejected
    assert done == [(3, 9), (6, 9), (9, 9)]
    monkeypatch.setattr(headers, "__file__", str(tmp_path / "gone.py"))
    scan.version.cache_clear()
    with pytest.raises(subprocess.CalledProcessError):
        Index.scan(tmp_path)


@pytest.fixture
def reads(monkeypatch):
    """The files whose headers are read, as they are."""
    read, files = headers.read_headers, []
    monkeypatch.setattr(headers, "read_headers", lambda root, paths: files.extend(paths) or read(root, paths))
    return files


def test_what_may_not_be_read_is_tried_at_the_next_start(tmp_path, monkeypatch, reads):
    """As nothing that is looked at says that it may be read now; nothing else is read for that."""
    root, cache = tmp_path / "data", tmp_path / "cache"
    forbidden = {"1.png": errno.EACCES, "2.png": errno.ENOENT}  # the disk of the latter was not mounted for a moment
    for i in range(4):
        save(root / f"{i}.png")

    def opened(path, *more, do=os.open, **how):
        if number := forbidden.get(os.path.basename(os.fsdecode(path))):
            raise OSError(number, os.strerror(number))
        return do(path, *more, **how)

    monkeypatch.setattr(os, "open", opened)
    for _ in range(2):
        assert Index.scan(root, cache).rejected == {name: os.strerror(number) for name, number in forbidden.items()}
    assert reads[4:] == ["1.png", "2.png"]
    del forbidden["2.png"]
    assert Index.scan(root, cache).rejected == {"1.png": "Permission denied"}
    forbidden.clear()
    assert len(Index.scan(root, cache)) == 4
    reads.clear()
    assert len(Index.scan(root, cache)) == 4 and not reads


def test_the_cache_is_used_until_something_changes(tmp_path, reads):
    root, cache = tmp_path / "data", tmp_path / "new/folder"
    save(root / "a/1.png")
    (root / os.fsdecode(b"a/\xff.png")).write_bytes((root / "a/1.png").read_bytes())
    fill(root / "a/bad.jpg", b"")

    def scanned():
        reads.clear()
        index = Index.scan(root, cache)
        return index if reads else None

    index, again = scanned(), Index.scan(root, cache)
    assert index and not scanned() and again.stored == index.stored
    assert again.fingerprint == index.fingerprint and again.paths == index.paths and again.rejected == index.rejected

    save(root / "a/2.png")
    assert scanned() and not scanned(), "a new file"
    assert len(Index.scan(root, cache)) == 3
    os.utime(root / "a/2.png", ns=(1, 1))
    assert scanned() and not scanned(), "a new time"
    (root / "a/2.png").unlink()
    assert not scanned() and len(Index.scan(root, cache)) == 2, "what it was before"
    whole = again.stored.read_bytes()
    flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in (-1, -9, len(whole) // 2, 60, 100)]
    older = whole.replace(b"APS index", b"APS Index")
    for content in (b"", b"garbage", whole[:-40], whole[:40], whole + b"1", older, *flipped):
        again.stored.unlink()  # a file that is mapped is not written to
        again.stored.write_bytes(content)
        assert scanned() and not scanned(), "a damaged cache"
    root = root.rename(tmp_path / "moved")
    assert not scanned() and os.path.samefile(Index.scan(root, cache).root, root), "paths are relative"
    assert {path.suffix for path in cache.iterdir()} == {".index", ".json"}, "nothing temporary is left"

    save(root / "a/3.png")
    reads.clear()
    trusted = Index.scan(root, cache, trust=True)
    assert len(trusted) == 2 and trusted.root == root.resolve() and not reads
    assert len(Index.scan(root, tmp_path / "none yet", trust=True)) == 3 and reads


def test_an_interrupted_scan_goes_on(tmp_path, reads, monkeypatch):
    root, cache = tmp_path / "data", tmp_path / "cache"
    for i in range(10):
        save(root / f"{i}.png", size=(i + 1, 5))
    monkeypatch.setattr(scan, "_PIECE", 2)

    def stop(done, files):
        if done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Index.scan(root, cache, progress=stop)
    (part,) = cache.glob("*.part")
    lines = part.read_bytes()[:-5].splitlines(keepends=True)  # it was killed while it wrote
    lines[2] = lines[2][:40] + bytes(4) + lines[2][44:]  # and the machine went down
    part.write_bytes(b"".join(lines))
    os.utime(root / "1.png")
    reads.clear()
    index = Index.scan(root, cache)
    assert sorted(reads) == [f"{i}.png" for i in (0, 1, 4, 5, 6, 7, 8, 9)]
    assert index.fingerprint == Index.scan(root).fingerprint and not part.exists()


def test_a_scan_waits_for_another_of_the_same_data_and_says_so(tmp_path, capsys):
    root, said = tmp_path / "data", ""
    save(root / "0.png")
    with ThreadPoolExecutor(1) as pool:  # locks are between openings of a file: a thread stands for a process
        with cache.Cache(tmp_path / "cache", str(root)).scanning():
            other, end = pool.submit(Index.scan, root, tmp_path / "cache"), time.monotonic() + 20
            while not said and time.monotonic() < end:
                said += capsys.readouterr().err
                time.sleep(0.01)
            assert said == f"{root}: its headers are read in another process; waiting for its end\n"
            assert not other.done()
        assert len(other.result()) == 1


def test_several_processes_write_the_same_file(tmp_path):
    """Also such as know nothing of each other, and have the same number each on its machine."""
    with cache.replacing(tmp_path / "a", shared=True) as one:
        one.write_text("one")
        with cache.replacing(tmp_path / "a", shared=True) as other:
            other.write_text("other")
    assert (tmp_path / "a").read_text() == "one" and os.listdir(tmp_path) == ["a"]
    save(tmp_path / "data/0.png")
    index = Index.scan(tmp_path / "data", tmp_path / "cache")
    for _ in range(3):  # a link to what it is to replace
        index.keep(tmp_path / "run/train.index")
        assert os.listdir(tmp_path / "run") == ["train.index"]


def test_a_folder_for_indices_that_cannot_be_written_to_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert cache.place(None, tmp_path) == tmp_path / "home" / "aps" and not capsys.readouterr().err
    (tmp_path / "file").touch()
    assert cache.place(tmp_path / "file" / "x", tmp_path / "run") == tmp_path / "run"
    said = capsys.readouterr().err
    assert said == f"--index-cache {tmp_path}/file/x: Not a directory; what the scan finds is kept in {tmp_path}/run\n"

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # as in a container of a user that it does not know
    assert cache.place(None, None) is None
    said = "--index-cache ~/.cache/aps: Could not determine home directory; what the scan finds is kept nowhere\n"
    assert capsys.readouterr().err == said

    def full(*_):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    save(tmp_path / "data/0.png")
    monkeypatch.setattr(cache.Results, "put", full)
    with pytest.raises(OSError, match=rf"^--index-cache {tmp_path}/full: Disk quota exceeded; expected room there, or"):
        Index.scan(tmp_path / "data", tmp_path / "full")


def test_files_that_answer_late_are_asked_by_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(headers, "_AT_ONCE", 2)
    asked, at_once = [], []

    def late(path):
        asked.append(path)
        time.sleep(0.02)
        at_once.append(len(asked))
        asked.remove(path)
        return [1, int(path.rpartition("/")[2])]

    monkeypatch.setattr(headers, "_read_file", late)
    assert headers.read_headers(tmp_path, [str(i) for i in range(20)]) == [[1, i] for i in range(20)]
    assert at_once[:2] == [1, 1] and max(at_once) > 5


def test_an_index_goes_to_other_processes_as_the_name_of_its_file(tmp_path):
    for i in range(3):
        save(tmp_path / f"data/{i}.png", size=(i + 1, 5))
    stored = Index.scan(tmp_path / "data", tmp_path / "cache")
    alone = stored.without({1: "why"})
    for index in (stored, alone):
        sent = pickle.dumps(index)
        again = pickle.loads(sent)
        assert (
            again.paths == index.paths
            and again.rejected == index.rejected
            and len(sent) < 1000 + 200 * (not index.stored)
        )
        assert again.fingerprint == index.fingerprint and (again.sizes == index.sizes).all()
    assert list(alone.paths) == ["0.png", "2.png"] and alone.sizes.tolist() == [[5, 1], [5, 3]]
    sent = pickle.dumps(stored)
    assert b"2.png" not in sent
    stored.stored.unlink()
    with pytest.raises(OSError, match="cannot be read here"):
        pickle.loads(sent)


def test_names_in_one_piece_are_a_sequence():
    names = ["a/ö", "", os.fsdecode(b"\xff"), "a/ö", "é猫"] * 1000
    paths = Paths.of(names)
    assert paths == names and list(paths) == names and paths != names[:-1] and len(paths) == 5000
    assert paths[-1] == names[-1] and paths[4000:4200] == names[4000:4200] and paths[7:1:-2] == names[7:1:-2]
    assert paths.take(np.array([3, 0, 1])) == ["a/ö", "a/ö", ""] and paths.positions({"é猫"}) == dict.fromkeys(
        range(4, 5000, 5), "é猫"
    )
    assert paths.take(np.arange(1, 5000)) == names[1:], "several pieces"
    assert Paths.of([]) == [] and Paths.of([]).positions({"a"}) == {}
    with pytest.raises(IndexError):
        paths[5000]
    with pytest.raises(ValueError, match="NUL"):
        Paths.of(["a\0b"])


def test_the_fingerprint_tells_data_sets_apart(tmp_path):
    save(tmp_path / "a/1.png")
    save(tmp_path / "b/2.png")
    prints = [Index.scan(tmp_path).fingerprint]
    save(tmp_path / "b/2.png", size=(31, 20))
    prints.append(Index.scan(tmp_path).fingerprint)
    (tmp_path / "b/2.png").rename(tmp_path / "b/3.png")
    prints.append(Index.scan(tmp_path).fingerprint)
    os.utime(tmp_path / "b/3.png", ns=(1, 1))
    assert len(set(prints)) == 3 and Index.scan(tmp_path).fingerprint == prints[-1]


def test_changes_are_named_by_kind(tmp_path):
    """Classes by name, though "a" gives them other numbers; images by path, though others are numbered before."""

    def an_index(images, classes, places=None):
        paths, names, sizes = zip(*images, strict=True)
        labels = np.array([classes.index(name) if name else -1 for name in names])
        shards = () if places is None else ("x.tar", "y.tar")
        return Index(tmp_path, list(paths), labels, np.array(sizes, np.int32), classes, {}, shards, places)

    before = [("1", "b", (2, 3)), ("2", "c", (2, 3)), ("3", None, (2, 3)), ("4", "b", (2, 3)), ("5", "b", (2, 3))]
    after = [("0", "a", (2, 3)), ("1", "b", (2, 3)), ("2", "b", (2, 3)), ("3", None, (3, 2)), ("5", None, (2, 3))]
    one, other = an_index(before, ("b", "c")), an_index(after, ("a", "b"))
    assert one.changes(one) == {"gone": [], "new": [], "changed": []}
    twice = an_index([("1", "b", (2, 3)), ("1", "c", (2, 3)), ("0", "c", (2, 3))], ("b", "c"))
    assert twice.changes(twice) == {"gone": [], "new": [], "changed": []} and twice.changes(one)["gone"] == ["1", "0"]
    assert one.changes(other) == {"gone": ["4"], "new": ["0"], "changed": ["2", "3", "5"]}
    assert other.changes(one) == {"gone": ["0"], "new": ["4"], "changed": ["2", "3", "5"]}

    kept = tmp_path / "run/index.npz"
    assert "(--resume changed needs index.npz in its folder run, which is missing" in other.differing(kept, 1005)
    one.keep(kept)
    said = "other images (1,005 images there, 5 now, 1 gone (4), 1 new (0), 3 changed (2)); expected the same --data"
    assert other.differing(kept, 1005).startswith(said)
    other.keep(kept, anew=False)
    assert Index.kept(kept, tmp_path).fingerprint == one.fingerprint
    kept.write_bytes(b"")
    other.keep(kept, anew=False)
    assert Index.kept(kept, tmp_path).fingerprint == other.fingerprint

    # Where it lies in its shard counts, not which number that shard has.
    places = np.arange(15).reshape(5, 3) % [2, 99, 99]
    moved = places.copy()
    moved[:, 0] = 1
    moved[2, 1] += 1
    moved[3, 2] += 1
    one, other = (an_index(before, ("b", "c"), p) for p in (places, moved))
    assert one.changes(other) == {"gone": [], "new": [], "changed": ["3", "4"]}


def test_sides_and_pixels_have_limits():
    taken = (1, 1), (65535, 1), (1, 65535), (40_000, 4_450), (65535, 2716)
    assert [headers.checked(*size) for size in taken] == list(map(list, taken))
    for height, width in ((0, 5), (5, 0), (65536, 1), (1, 65536), (65535, 2717), (44_500, 4_001)):
        assert headers.checked(height, width).startswith(f"size {height}x{width}: expected sides of 1 to 65535 and at")


def test_what_cannot_be_opened_is_named(tmp_path):
    gone = "No such file or directory"
    os.mkfifo(tmp_path / "pipe.jpg")
    held = os.open(tmp_path / "pipe.jpg", os.O_RDWR)  # or a test that fails would wait
    rows = headers.read_headers(tmp_path, ["gone.jpg", "gone.TAR", "pipe.jpg"])
    os.close(held)
    assert rows[0] == gone and [row[:3] for row in rows[1]] == [[None, None, gone]]
    assert rows[2] == "not a regular file"


def test_errors_are_one_clear_line(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere"):
        Index.scan(tmp_path / "nowhere")
    fill(tmp_path / "file", b"x")
    with pytest.raises(NotADirectoryError, match="is a file"):
        Index.scan(tmp_path / "file")
    with pytest.raises(ValueError, match=r"in .* \(1 file, none an image, first: file\); expected JPEG"):
        Index.scan(tmp_path)
    fill(tmp_path / "a.jpg", b"")
    fill(tmp_path / "b.jpg", b"text")
    with pytest.raises(ValueError, match=r"\(2 files rejected, first: a.jpg: empty file\)") as caught:
        Index.scan(tmp_path)
    assert "\n" not in str(caught.value)
    save(tmp_path / "é.jpg")
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "iso8859-1")
    with pytest.raises(ValueError, match=r"holds \\xe9.jpg; expected plain ASCII .* iso8859-1, .* PYTHONUTF8=1"):
        Index.scan(tmp_path)


def test_names_on_the_screen_are_harmless():
    assert headers.printable("a b/\u00e9.jpg") == "a b/\u00e9.jpg"
    assert headers.printable("a\nb\x1b[2J\udcff") == r"a\nb\x1b[2J\udcff"


def test_what_an_evaluation_leaves_out_is_named(tmp_path):
    """Rejected files, those found bad, and those without a class."""
    for name in ("a/0.png", "b/1.png", "loose.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    (tmp_path / "a" / "text.jpg").write_text("none")
    index = Index.scan(tmp_path)
    reasons = {"a/text.jpg": "not an image", "loose.png": "has no class", "b/1.png": "why"}
    assert index.left_out({index.paths.index("b/1.png"): "why"}) == {f"{tmp_path}/{k}": v for k, v in reasons.items()}
    assert index.labels_among(("z", "b", "a")).tolist() == [2, 1]
