"""Philox4x32-10: random bits as a function of a key and a counter, so that any thread can make any of them at any time.

A counter of four 32-bit words goes through ten rounds; each multiplies two words by constants, and mixes the high
halves of the products with the other two words and the key::

    (hi0, lo0) = M0 * c0        c0' = hi1 ^ c1 ^ k0        k0' = k0 + W0
    (hi1, lo1) = M1 * c2        c1' = lo1                  k1' = k1 + W1
                                c2' = hi0 ^ c3 ^ k1
                                c3' = lo0

Source: Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"; the Random123 library's test
vectors are in the tests.
"""

import numpy as np
from numba import cuda, uint32, uint64

M0 = 0xD2511F53
M1 = 0xCD9E8D57
W0 = 0x9E3779B9
W1 = 0xBB67AE85
ROUNDS = 10
LOW = 0xFFFFFFFF


def reference(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit words, in Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = M0 * c0, M1 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & LOW,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & LOW,
        )
        k0, k1 = (k0 + W0) & LOW, (k1 + W1) & LOW
    return c0, c1, c2, c3


def reference_words(counters_N: np.ndarray, key: int) -> np.ndarray:
    """Words of many counters at once: shape (N, 4), uint32, for 64-bit counters and a 64-bit key."""
    counters = np.asarray(counters_N, np.uint64)
    low, shift = np.uint64(LOW), np.uint64(32)
    c0, c1 = counters & low, counters >> shift
    c2 = c3 = np.zeros_like(counters)
    k0, k1 = key & LOW, key >> 32
    for _ in range(ROUNDS):
        product0, product1 = np.uint64(M0) * c0, np.uint64(M1) * c2
        c0, c1, c2, c3 = (
            (product1 >> shift) ^ c1 ^ np.uint64(k0),
            product1 & low,
            (product0 >> shift) ^ c3 ^ np.uint64(k1),
            product0 & low,
        )
        k0, k1 = (k0 + W0) & LOW, (k1 + W1) & LOW
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def round_keys(key: int) -> list[np.uint32]:
    """Both words of the key of each round in turn, of a 64-bit key."""
    k0, k1 = key & LOW, key >> 32
    return [np.uint32(word & LOW) for i in range(ROUNDS) for word in (k0 + i * W0, k1 + i * W1)]


@cuda.jit(device=True)
def philox4x32_of_round_keys(c0, c1, keys):
    """The same words from ``round_keys``, for counters whose upper half is 0.

    A GPU multiplies and mixes with the keys where they are, among a launch's arguments; adding them up costs a quarter
    of all instructions.
    """
    c2 = uint32(0)
    c3 = uint32(0)
    for i in range(ROUNDS):
        product0 = uint64(M0) * uint64(c0)
        product1 = uint64(M1) * uint64(c2)
        c0 = uint32(uint32(product1 >> uint64(32)) ^ c1 ^ keys[2 * i])
        c1 = uint32(product1)
        c2 = uint32(uint32(product0 >> uint64(32)) ^ c3 ^ keys[2 * i + 1])
        c3 = uint32(product0)
    return c0, c1, c2, c3


@cuda.jit(device=True)
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Four random words of a counter and a key; all of them uint32.

    Every cast is written out: numba makes int64, or even float64, of mixed integer types.
    """
    for _ in range(ROUNDS):
        product0 = uint64(M0) * uint64(c0)
        product1 = uint64(M1) * uint64(c2)
        c0 = uint32(uint32(product1 >> uint64(32)) ^ c1 ^ k0)
        c1 = uint32(product1)
        c2 = uint32(uint32(product0 >> uint64(32)) ^ c3 ^ k1)
        c3 = uint32(product0)
        k0 = uint32(uint64(k0) + uint64(W0))
        k1 = uint32(uint64(k1) + uint64(W1))
    return c0, c1, c2, c3
