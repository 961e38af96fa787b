"""Optimiser steps on packed weights, for Numba loops."""

from __future__ import annotations

import numpy as np

from .. import simd
from ..compile import jit
from ..philox.numba import philox4x32
from ..philox.reference import PURPOSE_ROUNDING, pack_draw
from .contract import MOMENTUM, SGD

_LANES = simd.LANES
_DRAW_ROUNDING = np.uint32(pack_draw(PURPOSE_ROUNDING))


@jit
def update(theta, gradient, first, second, start, size, optimizer, rate, beta1, beta2, epsilon, step):
    """One optimiser step on theta[start : start + size]; Adam with bias correction (Kingma and Ba 2015)."""
    minus_rate = simd.splat(np.float32(-rate))
    if optimizer == SGD:
        for i in range(start, start + size, _LANES):
            simd.store(theta, i, simd.fma(minus_rate, simd.load(gradient, i), simd.load(theta, i)))
        return
    decay1 = simd.splat(np.float32(beta1))
    if optimizer == MOMENTUM:
        for i in range(start, start + size, _LANES):
            moment = simd.fma(decay1, simd.load(first, i), simd.load(gradient, i))
            simd.store(first, i, moment)
            simd.store(theta, i, simd.fma(minus_rate, moment, simd.load(theta, i)))
        return
    decay2 = simd.splat(np.float32(beta2))
    rest1 = simd.splat(np.float32(1.0 - beta1))
    rest2 = simd.splat(np.float32(1.0 - beta2))
    scale = simd.splat(np.float32(-rate / (1.0 - beta1 ** (step + 1))))
    unbias = simd.splat(np.float32(1.0 / np.sqrt(1.0 - beta2 ** (step + 1))))
    floor = simd.splat(np.float32(epsilon))
    for i in range(start, start + size, _LANES):
        g = simd.load(gradient, i)
        moment = simd.fma(decay1, simd.load(first, i), simd.mul(rest1, g))
        square = simd.fma(decay2, simd.load(second, i), simd.mul(rest2, simd.mul(g, g)))
        simd.store(first, i, moment)
        simd.store(second, i, square)
        step_size = simd.div(moment, simd.fma(simd.sqrt(square), unbias, floor))
        simd.store(theta, i, simd.fma(scale, step_size, simd.load(theta, i)))


@jit
def clip(gradient, start, size, clip_norm):
    """Scale the gradient down to `clip_norm` where its norm is larger; a norm that overflows counts as infinite."""
    total = simd.splat(np.float32(0))
    for i in range(start, start + size, _LANES):
        total = simd.fma(simd.load(gradient, i), simd.load(gradient, i), total)
    norm = np.sqrt(simd.sum_lanes(total))
    if norm > clip_norm:
        scale = simd.splat(np.float32(clip_norm) / norm)
        for i in range(start, start + size, _LANES):
            simd.store(gradient, i, simd.mul(scale, simd.load(gradient, i)))


@jit
def decay(theta, anchor, start, size, pull):
    """Move theta[start : start + size] towards the anchor by a factor."""
    minus = simd.splat(np.float32(-pull))
    for i in range(start, start + size, _LANES):
        here = simd.load(theta, i)
        simd.store(theta, i, simd.fma(minus, simd.sub(here, simd.load(anchor, i)), here))


@jit
def round_to_grid(theta, grid, mask, levels, step, expert, key_0, key_1):
    """Move the masked weights to their grid, up or down at random so that the mean stays."""
    words = np.empty(4, np.uint32)
    for block in range((theta.size + 3) // 4):
        words[0], words[1], words[2], words[3] = philox4x32(
            np.uint32(block), _DRAW_ROUNDING, step, expert, key_0, key_1
        )
        for i in range(4 * block, min(4 * block + 4, theta.size)):
            if mask[i] > 0 and grid[i] > 0:
                chance = np.float32(words[i - 4 * block] >> np.uint32(8)) * np.float32(2**-24)
                level = np.floor(theta[i] / grid[i] + chance)
                theta[i] = min(max(level, np.float32(-levels)), np.float32(levels)) * grid[i]
