"""Philox4x32-10 in NumPy, and the one place that says how a draw is addressed.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

A draw is named, never sequenced. The key is the run seed (64 bits); the counter's four words are

    word 0  block: which 128 sign bits, or which four words, inside one draw
    word 1  purpose << 24 | layer << 16 | perturbation      (8, 8 and 16 bits)
    word 2  step
    word 3  expert id, or `WHOLE_RUN` for draws that belong to no expert

The packing is injective, so no two draws share a counter.
"""

from __future__ import annotations

import numpy as np

MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
ROUNDS = 10

WHOLE_RUN = 0xFFFFFFFF

PURPOSE_INIT = 1
PURPOSE_BATCH = 2
PURPOSE_PERTURBATION = 3
PURPOSE_ROUTER = 4
PURPOSE_BOOTSTRAP = 5
PURPOSE_SAMPLE = 6
PURPOSE_ROUNDING = 7
PURPOSE_DROPOUT = 8

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def split_seed(seed: int) -> tuple[int, int]:
    """The two key words (low, high) of a 64-bit run seed; ValueError outside 0 .. 2**64 - 1."""
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed={seed}: must be between 0 and 2**64 - 1")
    return seed & 0xFFFFFFFF, seed >> 32


def pack_draw(purpose: int, layer: int = 0, perturbation: int = 0) -> int:
    """Counter word 1 of a draw; ValueError when a field does not fit its bits."""
    for name, value, bits in (("purpose", purpose, 8), ("layer", layer, 8), ("perturbation", perturbation, 16)):
        if not 0 <= value < 1 << bits:
            raise ValueError(f"{name}={value}: must fit {bits} bits")
    return purpose << 24 | layer << 16 | perturbation


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Ten rounds of Philox4x32.

    Args:
        counter: uint32 [..., 4].
        key: two 32-bit words (low, high).

    Returns:
        uint32 [..., 4], uniform words.
    """
    word_0, word_1, word_2, word_3 = (counter[..., i].astype(np.uint64) for i in range(4))
    key_0, key_1 = key
    for _ in range(ROUNDS):
        product_0 = word_0 * np.uint64(MULTIPLIER_0)
        product_1 = word_2 * np.uint64(MULTIPLIER_1)
        word_0 = (product_1 >> _SHIFT) ^ word_1 ^ np.uint64(key_0)
        word_1 = product_1 & _LOW
        word_2 = (product_0 >> _SHIFT) ^ word_3 ^ np.uint64(key_1)
        word_3 = product_0 & _LOW
        key_0 = (key_0 + WEYL_0) & 0xFFFFFFFF
        key_1 = (key_1 + WEYL_1) & 0xFFFFFFFF
    return np.stack([word_0, word_1, word_2, word_3], axis=-1).astype(np.uint32)


def words(seed: int, draw: int, step: int, expert: int, count: int) -> np.ndarray:
    """The first `count` uniform words of a draw: uint32 [count].

    Args:
        seed: run seed, 64 bits.
        draw: counter word 1, from `pack_draw`.
        step: counter word 2.
        expert: counter word 3.
        count: how many words; four to a block.
    """
    num_blocks = -(-count // 4)
    counter = np.empty((num_blocks, 4), np.uint32)
    counter[:, 0] = np.arange(num_blocks, dtype=np.uint32)
    counter[:, 1] = draw
    counter[:, 2] = step
    counter[:, 3] = expert
    return philox4x32(counter, split_seed(seed)).reshape(-1)[:count]


def signs(seed: int, draw: int, step: int, expert: int, count: int) -> np.ndarray:
    """The first `count` Rademacher signs of a draw: int8 [count] of +1 and -1.

    Sign i is bit i % 32 of word i // 32 (bit set: +1), so a block yields 128.
    """
    drawn = words(seed, draw, step, expert, -(-count // 32))
    bits = (drawn[:, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    return (2 * bits.astype(np.int8) - 1).reshape(-1)[:count]


def uniform_ints(seed: int, draw: int, step: int, expert: int, count: int, bound: int) -> np.ndarray:
    """`count` integers in [0, bound), int64 [count]: the high half of word * bound (Lemire 2019, without rejection).

    The bias is below bound / 2**32.
    """
    drawn = words(seed, draw, step, expert, count).astype(np.uint64)
    return ((drawn * np.uint64(bound)) >> _SHIFT).astype(np.int64)


def uniform_floats(seed: int, draw: int, step: int, expert: int, count: int) -> np.ndarray:
    """`count` floats in [-1, 1), float32 [count], on a grid of 2**-23, so that every backend agrees."""
    drawn = words(seed, draw, step, expert, count)
    return (drawn >> np.uint32(8)).astype(np.float32) * np.float32(2**-23) - np.float32(1)


def normals(seed: int, draw: int, step: int, expert: int, count: int) -> np.ndarray:
    """`count` standard normal floats, float32 [count], by Box and Muller (1958) in float64 from pairs of words.

    Words 2 i and 2 i + 1 give normals 2 i (cosine) and 2 i + 1 (sine).
    """
    drawn = words(seed, draw, step, expert, count + count % 2).astype(np.float64).reshape(-1, 2)
    radius = np.sqrt(-2 * np.log((drawn[:, 0] + 1) / 2**32))
    angle = 2 * np.pi * drawn[:, 1] / 2**32
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return pairs.astype(np.float32).reshape(-1)[:count]
