"""Philox-4x32-10, the one source of randomness of the program.

Salmon et al., SC 2011, "Parallel random numbers: as easy as 1, 2, 3". A draw is a function of (seed, epoch, purpose,
sample id, position) and of nothing else: no generator has a state that would have to be saved, and no draw depends on
batch size, ranks, threads or on what was drawn before. The same lines run on numpy int64 arrays (the data stream, the
CPU path of the sampler), on torch int64 tensors and, as ``tl.philox``, in the Triton kernels; a test holds the three
together and to the published vectors.
"""

import enum

_MASK = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85


class Purpose(enum.IntEnum):
    """What a draw is for; every purpose has a key of its own, so draws for different purposes are independent."""

    ORDER = 0
    BOX = 1
    COLOUR = 2
    REPLACEMENT = 3
    PATCHES = 4
    LABELLED = 5
    WINDOW = 6


def philox(counter, key):
    """Ten rounds of Philox-4x32.

    ``counter``: four, ``key``: two int64 arrays, tensors or ints, broadcastable, values in [0, 2**32). Returns four of
    the same kind with uniform values in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # A product needs 64 bits. int64 holds the right bit pattern (it wraps), and the mask drops the sign extension
        # along with the high words of c1 and c3, which stay whole products. In place, a tenth is saved.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (p1 >> 32) ^ c1, (p0 >> 32) ^ c3
        c0 ^= k0
        c2 ^= k1
        c0 &= _MASK
        c2 &= _MASK
        c1, c3 = p1, p0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def split64(value):
    """Low and high 32 bits, each in [0, 2**32), of 64-bit integers (ints, arrays, tensors; two's complement)."""
    return value & _MASK, (value >> 32) & _MASK


def stream_key(seed, epoch, purpose):
    """The Philox key (two words) of one purpose in one epoch of one seed; ``seed`` and ``epoch`` any 64-bit integers.

    Hashing instead of packing leaves all 128 bits of the counter to the draw itself.
    """
    words = philox((*split64(epoch), int(purpose), 0), split64(seed))
    return words[0], words[1]
