import numpy as np
import pytest
from colonnade.kernels.nearest.numba import nearest


@pytest.mark.parametrize(("rows", "centroids", "features", "count"), [(1, 1, 1, 1), (50, 37, 13, 5), (9, 16, 8, 16)])
def test_matches_a_full_distance_matrix(rows, centroids, features, count):
    rng = np.random.default_rng()
    x = rng.standard_normal((rows, features)).astype(np.float32)
    c = rng.standard_normal((centroids, features)).astype(np.float32)
    ids, scores = nearest(x, c, count)
    distances = ((x[:, None].astype(np.float64) - c[None]) ** 2).sum(2)
    expected = np.sort(distances, axis=1)[:, :count]
    got = scores + (x.astype(np.float64) ** 2).sum(1, keepdims=True)
    np.testing.assert_allclose(got, expected, atol=1e-4)
    np.testing.assert_allclose(np.take_along_axis(distances, ids, 1), expected, atol=1e-4)


def test_an_answer_does_not_depend_on_the_batch():
    rng = np.random.default_rng()
    x = rng.standard_normal((33, 7)).astype(np.float32)
    c = rng.standard_normal((20, 7)).astype(np.float32)
    ids, scores = nearest(x, c, 3)
    for i in range(len(x)):
        alone = nearest(x[i : i + 1], c, 3)
        np.testing.assert_array_equal(alone[0][0], ids[i])
        np.testing.assert_array_equal(alone[1][0], scores[i])


def test_ties_go_to_the_lower_id():
    c = np.zeros((18, 3), np.float32)
    ids, _ = nearest(np.ones((2, 3), np.float32), c, 4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
