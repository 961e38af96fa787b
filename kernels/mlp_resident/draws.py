"""Directions in Numba loops: the same draws as `directions`."""

from __future__ import annotations

import math

import numpy as np

from .. import simd
from ..compile import jit
from ..philox.numba import philox4x32
from ..philox.reference import PURPOSE_BATCH, PURPOSE_PERTURBATION, pack_draw
from .contract import (
    BASIS_ROUNDS,
    GAUSSIAN,
    HADAMARD,
    LAYER_ALL,
    LAYER_BASIS,
    LAYER_BODY,
    LAYER_DENSITY,
    LAYER_NORMAL,
    SPARSE,
)

_LANES = simd.LANES
DRAW_BATCH = np.uint32(pack_draw(PURPOSE_BATCH))
DRAW_BODY = np.uint32(pack_draw(PURPOSE_PERTURBATION, LAYER_BODY))
DRAW_ALL = np.uint32(pack_draw(PURPOSE_PERTURBATION, LAYER_ALL))
DRAW_DENSITY = np.uint32(pack_draw(PURPOSE_PERTURBATION, LAYER_DENSITY))
DRAW_NORMAL = np.uint32(pack_draw(PURPOSE_PERTURBATION, LAYER_NORMAL))
DRAW_BASIS = np.uint32(pack_draw(PURPOSE_PERTURBATION, LAYER_BASIS))


@jit
def draw_words(out, count, draw, step, expert, key_0, key_1):
    """out[:count] uniform words; up to three more are written."""
    for block in range((count + 3) // 4):
        a, b, c, d = philox4x32(np.uint32(block), draw, step, expert, key_0, key_1)
        out[4 * block] = a
        out[4 * block + 1] = b
        out[4 * block + 2] = c
        out[4 * block + 3] = d


@jit
def draw_normals(out, count, draw, step, expert, key_0, key_1):
    """out[:count] standard normal floats; see `philox.reference.normals`."""
    words = np.empty(4, np.uint32)
    draws = 0
    block = 0
    while draws < count:
        words[0], words[1], words[2], words[3] = philox4x32(np.uint32(block), draw, step, expert, key_0, key_1)
        for pair in range(2):
            radius = math.sqrt(-2.0 * math.log((words[2 * pair] + 1.0) / 4294967296.0))
            angle = 2.0 * math.pi * words[2 * pair + 1] / 4294967296.0
            if draws < count:
                out[draws] = np.float32(radius * math.cos(angle))
            if draws + 1 < count:
                out[draws + 1] = np.float32(radius * math.sin(angle))
            draws += 2
        block += 1


@jit
def fill_signs(signs, spare, basis, batch, sign_words, pairs, lanes, directions, step, expert, key_0, key_1):
    """signs[block, example, word, lane]: the 32 signs of probe lanes * block + lane; with 8 lanes the other eight
    hold their complement, the minus end of the pair."""
    words = batch * sign_words
    block_stride = words * _LANES
    if directions == HADAMARD:
        draw_words(spare, words, DRAW_BODY, step, expert, key_0, key_1)
    for j in range(pairs):
        if directions != HADAMARD:
            draw_words(spare, words, np.uint32(DRAW_BODY + np.uint32(j)), step, expert, key_0, key_1)
        base = (j // lanes) * block_stride + j % lanes
        for m in range(words):
            word = spare[m]
            if directions == HADAMARD:
                word = word ^ basis[j * sign_words + m % sign_words]
            signs[base + m * _LANES] = word
            if lanes < _LANES:
                signs[base + m * _LANES + lanes] = ~word


@jit
def hadamard_word(row, word):
    """Bits of 32 entries of a row of the Sylvester Hadamard matrix: bit i set where popcount(row & column) is odd."""
    bits = np.uint32(0)
    for i in range(32):
        common = row & (32 * word + i)
        parity = 0
        while common:
            parity ^= common & 1
            common >>= 1
        bits |= np.uint32(parity) << np.uint32(i)
    return bits


@jit
def flat_direction(z, mask, directions, density, words, probe, step, expert, key_0, key_1):
    """z [T]: SIGNS, SPARSE or GAUSSIAN entries where the mask is 1, zeros elsewhere."""
    size = z.size
    offset = np.uint32(probe)
    if directions == GAUSSIAN:
        draw_normals(z, size, np.uint32(DRAW_NORMAL + offset), step, expert, key_0, key_1)
        for i in range(0, size, _LANES):
            simd.store(z, i, simd.mul(simd.load(z, i), simd.load(mask, i)))
        return
    draw_words(words, (size + 31) // 32, np.uint32(DRAW_ALL + offset), step, expert, key_0, key_1)
    for i in range(0, size, _LANES):
        bits = np.uint16(words[i // 32] >> np.uint32(i % 32))
        simd.store(z, i, simd.signed_by_bits(simd.load(mask, i), bits))
    if directions == SPARSE:
        limit = np.uint64(round(density * 4294967296.0))
        draw_words(words, size, np.uint32(DRAW_DENSITY + offset), step, expert, key_0, key_1)
        for i in range(size):
            if np.uint64(words[i]) >= limit:
                z[i] = 0


@jit
def input_basis(x, rows, stride, width, rank, layer, product, basis, step, expert, key_0, key_1):
    """basis [width, rank]: see `directions.input_basis`; x [rows, stride], of which `width` columns count."""
    draw_normals(basis, width * rank, np.uint32(DRAW_BASIS + np.uint32(layer)), step, expert, key_0, key_1)
    for _ in range(BASIS_ROUNDS):
        for b in range(rows):
            for r in range(rank):
                total = np.float32(0)
                for f in range(width):
                    total += x[b * stride + f] * basis[f * rank + r]
                product[b * rank + r] = total
        basis[: width * rank] = 0
        for b in range(rows):
            for f in range(width):
                for r in range(rank):
                    basis[f * rank + r] += x[b * stride + f] * product[b * rank + r]
        for r in range(rank):
            before = np.float32(0)
            for f in range(width):
                before += basis[f * rank + r] ** 2
            before = np.sqrt(before)
            for _ in range(2):
                for q in range(r):
                    along = np.float32(0)
                    for f in range(width):
                        along += basis[f * rank + q] * basis[f * rank + r]
                    for f in range(width):
                        basis[f * rank + r] -= along * basis[f * rank + q]
            length = np.float32(0)
            for f in range(width):
                length += basis[f * rank + r] ** 2
            length = np.sqrt(length)
            kept = length > np.float32(1e-4) * before and before > 0
            for f in range(width):
                basis[f * rank + r] = basis[f * rank + r] / length if kept else np.float32(0)
