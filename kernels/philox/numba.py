"""Philox4x32-10 for Numba loops: the same words as `reference`."""

from __future__ import annotations

import numpy as np

from ..compile import jit_inline
from .reference import MULTIPLIER_0, MULTIPLIER_1, ROUNDS, WEYL_0, WEYL_1

_M0 = np.uint64(MULTIPLIER_0)
_M1 = np.uint64(MULTIPLIER_1)
_W0 = np.uint32(WEYL_0)
_W1 = np.uint32(WEYL_1)
_SHIFT = np.uint64(32)


@jit_inline
def philox4x32(word_0, word_1, word_2, word_3, key_0, key_1):
    """Ten rounds on one counter; all arguments and the four results are uint32."""
    for _ in range(ROUNDS):
        product_0 = _M0 * np.uint64(word_0)
        product_1 = _M1 * np.uint64(word_2)
        word_0 = np.uint32(np.uint32(product_1 >> _SHIFT) ^ word_1 ^ key_0)
        word_1 = np.uint32(product_1)
        word_2 = np.uint32(np.uint32(product_0 >> _SHIFT) ^ word_3 ^ key_1)
        word_3 = np.uint32(product_0)
        key_0 = np.uint32(key_0 + _W0)
        key_1 = np.uint32(key_1 + _W1)
    return word_0, word_1, word_2, word_3
