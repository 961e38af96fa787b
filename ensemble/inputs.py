"""A corpus as the resident loops see it."""

from __future__ import annotations

import numpy as np

from ..experts.families.starts import class_frequencies
from ..kernels.mlp_resident.contract import ComputedMemory, Inputs
from ..router.relay import ArrayRelay, Relay, TextRelay
from ..router.sources import TRAIN, Corpus, TextCorpus


def training_inputs(corpus: Corpus, relay: Relay, memory: np.ndarray | ComputedMemory | None = None) -> Inputs:
    """Kernel inputs of a corpus through its relay, with the targets and memory features, if any."""
    if isinstance(corpus, TextCorpus):
        assert isinstance(relay, TextRelay)
        return Inputs(text=corpus.data, embedding=relay.embedding, context=relay.context, memory=memory)
    assert isinstance(relay, ArrayRelay)
    y = corpus.y.astype(np.int32) if corpus.num_classes else relay.scaled_targets(corpus.y)
    return Inputs(x=relay.transform(corpus.x), y=y)


def num_outputs(corpus: Corpus) -> int:
    """V: 256 bytes, or the classes of a matrix, or its one number."""
    return 256 if isinstance(corpus, TextCorpus) else corpus.num_classes or 1


def training_frequencies(corpus: Corpus) -> np.ndarray:
    """Class frequencies of the training split, float64 [V]; for regression the mean of the scaled targets, zero."""
    if not isinstance(corpus, TextCorpus) and not corpus.num_classes:
        return np.zeros(1)
    positions = corpus.positions(TRAIN)
    targets = corpus.data[positions] if isinstance(corpus, TextCorpus) else corpus.y[positions]
    return class_frequencies(targets, num_outputs(corpus))
