import hashlib
import itertools
import math
from unittest import mock

import numpy as np
import pytest
import torch

import kernels
from kernels import reference, sampling
from kernels.philox import Purpose, philox, split64, stream_key
from pipeline import stream
from tests.kernels import keys
from tests.kernels.interpreter import interpret

# Pairs of crops (y, x, h, w): the same, nested, touching, apart, partly overlapping, enormous, one pixel.
PAIRS = [
    [[5, 7, 90, 110], [5, 7, 90, 110]],
    [[0, 0, 200, 300], [40, 50, 33, 71]],
    [[0, 0, 50, 60], [50, 0, 50, 60]],
    [[0, 0, 50, 60], [300, 400, 20, 30]],
    [[10, 20, 101, 97], [60, 3, 89, 131]],
    [[0, 0, 65535, 65535], [65535, 1000, 65535, 64000]],
    [[0, 0, 65535, 65534], [12, 13, 65535, 65535]],
    [[9, 9, 1, 1], [9, 9, 1, 1]],
]
# grid, keep, groups, power, seed, epoch
CASES = {
    "14x14": ((14, 14), 49, 4, 3.0, 1, 0),
    "all of 3x5": ((3, 5), 15, 1, 0.5, -7, 2**40 + 1),
    "5x3, one left over": ((5, 3), 7, 2, 2.7, 2**63 - 1, -1),
    "uniform": ((4, 4), 4, 3, 0.0, -(2**63), 5),
    "1024": ((2, 17), 9, 2, 1024.0, 0, 0),
    "beyond 1024": ((2, 17), 9, 2, 1e5, 0, 0),
    "infinite": ((2, 17), 9, 3, math.inf, 0, 0),
    "1 of 1x40": ((1, 40), 1, 1, 1.0, 3, 4),
    "one patch": ((1, 1), 1, 1, 1.0, 3, 4),
}
# Enough for sizes and order, as the keys are tested by themselves; the interpreter takes 0.1 s a program, of each image
# and group. All images once, and some of them in other sizes.
INTERPRETED = {
    "all of 3x5": slice(0, 8), "5x3, one left over": slice(2, 5), "uniform": slice(4, 6), "1 of 1x40": slice(0, 2),
    "one patch": slice(6, 8),
}  # fmt: skip
BAD_SEED = 2**63


