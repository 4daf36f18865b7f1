"""The loader end to end on the CPU: what a batch holds depends on its number only, and bad files shift nothing else."""

import contextlib
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as F
from PIL import Image, ImageOps

from pipeline import Augmentation, Index, Loader, evaluation_batches, graph, inflight, memory, stream
from pipeline import loader as loader_module
from pipeline.loader import bad_limit
from pipeline.stream import replacement

CPU = torch.device("cpu")
PLAIN = Augmentation(jitter_p=0, grey_p=0, blur_p=(0, 0), solarise_p=(0, 0))
N = 50


@pytest.fixture
def root(tmp_path):
    """50 images of different sizes in two classes; every fourth lies on its side (EXIF)."""
    rng = np.random.default_rng(0)
    for i in range(N):
        exif = Image.Exif()
        exif[0x0112] = 6 if i % 4 == 0 else 1
        coarse = Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8))
        path = tmp_path / "data" / "ab"[i % 2] / f"{i:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse.resize((40 + i, 60), Image.Resampling.BICUBIC).save(path, exif=exif, quality=95)
    return tmp_path / "data"


def loader(index, augmentation=None, **options):
    settings = {"image_size": 24, "batch_size": 12, "seed": 7, "device": CPU, "threads": 2}
    return Loader(index, augmentation or Augmentation(), **(settings | options))


def tensors(batch):
    return (*batch.views, batch.boxes, batch.flips, batch.sample, batch.label)


