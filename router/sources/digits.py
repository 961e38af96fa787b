"""scikit-learn's handwritten digits: 1,797 images of 8 x 8, ten classes."""

from __future__ import annotations

import dataclasses

import numpy as np

from . import arrays
from .corpus import ArrayCorpus


def read(seed: int) -> ArrayCorpus:
    """The digits in splits."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return dataclasses.replace(arrays.build("digits", np.asarray(x), np.asarray(y), None, seed), name="digits")
