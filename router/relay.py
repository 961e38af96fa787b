"""Fixed features, computed once from the training split without labels.

Legend: D dimensions of a byte, N examples, F0 raw features, F features.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from ..kernels.errors import UserError
from .artifact import load_state, save_state
from .sources.corpus import PAD, TRAIN, ArrayCorpus, TextCorpus

# a byte seen so often counts half
_SHRINK = 100
_POWER_FLOOR = 0.1


@dataclass(frozen=True)
class TextRelay:
    """A position's features are the embeddings of the `context` bytes before it, the previous byte first.

    They are gathered where they are used and never stored.

    Attributes:
        embedding: float32 [256, D].
        context: bytes looked back on.
    """

    embedding: np.ndarray
    context: int

    @property
    def num_features(self) -> int:
        """F = context * D."""
        return self.context * self.embedding.shape[1]

    def features(self, data: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """float32 [n, F], for those who need them at once (k-means, tests)."""
        before = data[np.asarray(positions)[:, None] - 1 - np.arange(self.context)]
        return self.embedding[before].reshape(len(positions), -1)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write to a folder, which is made."""
        save_state(directory, "relay", {"embedding": self.embedding}, {"kind": "text", "context": self.context})


@dataclass(frozen=True)
class ArrayRelay:
    """Standardised columns, optionally turned into principal components.

    Attributes:
        mean: float32 [F0].
        scale: float32 [F0]; 1 where a column is constant.
        components: float32 [F0, F], or [0, 0] for none.
        target_mean: of the training targets, where they are numbers.
        target_scale: their deviation.
    """

    mean: np.ndarray
    scale: np.ndarray
    components: np.ndarray
    target_mean: float = 0.0
    target_scale: float = 1.0

    def scaled_targets(self, y: np.ndarray) -> np.ndarray:
        """float32 [N, 1]: targets as the experts see them, zero mean and unit deviation in training."""
        return ((np.asarray(y, np.float64) - self.target_mean) / self.target_scale).astype(np.float32)[:, None]

    @property
    def num_features(self) -> int:
        """F."""
        return self.components.shape[1] or len(self.mean)

    def transform(self, x: np.ndarray) -> np.ndarray:
        """float32 [N, F] of raw rows [N, F0]; a row's features do not depend on its neighbours."""
        x = np.asarray(x)
        if x.ndim != 2 or x.shape[1] != len(self.mean):
            raise UserError(f"x has shape {x.shape}, expected [examples, {len(self.mean)}] as in training")
        standard = ((x.astype(np.float32) - self.mean) / self.scale).astype(np.float32)
        if not self.components.size:
            return standard
        # einsum without BLAS: its sums do not depend on how many rows there are
        return np.einsum("nf,fd->nd", standard, self.components, optimize=False)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write to a folder, which is made."""
        arrays = {"mean": self.mean, "scale": self.scale, "components": self.components}
        facts = {"kind": "arrays", "target_mean": self.target_mean, "target_scale": self.target_scale}
        save_state(directory, "relay", arrays, facts)


Relay = TextRelay | ArrayRelay


def fit_text_relay(corpus: TextCorpus, context: int = 5, dim: int = 12) -> TextRelay:
    """Embed bytes by what stands beside them in the training split.

    Counts of each byte with its left and its right neighbour (256 x 512) become positive pointwise mutual
    information (Levy and Goldberg, "Neural word embedding as implicit matrix factorization", 2014). Its rows are
    projected on their leading principal directions, each row weighing as often as its byte occurs: the information
    of rare bytes is large and mostly noise, and would choose the directions otherwise. Rows are brought to unit
    length, shrunk by n / (n + 100) for a byte seen n times, centred, and every dimension is scaled to unit root mean
    square over the training bytes (at most ten times as much as the strongest one).

    Raises:
        UserError: a context that the padding between documents cannot hold, or documents shorter than it.
    """
    if not 1 <= context <= PAD:
        raise UserError(f"relay.context={context}: must be between 1 and {PAD}")
    if not 1 <= dim <= 256:
        raise UserError(f"relay.dim={dim}: must be between 1 and 256")
    positions = corpus.positions(TRAIN)
    longest = max((end - start for start, end in corpus.documents(TRAIN)), default=0)
    if longest <= context:
        raise UserError(
            f"{corpus.name}: the longest training document has {longest} bytes, the context is {context}; "
            f"give a longer text or a smaller relay.context"
        )
    here = corpus.data[positions].astype(np.int64)
    left = corpus.data[positions - 1].astype(np.int64)
    pairs = np.bincount(here * 256 + left, minlength=1 << 16).reshape(256, 256).astype(np.float64)
    joint = np.concatenate([pairs, pairs.T], axis=1) + 1e-3
    joint /= joint.sum()
    expected = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    information = np.maximum(np.log(joint / expected), 0)
    counts = np.bincount(here, minlength=256)
    frequencies = counts / len(here)
    _, _, directions = np.linalg.svd(np.sqrt(frequencies)[:, None] * information)
    embedding = information @ directions[:dim].T
    embedding *= np.sign(embedding[np.abs(embedding).argmax(0), np.arange(dim)])
    embedding /= np.maximum(np.linalg.norm(embedding, axis=1, keepdims=True), 1e-9)
    embedding *= (counts / (counts + _SHRINK))[:, None]
    embedding -= frequencies @ embedding
    power = np.sqrt(frequencies @ embedding**2)
    embedding /= np.maximum(power, max(_POWER_FLOOR * power.max(), 1e-9))
    return TextRelay(embedding.astype(np.float32), context)


def fit_array_relay(corpus: ArrayCorpus, pca: int | None = None) -> ArrayRelay:
    """Mean and deviation of the training rows and, with `pca`, that many principal components of them.

    Raises:
        UserError: more components than columns or training rows.
    """
    x = corpus.x[corpus.split == TRAIN].astype(np.float64)
    mean, scale = x.mean(0), x.std(0)
    scale[scale < 1e-12] = 1.0
    components = np.zeros((0, 0), np.float32)
    if pca:
        if not 1 <= pca <= min(x.shape):
            raise UserError(f"relay.pca={pca}: must be between 1 and {min(x.shape)}, the smaller side of the data")
        _, _, rows = np.linalg.svd((x - mean) / scale, full_matrices=False)
        rows = rows[:pca]
        rows *= np.sign(rows[np.arange(pca), np.abs(rows).argmax(1)])[:, None]
        components = np.ascontiguousarray(rows.T, np.float32)
    y = corpus.y[corpus.split == TRAIN].astype(np.float64)
    numbers = not corpus.num_classes
    return ArrayRelay(
        mean.astype(np.float32),
        scale.astype(np.float32),
        components,
        float(y.mean()) if numbers else 0.0,
        float(y.std()) or 1.0 if numbers else 1.0,
    )


def load_relay(directory: str | os.PathLike[str]) -> Relay:
    """Read what `save` wrote; UserError where it is missing or damaged."""
    try:
        arrays, facts = load_state(directory, "relay")
        if facts["kind"] == "text":
            return TextRelay(arrays["embedding"], int(facts["context"]))
        return ArrayRelay(
            arrays["mean"],
            arrays["scale"],
            arrays["components"],
            float(facts.get("target_mean", 0.0)),
            float(facts.get("target_scale", 1.0)),
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{directory}: no readable relay ({error}); start a new run") from None
