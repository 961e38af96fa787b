"""The m nearest of E centroids for every row, selection fused with the products.

Each row's sums run in an order of their own, so an answer does not depend on the batch it is asked in.
"""

from __future__ import annotations

import numpy as np

from .. import simd
from ..compile import jit
from ..mlp_resident.layers import tile

_LANES = simd.LANES
_TILE = 8


@jit
def _nearest(x, centroids, norms, features, num_centroids, count, ids, scores):
    products = np.zeros(_TILE * _LANES, np.float32)
    rows = np.zeros(_TILE * features, np.float32)
    zero = simd.splat(np.float32(0))
    padded = norms.size
    for start in range(0, len(x), _TILE):
        used = min(_TILE, len(x) - start)
        for row in range(used):
            for f in range(x.shape[1]):
                rows[row * features + f] = x[start + row, f]
        for first in range(0, padded, _LANES):
            tile(rows, 0, features, 1, features, centroids, first, padded, products, 0, _LANES, zero)
            for row in range(used):
                i = start + row
                for lane in range(min(_LANES, num_centroids - first)):
                    score = norms[first + lane] - np.float32(2) * products[row * _LANES + lane]
                    if score < scores[i, count - 1]:
                        place = count - 1
                        while place > 0 and score < scores[i, place - 1]:
                            scores[i, place] = scores[i, place - 1]
                            ids[i, place] = ids[i, place - 1]
                            place -= 1
                        scores[i, place] = score
                        ids[i, place] = first + lane


def nearest(x: np.ndarray, centroids: np.ndarray, count: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Ids int32 [n, count] of the nearest centroids and their squared Euclidean distances less |x|^2, float32.

    Ties go to the lower id.

    Args:
        x: float32 [n, F], finite.
        centroids: float32 [E, F].
        count: m <= E.
    """
    num_centroids, features = centroids.shape
    padded_features = -(-features // _TILE) * _TILE
    padded = -(-num_centroids // _LANES) * _LANES
    columns = np.zeros((padded_features, padded), np.float32)
    columns[:features, :num_centroids] = centroids.T
    norms = np.zeros(padded, np.float32)
    norms[:num_centroids] = (centroids.astype(np.float64) ** 2).sum(1)
    ids = np.zeros((len(x), count), np.int32)
    scores = np.full((len(x), count), np.inf, np.float32)
    _nearest(x, columns.ravel(), norms, padded_features, num_centroids, count, ids, scores)
    return ids, scores
