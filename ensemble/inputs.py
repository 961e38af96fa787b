"""A corpus as the resident loops see it."""

from __future__ import annotations

import numpy as np

from ..experts.mlp import class_frequencies
from ..kernels.mlp_resident.contract import Inputs
from ..router.relay import ArrayRelay, Relay, TextRelay
from ..router.sources import TRAIN, Corpus, TextCorpus


def training_inputs(corpus: Corpus, relay: Relay) -> Inputs:
    """Kernel inputs of a corpus through its relay, with the targets."""
    if isinstance(corpus, TextCorpus):
        assert isinstance(relay, TextRelay)
        return Inputs(text=corpus.data, embedding=relay.embedding, context=relay.context)
    assert isinstance(relay, ArrayRelay)
    return Inputs(x=relay.transform(corpus.x), y=corpus.y.astype(np.int32))


def num_outputs(corpus: Corpus) -> int:
    """V: 256 bytes, or the classes of a matrix."""
    return 256 if isinstance(corpus, TextCorpus) else corpus.num_classes


def training_frequencies(corpus: Corpus) -> np.ndarray:
    """Class frequencies of the training split, float64 [V]."""
    positions = corpus.positions(TRAIN)
    targets = corpus.data[positions] if isinstance(corpus, TextCorpus) else corpus.y[positions]
    return class_frequencies(targets, num_outputs(corpus))
