"""Held-out accuracy on scikit-learn's digits over ten split seeds, with the settings of preset=digits.

python -P benchmarks/digits.py
"""

from __future__ import annotations

import numpy as np
from colonnade.ensemble.api import ArrayClassifier
from colonnade.router.sources import HELDOUT, digits


def main() -> None:
    accuracies = []
    for seed in range(10):
        corpus = digits.read(seed)
        held = corpus.split == HELDOUT
        accuracies.append(ArrayClassifier().fit_corpus(corpus).score(corpus.x[held], corpus.y[held]))
        print(f"split seed {seed}: {accuracies[-1]:.4f} on {held.sum()} images")
    print(f"mean {np.mean(accuracies):.4f}, lowest {min(accuracies):.4f}")


if __name__ == "__main__":
    main()