def by_sample(batches, per_epoch):
    """{(epoch, sample): its tensors}"""
    return {
        (number // per_epoch, s): tuple(t[i] for t in tensors(batch))
        for number, batch in batches
        for i, s in enumerate(batch.sample.tolist())
    }


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def all_same(batches, others):
    return all(same(tensors(a), tensors(b)) for a, b in zip(batches, others, strict=True))


def test_batches_are_complete_and_epochs_are_permutations(root):
    index = Index.scan(root)
    load = loader(index)
    assert load.batches_per_epoch == N // 12 == 4
    batches = list(load.batches(0, 8))
    for batch in batches:
        types = [torch.uint8, torch.uint8, torch.int32, torch.bool, torch.int64, torch.int64]
        assert [t.dtype for t in tensors(batch)] == types
        assert [tuple(t.shape) for t in tensors(batch)] == [(12, 24, 24, 3)] * 2 + [(12, 2, 4), (12, 2), (12,), (12,)]
        assert batch.label.tolist() == index.labels[batch.sample.numpy()].tolist()
    epochs = [torch.cat([b.sample for b in batches[i : i + 4]]).tolist() for i in (0, 4)]
    assert all(len(set(e)) == 48 for e in epochs) and epochs[0] != epochs[1]
    assert not load.bad and len({batch.views[0].data_ptr() for batch in batches}) == 8


def test_content_depends_on_neither_start_nor_threads_nor_ranks_nor_batch_size(root):
    index = Index.scan(root)
    whole = list(loader(index).batches(0, 10))
    for first in (3, 5):  # resuming
        assert all_same(whole[first:], loader(index).batches(first, 10))
    assert all_same(whole, loader(index, threads=1).batches(0, 10))
    parts = [loader(index, rank=r, ranks=3).batches(2, 9) for r in range(3)]
    for expected, *slices in zip(whole[2:9], *parts, strict=True):
        assert same(tensors(expected), [torch.cat(t) for t in zip(*(tensors(s) for s in slices), strict=True)])
    small = by_sample(enumerate(loader(index, batch_size=5).batches(0, 20)), 10)
    for key, expected in by_sample(enumerate(whole[:8]), 4).items():
        assert same(expected, small[key]), key
    assert not same(tensors(whole[0]), tensors(next(loader(index, seed=8).batches(0, 1))))


def test_the_order_of_the_next_epoch_is_computed_while_this_one_runs(root, monkeypatch):
    """Each once, none beyond the end; and what fails there, fails where it is needed."""
    compute, computed = stream.epoch_order, []

    def recorded(n, seed, epoch):
        computed.append((epoch, threading.current_thread() is threading.main_thread()))
        if epoch == 4:
            raise MemoryError("no more")
        return compute(n, seed, epoch)

    monkeypatch.setattr(stream, "epoch_order", recorded)
    load, given = loader(Index.scan(root)), []
    with pytest.raises(MemoryError, match="no more"):
        for batch in load.batches(5, 20):
            given.append(batch)
            assert len(computed) >= 2 and len(load._orders) == 2
    assert 8 <= len(given) <= 11 and computed == [(epoch, False) for epoch in range(1, 5)]
    computed.clear()
    assert len(list(loader(load.index).batches(9, 12))) == 3 and computed == [(2, False)]


def test_a_batch_of_many_pixels_is_decoded_in_parts_and_is_the_same(root, monkeypatch):
    """Also where files go bad in one of its parts; each part is on record by itself. How large parts are is decided at
    the start: later on a GPU's memory is in use, most of it by what parts take."""
    index, sizes, notes = Index.scan(root), [], []
    whole = list(loader(index).batches(0, 8))
    broken = whole[0].sample[[0, 11]].tolist() + whole[2].sample[[3, 4]].tolist()
    break_files(index, broken)
    load = loader(index)
    whole, how = list(load.batches(0, 8)), {"image_size": 24, "batch_size": 9, "device": CPU, "threads": 1}
    seen = [tensor for images, *more in evaluation_batches(index, np.arange(N), **how) for tensor in (images, *more)]
    asked, most = [], memory.most_pixels
    monkeypatch.setattr(memory, "_MOST", 15_000)
    monkeypatch.setattr(memory, "most_pixels", lambda device: asked.append(1) or most(device))
    monkeypatch.setattr(inflight.Record, "note", lambda _, sample: notes.append(sample))
    monkeypatch.setattr(
        loader_module, "_probe", lambda *a, probe=loader_module._probe: sizes.append(len(a[2])) or probe(*a)
    )
    cut = loader(index, record=root.with_name("record"))
    assert all_same(whole, cut.batches(0, 8)) and cut.bad == load.bad and len(asked) == 1
    assert min(sizes) >= 1 and max(sizes) <= 6 and {len(note) for note in notes} <= {1, 2, 3, 4, 5, 6}
    got = [tensor for images, *more in evaluation_batches(index, np.arange(N), **how) for tensor in (images, *more)]
    assert same(seen, got)
    monkeypatch.setattr(loader_module, "_probe", lambda *_: {})  # not even where a part before decodes, for ever
    cut.bad = {s: "known" for s in broken if s != broken[1]}
    with pytest.raises(RuntimeError, match="batch 0 fails, but each of its images decodes alone"):
        next(cut.batches(0, 1))


@pytest.mark.parametrize("said", ["std::bad_alloc", "CUDA allocation failed", "Can't allocate 9 bytes on device 0."])
def test_no_image_is_bad_for_want_of_memory(root, monkeypatch, said):
    """In the words of DALI 2.4 (core/cuda_error.h) and of C++."""
    load = loader(Index.scan(root))
    sample = load.samples(0)[3]
    file = Path(load.index.file(sample))
    file.write_bytes(file.read_bytes()[:-2])
    monkeypatch.setattr(graph, "_cause", lambda error: said)
    with pytest.raises(MemoryError, match=rf"{load.index.paths[sample]} does not decode \({said}\)"):
        next(load.batches(0, 1))
    assert not load.bad


@pytest.mark.parametrize("most, ahead", [(10**9, {10}), (30_000, {1, 2, 3})], ids=["enough memory", "little memory"])
def test_what_is_slow_to_read_is_begun_beforehand(root, monkeypatch, most, ahead):
    """So much that forty requests are under way while a batch of four is waited for, if there is the memory."""
    index, begun, got = Index.scan(root), [], []

    def begin(samples):
        begun.append(samples)
        return lambda: got.append(samples) or [np.fromfile(index.file(s), np.uint8) for s in samples]

    reader = contextlib.nullcontext(SimpleNamespace(begin=begin, threads=40))
    monkeypatch.setattr(memory, "most_pixels", lambda device: most)
    expected = list(evaluation_batches(index, np.arange(N), image_size=24, batch_size=4, device=CPU, threads=1))
    monkeypatch.setattr(Index, "open", lambda index: reader)
    for number, batch in enumerate(
        evaluation_batches(index, np.arange(N), image_size=24, batch_size=4, device=CPU, threads=1)
    ):
        assert same(batch, expected[number])
        assert len(begun) - len(got) in ahead or sum(map(len, begun)) == N
        assert got == begun[: len(got)]
    assert number == N // 4 and got == begun


def test_boxes_and_flips_describe_the_views(root):
    """Cutting the box out of the upright image again, with Pillow, gives the view."""
    index = Index.scan(root)
    (batch,) = loader(index, PLAIN).batches(0, 1)
    for i, s in enumerate(batch.sample.tolist()):
        with Image.open(index.file(s)) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
        assert list(upright.size[::-1]) == index.sizes[s].tolist()
        for view in range(2):
            crop = F.resized_crop(upright, *batch.boxes[i, view].tolist(), [24, 24])
            crop = F.horizontal_flip(crop) if batch.flips[i, view] else crop
            assert np.abs(batch.views[view][i].numpy() - np.asarray(crop).astype(float)).mean() < 1.5, (s, view)
    assert batch.flips.any() and not batch.flips.all()


def break_files(index, samples):
    """Break files after the scan, each in another way."""
    gone, short, text, empty = (Path(index.file(s)) for s in samples)
    gone.unlink()
    short.write_bytes(short.read_bytes()[:-2])
    text.write_text("text")
    empty.write_bytes(b"")


def test_files_that_go_bad_are_replaced_and_shift_nothing(root, monkeypatch):
    index = Index.scan(root)
    clean = list(loader(index).batches(0, 8))
    clean_by_sample = by_sample(enumerate(clean), 4)
    broken = [*clean[0].sample[[0, 11]].tolist(), *clean[2].sample[[3, 4]].tolist()]
    break_files(index, broken)
    probed = []
    probe = graph.probe
    monkeypatch.setattr(graph, "probe", lambda paths, device: probe(probed.append(1) or paths, device))

    load = loader(index)
    got = list(load.batches(0, 8))
    assert sorted(load.bad) == sorted(broken) and all(load.bad.values())
    assert load.bad[broken[0]] == "No such file or directory" and load.bad[broken[3]] == "empty file"
    assert len(got) == 8
    for number, (before, after) in enumerate(zip(clean, got, strict=True)):
        epoch = number // 4
        for i, (s, now) in enumerate(zip(before.sample.tolist(), after.sample.tolist(), strict=True)):
            if s in broken:
                s = next(r for r in (replacement(s, k, N, 7, epoch) for k in range(100)) if r not in broken)
            assert s == now, (number, i)
            if (epoch, s) in clean_by_sample:
                assert same(clean_by_sample[epoch, s], [t[i] for t in tensors(after)]), (number, s)
    # Once known they cost nothing; a loader that knows nothing of them yet ends at the same batches.
    count = len(probed)
    assert all_same(got, load.batches(0, 8)) and len(probed) == count
    assert all_same(got[5:], loader(index).batches(5, 8))
    parts = [loader(index, rank=r, ranks=2).batches(0, 8) for r in range(2)]
    for expected, *slices in zip(got, *parts, strict=True):
        assert same(tensors(expected), [torch.cat(t) for t in zip(*(tensors(s) for s in slices), strict=True)])


def test_a_file_of_another_size_than_the_index_has_is_left_out(root):
    """Its crops would be others than those that were drawn: also one that was turned, whose header alone differs."""
    index = Index.scan(root)
    clean = list(loader(index, PLAIN).batches(0, 4))
    for i in (1, 3):
        Image.new("RGB", (3, 2), "white").save(index.file(i))
    with Image.open(index.file(5)) as image:
        exif = image.getexif()
        exif[0x0112] = 6
        image.save(index.file(5), exif=exif)
    load = loader(index, PLAIN)
    for before, after in zip(clean, load.batches(0, 4), strict=True):
        same_one = before.sample == after.sample
        assert all(torch.equal(a[same_one], b[same_one]) for a, b in zip(before.views, after.views, strict=True))
    then = {i: "x".join(map(str, index.sizes[i])) for i in (1, 3, 5)}
    now = {1: "2x3", 3: "2x3", 5: "x".join(map(str, index.sizes[5][::-1]))}
    assert load.bad == {i: f"not the image that was indexed: {now[i]} pixels; {then[i]} in the index" for i in now}


def test_too_many_bad_files_stop_with_their_names(root):
    index = Index.scan(root)
    for i in range(N):
        Path(index.file(i)).write_bytes(b"")
    with pytest.raises(ValueError, match=r"2\d of 50 images .* cannot be used, at most 20 may: .*empty file"):
        list(loader(index).batches(0, 4))
    with pytest.raises(ValueError, match=r"3\d of 50 images .* at most 25 may"):
        list(loader(index, max_bad=0.5).batches(0, 4))


def test_so_many_bad_files_are_allowed():
    table = {(50, 0.05): 20, (1000, 0.05): 50, (999, 0.05): 49, (10, 0.5): 9, (21, 0.1): 20, (10, 0.0): 0, (1, 1.0): 0}
    assert {case: bad_limit(*case) for case in table} == table


@pytest.mark.parametrize(
    "often, why",
    [({2: 1}, "CUDA allocation failed"), ({0: 1, 1: 1, 3: 1}, "out of luck"), ({2: 2}, "out of luck")],
    ids=str,
)
def test_a_batch_that_fails_for_no_reason_is_tried_once_more(root, monkeypatch, often, why):
    """``often``: how often it fails, by batch. For want of memory: in parts that fit into what there is then."""
    asked, most = [], memory.most_pixels
    monkeypatch.setattr(memory, "most_pixels", lambda device: asked.append(1) or most(device))
    index, failing = Index.scan(root), dict(often)
    expected = list(loader(index).batches(0, 4))
    make, given = graph.pipeline, []

    def pipeline(*arguments, **options):
        made = make(*arguments, **options)

        class Failing:
            def run(self, stream):
                outputs = made.run(stream)
                if failing.get(len(given), 0) > 0:
                    failing[len(given)] -= 1
                    raise RuntimeError(why)
                return outputs

        return Failing()

    monkeypatch.setattr(graph, "pipeline", pipeline)
    load, fails = loader(index), max(often.values()) > 1
    said = "batch 2 fails, but each of its images decodes alone: out of luck"
    with pytest.raises(RuntimeError, match=said) if fails else contextlib.nullcontext():
        for batch in load.batches(0, 4):
            given.append(batch)
    assert not any(failing.values()) and all_same(expected[: 2 if fails else 4], given)
    assert not load.bad and len(asked) == 2 + memory.lacking(why)  # one more for what is expected


def test_an_index_of_which_nothing_decodes_ends(tmp_path):
    for i in range(4):
        Image.new("RGB", (9, 9)).save(tmp_path / f"{i}.png")
    index = Index.scan(tmp_path)
    for i in range(4):
        os.truncate(index.file(i), 0)
    with pytest.raises(ValueError, match="of 4 images"):
        list(loader(index, batch_size=2).batches(0, 2))
    samples = np.arange(4)
    assert list(evaluation_batches(index, samples, image_size=24, batch_size=3, device=CPU, threads=1)) == []


def test_views_stay_valid_and_threads_end(root):
    index = Index.scan(root)
    next(loader(index).batches(0, 2))  # whatever DALI starts once for the process

    def threads():
        return set(os.listdir("/proc/self/task"))

    before = threads()  # those of earlier tests may still be ending
    batches = loader(index).batches(0, 100)
    kept = [next(batches) for _ in range(30)]
    sums = [batch.views[1].long().sum().item() for batch in kept]
    started = threads() - before
    assert started
    batches.close()
    assert not started & threads()
    list(loader(index, seed=1).batches(0, 30))
    assert [batch.views[1].long().sum().item() for batch in kept] == sums


@pytest.mark.parametrize("size", [64, 32])
def test_evaluation_sees_every_sample_once(root, size):
    index = Index.scan(root)
    broken = [3, 4, 10, 20]
    break_files(index, broken)
    samples = np.arange(N)[::-1][:45]
    batches = list(evaluation_batches(index, samples, image_size=size, batch_size=4, device=CPU, threads=2))
    seen = torch.cat([b[1] for b in batches]).tolist()
    assert seen == [s for s in samples.tolist() if s not in broken]
    assert torch.equal(torch.cat([b[2] for b in batches]), torch.from_numpy(index.labels[seen]))
    for images, sample, _ in batches:
        for got, s in zip(images.numpy(), sample.tolist(), strict=True):
            with Image.open(index.file(s)) as image:
                upright = ImageOps.exif_transpose(image).convert("RGB")
            w, h = upright.size
            x, y = (w / 2, h / 2) if size < 64 else (min(w, h) * 7 / 16,) * 2
            box = w / 2 - x, h / 2 - y, w / 2 + x, h / 2 + y
            expected = upright.resize((size, size), Image.Resampling.BILINEAR, box)
            assert np.abs(got - np.asarray(expected).astype(float)).mean() < 1, s


def test_sizes_that_do_not_divide_are_refused(root):
    index = Index.scan(root)
    with pytest.raises(ValueError, match=r"--batch-size 10: expected a positive multiple of the ranks, 3"):
        loader(index, batch_size=10, ranks=3)
    with pytest.raises(ValueError, match=r"50 images .* at least one batch of 51"):
        loader(index, batch_size=51)
    with pytest.raises(ValueError, match="--batch-size 0: expected a positive multiple of the ranks, 1"):
        loader(index, batch_size=0)
    assert loader(index, batch_size=1).batches_per_epoch == 50 and loader(index, batch_size=50).batches_per_epoch == 1


def test_a_gpu_says_what_decodes(root, monkeypatch):
    """Its engines, where they give a picture; a card without any refuses, or gives nothing."""
    made = SimpleNamespace(Backend=lambda kind: kind, HW_GPU_ONLY="engines")
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", made)
    load, said = loader(Index.scan(root), device=torch.device("cuda", 3)), []
    for decode in (lambda jpeg: jpeg[:2] == b"\xff\xd8" or None, lambda _: None, None):

        def decoder(device_id, backends, decode=decode):
            assert (device_id, backends) == (3, ["engines"])
            if decode is None:
                raise RuntimeError("Could not create decoder")
            return SimpleNamespace(decode=decode)

        made.Decoder = decoder
        said.append(load.decoder)
    assert ["the GPU's engines" in line for line in said] == [True, False, False]
    assert loader(load.index).decoder == ""


@pytest.mark.gpu
def test_a_gpu_gives_the_same_batches(root):
    """Same samples, boxes and flips, bad files replaced alike; pixels as near as the two decoders and resizes are."""
    pytest.importorskip("nvidia.dali")
    index = Index.scan(root)
    for sample, content in enumerate((b"", b"text", None)):  # a JPEG without its end may decode in one of them only
        path = Path(index.file(sample))
        path.write_bytes(content) if content is not None else path.unlink()
    on_cpu, on_gpu = loader(index), loader(index, device=torch.device("cuda"))
    for expected, got in zip(on_cpu.batches(0, 6), on_gpu.batches(0, 6), strict=True):
        assert all(x.is_cuda for x in tensors(got))
        assert same(tensors(expected)[2:], [x.cpu() for x in tensors(got)[2:]])
        for one, other in zip(expected.views, got.views, strict=True):
            assert (one.float() - other.cpu().float()).abs().mean() < 2
    assert on_cpu.bad.keys() == on_gpu.bad.keys() == {0, 1, 2}


def test_what_goes_to_a_gpu_lies_in_one_piece(monkeypatch):
    """Of a part with gaps, as the flips of fine-tuning are, torch makes a copy that is not pinned, and may wait."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, non_blocking: self)
    array = np.arange(8).reshape(4, 2)
    assert loader_module.on_device(array[:, :1], torch.device("cuda")).tolist() == [[0], [2], [4], [6]]
    assert [tensor.is_contiguous() for tensor in pinned] == [True]


@pytest.mark.gpu
def test_views_are_read_before_the_decoder_takes_them_back(root):
    """However late the device gets there: it sleeps for about a second, and the next batches are asked for."""
    pytest.importorskip("nvidia.dali")
    index, how = Index.scan(root), {"device": torch.device("cuda"), "image_size": 224}
    expected = next(loader(index, **how).batches(0, 1)).views[0].cpu()
    batches = loader(index, **how).batches(0, 12)
    torch.cuda.synchronize()
    views = next(batches).views
    torch.cuda._sleep(2 * 10**9)  # clock cycles
    read = views[0].clone()
    del views
    for _ in range(4):
        next(batches)
    assert (read.cpu().float() - expected.float()).abs().mean() < 1  # another decoding; other images: tens of levels
