"""Texts as unit vectors: word tf-idf, truncated SVD, centred, brought to unit length.

Legend: n texts, V words, D dimensions.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.sparse import csr_matrix
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.preprocessing import normalize

from ...kernels.errors import UserError
from ...kernels.philox import reference as philox
from ..artifact import load_state, save_state

NAME = "tfidf"
_LAYER = 2
_LEAST_NORM = 1e-6
_READING = {"encoding": "utf-8", "decode_error": "replace", "stop_words": "english", "dtype": np.float32}


@dataclass(frozen=True)
class TfidfSvd:
    """A fitted embedding.

    A row of tf-idf weighs a word that occurs c times by (1 + ln c) * idf and has unit length before it is projected.

    Attributes:
        vocabulary: V words, ascending.
        idf: float32 [V].
        components: float32 [D, V], orthonormal rows.
        mean: float32 [D], of the projected training texts.
    """

    vocabulary: list[str]
    idf: np.ndarray
    components: np.ndarray
    mean: np.ndarray

    @classmethod
    def fit(
        cls, texts: list[bytes], dim: int, seed: int, max_features: int = 50_000, min_df: int = 5
    ) -> tuple[TfidfSvd, str]:
        """Learn words, weights and directions from training texts.

        Args:
            texts: n texts, UTF-8; bytes that are not become the replacement character.
            dim: D wanted.
            seed: run seed, for the random projections inside the SVD.
            max_features: the V most frequent words at most.
            min_df: a word must occur in that many texts.

        Returns:
            The embedding and a note: empty, or what was made smaller because the texts do not allow more.

        Raises:
            UserError: fewer than two words that occur in `min_df` texts; a `dim` below 1.
        """
        if dim < 1:
            raise UserError(f"window router dim={dim}: must be at least 1")
        few_words = UserError(
            f"window router: fewer than two words occur in at least {min_df} of {len(texts)} windows; give more text, "
            f"a smaller min_df, or shorter windows"
        )
        # scikit-learn's own error for this says neither where nor how to mend it
        if len(texts) < min_df:
            raise few_words
        vectorizer = TfidfVectorizer(sublinear_tf=True, max_features=max_features, min_df=min_df, **_READING)
        try:
            weights = vectorizer.fit_transform(texts)
        except ValueError as error:
            if "vocabulary" not in str(error) and "no terms remain" not in str(error):
                raise
            raise few_words from None
        vocabulary = vectorizer.get_feature_names_out().tolist()
        if len(vocabulary) < 2:
            raise few_words
        possible = min(dim, len(texts), len(vocabulary))
        note = ""
        if possible < dim:
            note = f"dim={dim} became {possible}: {len(texts)} windows with {len(vocabulary)} words allow no more"
        draw = philox.pack_draw(philox.PURPOSE_ROUTER, layer=_LAYER)
        state = int(philox.words(seed, draw, 0, philox.WHOLE_RUN, 1)[0])
        # equal texts have no variance to explain, which is not asked for here
        with np.errstate(invalid="ignore"):
            svd = TruncatedSVD(possible, random_state=state).fit(weights)
        idf = np.asarray(vectorizer.idf_, np.float32)
        components = np.ascontiguousarray(svd.components_, np.float32)
        raw = cls(vocabulary, idf, components, np.zeros(possible, np.float32))
        mean = raw._project(raw._weights(texts)).mean(0, dtype=np.float64).astype(np.float32)
        return cls(vocabulary, idf, components, mean), note

    @classmethod
    def empty(cls) -> TfidfSvd:
        """Knows no word: every text is a zero row of one dimension."""
        return cls([], np.zeros(0, np.float32), np.zeros((1, 0), np.float32), np.zeros(1, np.float32))

    @cached_property
    def _counter(self) -> CountVectorizer:
        return CountVectorizer(vocabulary={word: i for i, word in enumerate(self.vocabulary)}, **_READING)

    @cached_property
    def _projection(self) -> np.ndarray:
        return np.ascontiguousarray(self.components.T)

    def _weights(self, texts: list[bytes]) -> csr_matrix:
        counts = self._counter.transform(texts)
        counts.data = (1 + np.log(counts.data)) * self.idf[counts.indices]
        return csr_matrix(normalize(counts, copy=False))

    def _project(self, weights: csr_matrix) -> np.ndarray:
        # sparse times dense sums row by row in the order of the words: a text's vector is the same in every batch
        return np.asarray(weights @ self._projection, np.float32)

    def transform(self, texts: list[bytes]) -> np.ndarray:
        """float32 [n, D]: rows of unit length, or zero for a text without any known word or equal to the mean.

        A text's row does not depend on the texts beside it.
        """
        if not texts or not self.vocabulary:
            return np.zeros((len(texts), len(self.mean)), np.float32)
        weights = self._weights(texts)
        x = self._project(weights) - self.mean
        x[np.diff(weights.indptr) == 0] = 0
        norms = np.sqrt(np.einsum("nd,nd->n", x, x, dtype=np.float64, optimize=False))
        # what is left of a text that equals the mean is rounding, which has no direction
        return np.where(norms[:, None] > _LEAST_NORM, x / np.maximum(norms, _LEAST_NORM)[:, None], 0).astype(np.float32)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write to a folder, which is made."""
        # a word holds letters, digits and underscores only, never a line break
        joined = np.frombuffer("\n".join(self.vocabulary).encode(), np.uint8)
        arrays = {"vocabulary": joined, "idf": self.idf, "components": self.components, "mean": self.mean}
        save_state(directory, NAME, arrays, {"kind": "tfidf_svd"})

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> TfidfSvd:
        """Read what `save` wrote; UserError where it is missing or damaged."""
        try:
            arrays, _ = load_state(directory, NAME)
            joined = arrays["vocabulary"].tobytes().decode()
            vocabulary = joined.split("\n") if joined else []
            return cls(vocabulary, arrays["idf"], arrays["components"], arrays["mean"])
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{directory}: no readable window embedding ({error}); start a new run") from None
