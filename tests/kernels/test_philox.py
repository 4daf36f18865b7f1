"""``tl.philox`` is held to these functions by test_sampling.py: every draw of the kernel there equals the CPU's."""

import numpy as np
import pytest
import torch

from kernels.philox import Purpose, philox, split64, stream_key

ONES = 0xFFFFFFFF
# From the authors' own list of known answers (Random123, kat_vectors, philox4x32 10).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("make", [lambda x: np.array([x]), torch.tensor, int], ids=["numpy", "torch", "int"])
@pytest.mark.parametrize(("counter", "key", "words"), KNOWN, ids=["zeros", "ones", "pi"])
def test_published_vectors(make, counter, key, words):
    result = philox([make(c) for c in counter], [make(k) for k in key])
    assert tuple(int(np.asarray(word).item()) for word in result) == words


def test_negative_and_large_numbers_split_as_two_complement():
    assert split64(-1) == (ONES, ONES)
    assert split64(-(2**63)) == (0, 2**31)
    for value in (-5, 2**40 + 3, -(2**63), 2**63 - 1):
        words = [int(word) for word in split64(torch.tensor(value))]
        assert words == list(split64(value)) == [int(word) for word in split64(np.int64(value))]
        assert words[0] | words[1] << 32 == value % 2**64


def test_a_seed_means_the_same_in_every_version():
    """What a checkpoint or a published seed stands for: the key of each purpose, from words of known place."""
    for number, name in enumerate(("ORDER", "BOX", "COLOUR", "REPLACEMENT", "PATCHES", "LABELLED", "WINDOW")):
        assert stream_key(2**40 + 3, -5, Purpose[name]) == philox((2**32 - 5, ONES, number, 0), (3, 2**8))[:2]


def test_streams_have_keys_of_their_own():
    numbers = -1, 0, 1, 2**32, -(2**63)
    keys = {stream_key(seed, epoch, purpose) for seed in numbers for epoch in numbers for purpose in Purpose}
    assert len(keys) == len(numbers) ** 2 * len(Purpose)
    tensors = stream_key(torch.tensor(-1), torch.tensor(2**32), Purpose.BOX)
    assert tuple(int(word) for word in tensors) == stream_key(-1, 2**32, Purpose.BOX)