def strided(x):
    """The same tensor with its first dimension innermost in memory."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


def arguments(case):
    grid, keep, groups, power, seed, epoch = case
    b = len(PAIRS)
    flips = torch.tensor([[i // 2 % 2, i % 2] for i in range(b)]).bool()
    sample = torch.tensor([0, 1, -1, 2**32, 2**32 + 1, -(2**63), 2**63 - 1, 12345])
    sizes = {"grid": grid, "keep": keep, "groups": groups, "power": power, "seed": seed, "epoch": epoch}
    return (
        strided(torch.tensor(PAIRS, dtype=torch.int32)),
        strided(flips),
        strided(torch.stack([sample] * 2))[0],
    ), sizes


def interpreted_arguments(name):
    args, sizes = arguments(CASES[name])
    return tuple(x[INTERPRETED[name]] for x in args), sizes


def draw(pair, count, **kwargs):
    """``count`` images with the same two crops, not flipped."""
    boxes = torch.tensor([pair] * count, dtype=torch.int32)
    return kernels.sample_views(boxes, torch.zeros(count, 2).bool(), torch.arange(count), seed=11, epoch=0, **kwargs)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    calls = {name: ("sample_views", *interpreted_arguments(name)) for name in INTERPRETED}
    # A GPU sorts where the interpreter compares all pairs; here the interpreter does it too, once.
    (boxes, flips, sample), k = arguments(CASES["all of 3x5"])
    number = {name: torch.tensor([k[name]]) for name in ("seed", "epoch")}
    k = k | number
    calls["sorted"] = ("sampling._launch", (boxes[4:5], flips[4:5], sample[4:5]), k | {"sort": True})
    images, n = list(keys.images_of(PAIRS)), keys.numbers()
    calls["keys"] = (keys.interpreted, (images, keys.by_reference(images, n)[0], n), {})
    return dict(zip(calls, interpret(list(calls.values()), tmp_path_factory.mktemp("sampling")), strict=True))


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted_kernel_equals_reference(interpreted, name):
    args, kwargs = interpreted_arguments(name)
    for got, want in zip(interpreted[name], reference.sample_views(*args, **kwargs), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_sorting_kernel_equals_reference(interpreted):
    args, kwargs = arguments(CASES["all of 3x5"])
    for got, want in zip(interpreted["sorted"], reference.sample_views(*args, **kwargs), strict=True):
        torch.testing.assert_close(got, want[4:5], rtol=0, atol=0)


@pytest.mark.parametrize("where", ["compiled", "interpreted"])
def test_keys_and_logarithms_are_the_same_to_the_last_bit(where, request):
    images, n = list(keys.images_of(PAIRS)), keys.numbers()
    firsts, want = keys.by_reference(images, n)
    compiled = where == "compiled"
    got = keys.evaluated(images, firsts, n) if compiled else request.getfixturevalue("interpreted")["keys"]
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES.values(), ((32, 64), 512, 4, 3.0, 1, 2)], ids=[*CASES, "32x64"])
def test_device_equals_reference(case):
    args, kwargs = arguments(case)
    args = [x.repeat(40, *[1] * (x.dim() - 1)) for x in args]
    args[2] += torch.arange(len(args[2])) * 977
    want = reference.sample_views(*args, **kwargs)
    for got, w in zip(kernels.sample_views(*(x.cuda() for x in args), **kwargs), want, strict=True):
        torch.testing.assert_close(got.cpu(), w, rtol=0, atol=0)


@pytest.mark.gpu
def test_graph_capture_follows_the_epoch():
    args, kwargs = arguments(CASES["14x14"])
    device = [x.cuda() for x in args]
    epoch = torch.zeros((), dtype=torch.int64, device="cuda")
    kwargs["seed"] = torch.full((), 5, device="cuda")
    kernels.sample_views(*device, **kwargs | {"epoch": epoch})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        views = kernels.sample_views(*device, **kwargs | {"epoch": epoch})
    for number in (3, 2**40):
        epoch.fill_(number)
        graph.replay()
        want = reference.sample_views(*args, **kwargs | {"seed": 5, "epoch": number})
        assert all(torch.equal(got.cpu(), w) for got, w in zip(views, want, strict=True))


def test_draws_depend_on_nothing_but_their_own_image():
    (boxes, flips, sample), kwargs = arguments(CASES["14x14"])
    whole = kernels.sample_views(boxes, flips, sample, **kwargs)
    order = torch.tensor([6, 2, 5])
    for got, want in zip(kernels.sample_views(boxes[order], flips[order], sample[order], **kwargs), whole, strict=True):
        assert torch.equal(got, want[order])
    for got, want in zip(kernels.sample_views(boxes, flips, sample, **kwargs | {"groups": 2}), whole, strict=True):
        assert torch.equal(got, want[:, :2])
    large = [x.repeat(100, *[1] * (x.dim() - 1)) for x in (boxes, flips, sample)]  # more than one chunk
    for got, want in zip(kernels.sample_views(*large, **kwargs), whole, strict=True):
        assert torch.equal(got, want.repeat(100, 1, 1))


def test_keys_are_the_same_on_every_machine_and_in_every_version():
    """A checkpoint goes on, and a seed repeats a run, only if they are: change this with them, never by accident."""
    found = keys.by_reference(list(keys.images_of(PAIRS)), keys.numbers())[1]
    text = b"".join(np.asarray(x, "<i8").tobytes() for x in (reference.log2_table(), *found))
    assert hashlib.sha256(text).hexdigest()[:16] == "0da8af965a076b38"


def test_a_gpu_sorts_and_the_interpreter_compares_pairs_where_it_can():
    args, kwargs = arguments(CASES["14x14"])
    kwargs |= dict.fromkeys(("seed", "epoch"), torch.zeros(1).long())
    for grid, how, sorts in (
        ((14, 14), {}, True),
        ((32, 32), {"sort": False}, False),
        ((5, 205), {"sort": False}, True),
    ):
        with mock.patch.object(sampling, "_sample_kernel") as kernel:
            sampling._launch(*args, **kwargs | {"grid": grid} | how)
        assert kernel.__getitem__.return_value.call_args.kwargs["SORT"] == sorts


def test_of_the_largest_grid_every_patch_is_drawn_once():
    args, kwargs = arguments(((64, 128), 8192, 1, 3.0, 0, 0))
    for view in kernels.sample_views(*args, **kwargs):
        assert torch.equal(view.sort(2).values, torch.arange(8192).int().expand(8, 1, 8192))


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"infinite"}))
def test_keys_of_many_patches_draw_the_same(name, monkeypatch):
    """Two bits fewer for the value, which has none to lose; but for gamma = inf, whose random bits they are."""
    args, kwargs = arguments(CASES[name])
    narrow = reference.sample_views(*args, **kwargs)
    monkeypatch.setattr(reference, "NARROW", 0)
    assert all(map(torch.equal, narrow, reference.sample_views(*args, **kwargs)))


def test_seed_and_epoch_as_numbers_or_tensors():
    args, kwargs = arguments(CASES["14x14"])
    views = kernels.sample_views(*args, **kwargs | {"seed": -3, "epoch": 2**50})
    tensors = {"seed": torch.tensor(-3), "epoch": torch.tensor([2**50])}
    assert all(map(torch.equal, views, kernels.sample_views(*args, **kwargs | tensors)))
    for change in ({"seed": -4}, {"epoch": 2**50 + 1}, {"seed": 2**50, "epoch": -3}):
        assert not any(
            map(torch.equal, views, kernels.sample_views(*args, **kwargs | {"seed": -3, "epoch": 2**50} | change))
        )


def test_first_view_is_cut_from_a_uniform_permutation():
    count = 40_000
    first, _ = draw(PAIRS[4], count, grid=(2, 3), keep=2, groups=3, power=3.0)
    order = first.flatten(1).long()
    assert torch.equal(order.sort(1).values, torch.arange(6).expand(count, 6))
    # Each of the 720 permutations has probability 1/720: chi^2 with 719 degrees of freedom has a standard deviation of
    # 37.9. Beyond 5 of them (908) a correct sampler falls for one seed in 400,000 (Wilson-Hilferty).
    number = (order * 6 ** torch.arange(6)).sum(1).unique(return_counts=True)[1].double()
    assert len(number) == 720
    assert ((number - count / 720) ** 2 / (count / 720)).sum() < 719 + 5 * math.sqrt(2 * 719)


@pytest.mark.parametrize("power", [0.0, 0.5, 3.0])
def test_second_view_is_successive_sampling(power):
    """Ordered pairs (i, j) come with probability w_i/W * w_j/(W - w_i), w = (1 - r)**gamma (Eq. 4)."""
    count, n = 60_000, 6
    pair = [[0, 0, 60, 90], [10, 25, 40, 80]]
    kwargs = {"grid": (2, 3), "keep": 2, "groups": 2, "power": power}
    first, second = draw(pair, count, **kwargs)
    boxes = torch.tensor([pair] * count, dtype=torch.int32)
    r = kernels.patch_overlap(boxes, torch.zeros(count, 2).bool(), first, grid=(2, 3)).double()
    w = ((1 - r) ** power).view(-1, n)
    total = w.sum(1)[:, None, None]
    p = (w[:, :, None] / total * w[:, None, :] / (total - w[:, :, None])) * (1 - torch.eye(n))
    torch.testing.assert_close(p.sum((1, 2)), torch.ones(2 * count, dtype=torch.float64))
    seen = torch.bincount(second.view(-1, 2).long() @ torch.tensor([n, 1]), minlength=n * n).view(n, n)
    z = (seen - p.sum(0)) / (p * (1 - p)).sum(0).clamp(min=1e-9).sqrt()
    # 30 normal deviates: one beyond 5 standard deviations is false alarm for one seed in 58,000.
    assert z.abs().max() < 5, z
    # The groups of an image are drawn apart: equal first choices are as frequent as for independent draws.
    q = (w / w.sum(1, keepdim=True)).view(count, 2, n).prod(1).sum(1)
    same = (second[:, 0, 0] == second[:, 1, 0]).sum()
    assert abs(same - q.sum()) < 5 * (q * (1 - q)).sum().sqrt()


@pytest.mark.parametrize("power", [0.0, 0.5, 3.0, 1024.0, 1e5])
def test_order_is_that_of_the_formula(power):
    """All 1,369 patches of a 518-pixel crop by keys in long double; two closer than their stated error are a tie."""
    (boxes, flips, sample), kwargs = arguments(((37, 37), 1369, 1, power, -3, 2**50))
    first, second = (x[:, 0].long().numpy() for x in kernels.sample_views(boxes, flips, sample, **kwargs))
    counter = np.arange(1369), 0, *split64(sample.numpy()[:, None])
    word0, word1, _, low = philox(counter, stream_key(-3, 2**50, Purpose.PATCHES))
    m1, m2 = word0 << 10 | low & 1023, word1 << 10 | low >> 10 & 1023
    assert (np.diff(np.take_along_axis(m1, first, 1)) > 0).all()
    covered = reference.covered_area(boxes.numpy(), flips.numpy(), first[:, None], (37, 37))
    v = (reference.patch_area(boxes.numpy()) - covered)[:, 0] if power else np.ones_like(m2)
    v, m = (np.take_along_axis(x, second, 1) for x in (v, m2))
    exponential = -np.log1p((m + np.longdouble(0.5)) / 2**42 - 1) / np.log(np.longdouble(2))
    key = np.log2(exponential) - power * np.log2(np.maximum(v, 1).astype(np.longdouble))
    error = (1 + power) * 2.0**-32 + (2.0**-27 + 2.0**-42 / exponential) / math.log(2)
    before, after = v[:, :-1] > 0, v[:, 1:] > 0
    assert (before >= after).all() and (power == 0 or not after.all())
    assert ((np.diff(key) > -error[:, 1:] - error[:, :-1]) | ~after).all()
    assert ((np.diff(m) > 0) | before).all()


@pytest.mark.parametrize("power", [0.0, 1.0, 3.0])
def test_mean_overlap_of_uniform_shares(power, monkeypatch):
    """Eq. 7: of r uniform in [0, 1] those selected have the density (gamma + 1)(1 - r)**gamma, mean 1/(gamma + 2)."""
    share = (torch.randperm(256, generator=torch.Generator().manual_seed(0)).double() + 0.5) / 256
    covered = (share * 60_000**2).long().numpy()
    monkeypatch.setattr(reference, "covered_area", lambda boxes, flips, first, grid: covered)
    _, second = draw([[0, 0, 60_000, 60_000]] * 2, 500, grid=(16, 16), keep=1, groups=16, power=power)
    mean, variance = 1 / (power + 2), (power + 1) / ((power + 2) ** 2 * (power + 3))
    # 8,000 draws; 256 steps instead of a density shift the mean by 2e-5. Beyond 5 deviations: one seed in 1,700,000.
    assert abs(share[second.long()].mean() - mean) < 5 * math.sqrt(variance / 8000)


# Mean share of a selected view-2 patch that view 1 shows, for random resized crops of 375x500 pixels, 1/4 of 14x14.
MEASURED = {0.0: 0.144, 1.0: 0.073, 2.0: 0.048, 3.0: 0.034, 5.0: 0.020}


def test_mean_overlap_of_real_crops_falls_with_gamma():
    count = 1000
    crops = stream.Augmentation().draw(np.tile((375, 500), (count, 1)), np.arange(count), seed=0, epoch=0)
    boxes, flips, means = torch.from_numpy(crops.boxes), torch.from_numpy(crops.flips), []
    for power, expected in MEASURED.items():
        sizes = {"grid": (14, 14), "keep": 49, "groups": 4, "power": power, "seed": 0, "epoch": 0}
        first, second = kernels.sample_views(boxes, flips, torch.arange(count), **sizes)
        share = kernels.patch_overlap(boxes, flips, first, grid=(14, 14)).gather(2, second.long()).mean((1, 2))
        means.append(share.mean())
        # MEASURED has 4,000 images, these are among them, and is rounded to a thousandth.
        assert abs(means[-1] - expected) < 5 * share.std() / math.sqrt(count) + 0.0005, (power, means[-1])
    assert means == sorted(means, reverse=True)


def test_covered_patches_come_last_in_uniform_order():
    count = 12_000
    first, second = draw(PAIRS[7], count, grid=(2, 3), keep=5, groups=1, power=0.5)  # the same pixel: 5 of 6 covered
    left_over = 15 - first.sum(2)
    assert torch.equal(second[:, :, 0], left_over)
    # The place of the first of the four others among the five covered ones, 0..4, in ascending order: one fifth each.
    place = (first < second[:, :, 1:2]).sum(2).flatten()
    expected = count / 5
    chi2 = ((torch.bincount(place, minlength=5) - expected) ** 2 / expected).sum()
    assert chi2 < 31.5  # 4 degrees of freedom: one seed in 400,000


def test_steep_weights_choose_the_least_covered_in_order():
    """With gamma = 1024 a patch of 1.5 times the uncovered area wins all but once in 2**599 draws."""
    pair = [[0, 0, 10, 10], [0, 0, 10, 1000]]
    _, second = draw(pair, 50, grid=(1, 4), keep=4, groups=1, power=1024.0)
    # Only the leftmost patch of view 2 is covered, by 10 of its 250 columns: it loses against the others, 1.04 : 1.
    assert (second[:, 0, 3] == 0).all()
    assert len(second[:, 0, 0].unique()) == 3


def test_infinite_gamma_chooses_the_least_covered():
    (boxes, flips, sample), kwargs = arguments(((14, 14), 49, 4, math.inf, 5, 6))
    first, second = kernels.sample_views(boxes, flips, sample, **kwargs)
    covered = torch.from_numpy(reference.covered_area(boxes.numpy(), flips.numpy(), first.numpy(), (14, 14)))
    assert torch.equal(covered.gather(2, second.long()), covered.sort(2).values[:, :, :49])
    # Crops apart: all patches are equal, and each of the 24 orders of 4 comes as often, as chi^2 with 23 degrees of
    # freedom says: beyond 73 one seed in 2,500,000.
    count = 24_000
    _, second = draw(PAIRS[3], count, grid=(2, 2), keep=4, groups=1, power=math.inf)
    number = (second.flatten(1) * 4 ** torch.arange(4)).sum(1).unique(return_counts=True)[1].double()
    assert len(number) == 24
    assert ((number - count / 24) ** 2 / (count / 24)).sum() < 73


def test_logarithm():
    table, rng = reference.log2_table(), np.random.default_rng(0)
    bits = rng.integers(0, 53, 100_000)
    powers = 1 << np.arange(53)
    n = np.concatenate([(1 << bits) + rng.integers(0, 1 << bits), powers, powers[2:] - 1, powers[1:] + 1])
    exact = np.log2(n.astype(np.longdouble))
    error = np.abs(reference.log2_fixed(n, table) / np.longdouble(2**44) - exact).max()
    assert error < 2.0**-38, float(error)


def test_exponential_keeps_its_precision_for_u_near_one():
    x = np.unique(np.logspace(0, 42, 20_000, base=2).astype(np.int64)) | 1  # u = 1 - x/2**43
    exact = -np.log1p(-x.astype(np.longdouble) / 2**43) / np.log(np.longdouble(2))
    got = (reference.LOG_TOP - reference.log2_fixed(2**43 - x, reference.log2_table())) / np.longdouble(2**44)
    excess = np.abs(got - exact) / (np.longdouble(2.0**-42) + exact * 2.0**-27)
    assert got.min() > 0 and excess.max() < 1, float(excess.max())


def test_extreme_words_stay_within_their_bits():
    """The values of the first and last u, the smallest and largest area, and gammas about every change of format."""
    table = reference.log2_table()
    for m, v, power in itertools.product((0, 2**42 - 1), (1, 65535**2), (0, 1024, 1025, 2048, 2**30 - 16, 2**30)):
        factor, shift = reference.fixed_power(power)
        exponential = reference.LOG_TOP - reference.log2_fixed(np.array([2 * m + 1]), table)
        race = int((reference.log2_fixed(exponential, table) >> 12 + shift)[0]) + reference.KEY_OFFSET
        weight = int((reference.log2_fixed(np.array([v]), table) >> 12)[0])
        assert weight * factor < 2**63 and factor * 2.0**shift == power * 2.0**16
        assert 0 <= race - (weight * factor >> 16) < reference.ZERO_WEIGHT >> reference.WIDE_PATCH_BITS
    assert reference.fixed_power(2.0**30 + 1) == reference.fixed_power(math.inf) == reference.STEEPEST


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"boxes": torch.zeros(8, 2, 4)}, TypeError, "boxes.*int32.*float32"),
        ({"boxes": torch.ones(8, 4, dtype=torch.int32)}, ValueError, r"boxes.*\[any, 2, 4\].*\[8, 4\]"),
        ({"boxes": torch.zeros(8, 2, 4, dtype=torch.int32)}, ValueError, "boxes.*65535"),
        ({"boxes": torch.full((8, 2, 4), 65536, dtype=torch.int32)}, ValueError, "boxes.*65535"),
        ({"boxes": torch.tensor([-1, 0, 1, 1]).int().expand(8, 2, 4)}, ValueError, "boxes.*65535"),
        ({"boxes": torch.tensor([1, 1, 0, 1]).int().expand(8, 2, 4)}, ValueError, "boxes.*1 <= h"),
        ({"boxes": torch.tensor([1, 1, 1, 0]).int().expand(8, 2, 4)}, ValueError, "boxes.*1 <= h"),
        ({"flips": torch.zeros(8, 2, dtype=torch.int32)}, TypeError, "flips.*bool"),
        ({"flips": torch.zeros(7, 2).bool()}, ValueError, r"flips.*\[8, 2\]"),
        ({"flips": torch.zeros(8, 2, device="meta").bool()}, ValueError, "flips.*cpu.*meta"),
        ({"sample": torch.zeros(8, dtype=torch.int32)}, TypeError, "sample.*int64"),
        ({"sample": list(range(8))}, TypeError, "sample.*list"),
        ({"sample": torch.zeros(8, dtype=torch.int64, device="meta")}, ValueError, "sample.*cpu.*meta"),
        ({"grid": (91, 91)}, ValueError, "grid.*8192"),
        ({"grid": (14, 14, 1)}, ValueError, "grid.*rows, columns"),
        ({"groups": 5}, ValueError, "groups \\* keep <= 196.*14x14.*groups 5"),
        ({"keep": 0}, ValueError, "keep.*at least 1"),
        ({"keep": 0.25}, TypeError, "keep.*integers"),
        ({"groups": 2.0}, TypeError, "groups.*integers"),
        ({"power": -1.0}, ValueError, "power.*0 or more.*-1"),
        ({"power": math.nan}, ValueError, "power.*nan"),
        ({"seed": BAD_SEED}, ValueError, "seed.*64-bit"),
        ({"epoch": -BAD_SEED - 1}, ValueError, "epoch.*64-bit"),
        ({"epoch": 1.5}, TypeError, "epoch.*int64"),
        ({"epoch": torch.zeros(1, dtype=torch.int64, device="meta")}, ValueError, "epoch.*cpu.*meta"),
        ({"epoch": torch.zeros(2, dtype=torch.int64)}, ValueError, "epoch"),
    ],
)
def test_errors_name_what_was_expected(change, error, words):
    (boxes, flips, sample), kwargs = arguments(CASES["14x14"])
    args = {"boxes": boxes, "flips": flips, "sample": sample}
    with pytest.raises(error, match=words):
        kernels.sample_views(**args | kwargs | change)


def test_operator_contract():
    args, k = arguments(CASES["14x14"])
    numbers = torch.tensor([1]), torch.tensor([2])
    torch.library.opcheck(torch.ops.aps.sample_views.default, (*args, *numbers, [14, 14], 49, 4, 3.0))
    compiled = torch.compile(kernels.sample_views, fullgraph=True, backend="aot_eager")
    for change in ({}, {"epoch": torch.tensor([7])}):
        assert all(map(torch.equal, compiled(*args, **k | change), kernels.sample_views(*args, **k | change)))
    empty = kernels.sample_views(*(x[:0] for x in args), **k)
    assert [list(x.shape) for x in empty] == [[0, 4, 49]] * 2
