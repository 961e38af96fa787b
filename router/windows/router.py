"""The router of windows: trained on whole windows, asked with their first bytes.

Legend: n windows, N experts, D dimensions, k experts asked for.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from ...kernels.errors import UserError
from ...kernels.nearest.numba import nearest
from ..artifact import load_state, save_state
from ..sources.corpus import TRAIN, TextCorpus
from .balanced import balanced_spherical_kmeans
from .cutting import windows
from .tfidf import TfidfSvd

NAME = "windows"
_ITERATIONS = 20


@dataclass(frozen=True)
class WindowRouter:
    """A fitted router.

    Attributes:
        embedding: turns bytes into unit vectors.
        centroids: float32 [N, D], unit rows, one for each expert.
        length: bytes of a window.
        prefix: first bytes of a window that it is routed by.
        notes: what the fit made smaller or left out, for the log.
    """

    embedding: TfidfSvd
    centroids: np.ndarray
    length: int
    prefix: int
    notes: tuple[str, ...] = ()

    @property
    def num_experts(self) -> int:
        """N."""
        return len(self.centroids)

    @classmethod
    def fit(
        cls,
        corpus: TextCorpus,
        length: int = 1024,
        prefix: int = 256,
        num_experts: int = 256,
        dim: int = 128,
        slack: float = 1.0,
        seed: int = 0,
    ) -> tuple[WindowRouter, np.ndarray, np.ndarray]:
        """Cut the training split into windows and give each to one expert, by all of its bytes.

        A single expert takes every window and needs no embedding: its router knows no word.

        Args:
            corpus: a text.
            length: bytes of a window.
            prefix: first bytes that windows will be routed by, at most `length`.
            num_experts: N, at most the number of windows.
            dim: D, or what the text allows, see `notes`.
            slack: see `balanced_spherical_kmeans`; at 1 the experts' shares differ by one window at most.
            seed: run seed.

        Returns:
            The router, the windows' first bytes in `corpus.data`, int64 [n], and their experts, int32 [n].

        Raises:
            UserError: no window, more experts than windows, too few words, or an option out of range.
        """
        if not 1 <= prefix <= length:
            raise UserError(f"window router prefix={prefix}: must be between 1 and the window length, {length}")
        starts, dropped = windows(corpus, TRAIN, length)
        if not 1 <= num_experts <= len(starts):
            raise UserError(
                f"window router num_experts={num_experts}: must be between 1 and {len(starts)}, the number of training "
                f"windows of {length} bytes; give more text, fewer experts or a smaller window length"
            )
        notes = [f"{dropped} training bytes at the ends of documents fill no window"] if dropped else []
        if num_experts == 1:
            one = cls(TfidfSvd.empty(), np.ones((1, 1), np.float32), length, prefix, tuple(notes))
            return one, starts, np.zeros(len(starts), np.int32)
        texts = [corpus.data[start : start + length].tobytes() for start in starts]
        embedding, note = TfidfSvd.fit(texts, dim, seed)
        if note:
            notes.append(note)
        x = embedding.transform(texts)
        centroids, assigned = balanced_spherical_kmeans(x, num_experts, slack, _ITERATIONS, seed)
        return cls(embedding, centroids, length, prefix, tuple(notes)), starts, assigned

    def assign(self, texts: list[bytes], k: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """The k nearest experts of windows, of which only the first `prefix` bytes are looked at.

        A window without any known word goes to the experts 0 .. k - 1 at cosine 0. An answer does not depend on the
        windows beside it.

        Args:
            texts: n windows or their beginnings.
            k: from 1 to N.

        Returns:
            Experts int32 [n, k], nearest first, and their cosines float32 [n, k].

        Raises:
            UserError: k out of range.
        """
        if not 1 <= k <= self.num_experts:
            raise UserError(f"window router top_k={k}: must be between 1 and {self.num_experts}, the number of experts")
        x = self.embedding.transform([text[: self.prefix] for text in texts])
        ids, _ = nearest(x, self.centroids, k)
        ids[(x == 0).all(1)] = np.arange(k)
        scores = np.empty((len(x), k), np.float32)
        for rank in range(k):
            # not through BLAS, whose sums depend on how many rows there are
            scores[:, rank] = np.einsum("nd,nd->n", x, self.centroids[ids[:, rank]], optimize=False)
        return ids, scores

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write to a folder, which is made."""
        self.embedding.save(directory)
        facts = {"length": self.length, "prefix": self.prefix, "notes": list(self.notes)}
        save_state(directory, NAME, {"centroids": self.centroids}, facts)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> WindowRouter:
        """Read what `save` wrote; UserError where it is missing or damaged."""
        embedding = TfidfSvd.load(directory)
        try:
            arrays, facts = load_state(directory, NAME)
            notes = tuple(facts["notes"])
            return cls(embedding, arrays["centroids"], int(facts["length"]), int(facts["prefix"]), notes)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{directory}: no readable window router ({error}); start a new run") from None
