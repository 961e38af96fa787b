"""Balanced k-means on the unit sphere: clusters of nearly equal size, for any number of them.

Seeds are spread out as in k-means++ (Arthur and Vassilvitskii 2007), drawn in batches where clusters are many
(Bahmani et al. 2012). Then rows go to centroids under the bounds on cluster sizes, centroids become the direction of
their rows' sum, and so on; the best round is kept, since bounded assignment need not improve each time.

Legend: n rows, N clusters, D dimensions.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_matrix

from ...kernels.compile import jit
from ...kernels.errors import UserError
from ...kernels.philox import reference as philox

_LAYER = 3
# of assignment; rows that still wait in the last one take what is left
_ROUNDS = 24
_SEEDING_STEPS = 256
_SEEDING_ROWS = 1 << 16
# scores held at once: 128 MiB
_CHUNK_SCORES = 1 << 25


@jit
def _place(scores, rows, wait, minimum, capacity, loads, spare, assigned):
    """Rows in turn take their nearest cluster; one that is full makes them wait, or else take the nearest with room.

    As many places above the minimum are given away as leave every cluster its minimum; the number left is returned.
    """
    for place in range(len(rows)):
        chosen = -1
        for cluster in range(scores.shape[1]):
            limit = capacity if spare > 0 else minimum
            room = wait or loads[cluster] < limit
            if room and (chosen < 0 or scores[place, cluster] > scores[place, chosen]):
                chosen = cluster
        if loads[chosen] >= (capacity if spare > 0 else minimum):
            continue
        if loads[chosen] >= minimum:
            spare -= 1
        loads[chosen] += 1
        assigned[rows[place]] = chosen
    return spare


def bounds(rows: int, clusters: int, slack: float) -> tuple[int, int]:
    """Fewest and most rows of a cluster: 2 - slack and slack times the mean, rounded outwards, and never none."""
    mean = rows / clusters
    return max(1, int(np.floor((2 - slack) * mean))), int(np.ceil(slack * mean))


def _margins(x: np.ndarray, centroids: np.ndarray, chunk: int) -> np.ndarray:
    """How much nearer the nearest centroid is than the second, float32 [n]."""
    margins = np.empty(len(x), np.float32)
    for start in range(0, len(x), chunk):
        scores = x[start : start + chunk] @ centroids.T
        best = np.partition(scores, len(centroids) - 2, axis=1)[:, -2:]
        margins[start : start + chunk] = best[:, 1] - best[:, 0]
    return margins


def _assign(x: np.ndarray, centroids: np.ndarray, minimum: int, capacity: int) -> np.ndarray:
    """Cluster of each row, int32 [n]: the rows with most to lose by their second choice choose first.

    Rows that find their cluster full wait for the next round, in which only clusters with room count.
    """
    chunk = max(1, _CHUNK_SCORES // len(centroids))
    assigned = np.full(len(x), -1, np.int32)
    loads = np.zeros(len(centroids), np.int64)
    spare = len(x) - len(centroids) * minimum
    for left in range(_ROUNDS - 1, -1, -1):
        waiting = np.flatnonzero(assigned < 0)
        free = np.flatnonzero(loads < (capacity if spare > 0 else minimum))
        if not len(waiting):
            break
        order = waiting
        if len(free) > 1:
            order = waiting[np.argsort(-_margins(x[waiting], centroids[free], chunk), kind="stable")]
        own, taken = loads[free], np.full(len(x), -1, np.int32)
        for start in range(0, len(order), chunk):
            rows = order[start : start + chunk]
            spare = _place(x[rows] @ centroids[free].T, rows, left > 0, minimum, capacity, own, spare, taken)
        loads[free] = own
        fresh = np.flatnonzero(taken >= 0)
        assigned[fresh] = free[taken[fresh]]
    return assigned


def _unit(x: np.ndarray) -> np.ndarray:
    norms = np.sqrt((x.astype(np.float64) ** 2).sum(1, keepdims=True))
    return (x / np.maximum(norms, 1e-30)).astype(np.float32)


def _seeds(x: np.ndarray, clusters: int, seed: int) -> np.ndarray:
    """First centroids float32 [N, D]: rows far from one another; random directions for rows without one."""
    draw = philox.pack_draw(philox.PURPOSE_ROUTER, layer=_LAYER)
    wanted = min(len(x), max(4 * clusters, _SEEDING_ROWS))
    keys = philox.words(seed, draw, 0, philox.WHOLE_RUN, len(x))
    x = x[np.sort(np.argsort(keys, kind="stable")[:wanted])]
    distances = np.ones(len(x), np.float32)
    taken = np.zeros(len(x), bool)
    chosen = np.zeros(0, np.int64)
    batch = -(-clusters // _SEEDING_STEPS)
    step = 0
    while len(chosen) < clusters:
        step += 1
        uniform = (philox.words(seed, draw, step, philox.WHOLE_RUN, len(x)) + 0.5) / 2**32
        # the smallest of exponential times at these rates are a weighted sample without replacement
        times = np.where(taken, np.inf, -np.log(uniform) / np.maximum(distances, 1e-9))
        fresh = np.argsort(times, kind="stable")[: min(batch, clusters - len(chosen))]
        taken[fresh] = True
        chosen = np.concatenate([chosen, fresh])
        distances = np.minimum(distances, 1 - (x @ x[fresh].T).max(1))
    centroids = x[chosen]
    lost = np.flatnonzero((centroids == 0).all(1))
    random = philox.normals(seed, draw, step + 1, philox.WHOLE_RUN, len(lost) * x.shape[1])
    centroids[lost] = _unit(random.reshape(len(lost), x.shape[1]))
    return _unit(centroids)


def balanced_spherical_kmeans(
    x: np.ndarray, clusters: int, slack: float = 1.0, iterations: int = 20, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Clusters of bounded size; no row is left out.

    Args:
        x: float32 [n, D], unit rows; zero rows are allowed and fill what is left.
        clusters: N, from 1 to n.
        slack: most rows of a cluster as a multiple of n / N, see `bounds`; at 1 sizes differ by one at most.
        iterations: rounds of assignment at most.
        seed: run seed.

    Returns:
        Centroids float32 [N, D], unit rows, and the cluster of each row, int32 [n].

    Raises:
        UserError: no or more clusters than rows, slack below 1, no round, or rows that are not finite.
    """
    if not 1 <= clusters <= len(x):
        raise UserError(
            f"window router num_experts={clusters}: must be between 1 and {len(x)}, the number of training windows"
        )
    if not 1 <= slack < float("inf"):
        raise UserError(f"window router slack={slack}: must be a finite number, 1 or more")
    if iterations < 1:
        raise UserError(f"window router iterations={iterations}: must be at least 1")
    if not np.isfinite(x).all():
        raise UserError("window router: features are not finite; clean them")
    x = np.ascontiguousarray(x, np.float32)
    minimum, capacity = bounds(len(x), clusters, slack)
    centroids = _seeds(x, clusters, seed)
    best = -np.inf
    kept, assigned = centroids, np.zeros(len(x), np.int32)
    previous = None
    for _ in range(iterations):
        labels = _assign(x, centroids, minimum, capacity)
        if previous is not None and (labels == previous).all():
            break
        previous = labels
        members = csr_matrix((np.ones(len(x)), (labels, np.arange(len(x)))), shape=(clusters, len(x)))
        sums = members @ x.astype(np.float64)
        lengths = np.sqrt((sums**2).sum(1))
        # rows that cancel out have no direction: their centroid stays
        centroids = np.where(lengths[:, None] > 1e-6, _unit(sums), centroids)
        # rows' cosines with the centroid of their own cluster, summed
        if lengths.sum() > best:
            best = lengths.sum()
            kept, assigned = centroids, labels
    return kept, assigned
