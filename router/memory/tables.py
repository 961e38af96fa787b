"""Tables of what followed each context in the training split.

Legend as in `kernels.ngram_memory.numba`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...kernels.ngram_memory import numba as loops

LONGEST_WORD = 22
# no salt: counts of the whole split
ALL = np.uint64(1 << 40)


def _word_bytes() -> np.ndarray:
    table = np.zeros(256, np.bool_)
    table[np.frombuffer(b"0123456789_ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz", np.uint8)] = True
    return table


IS_WORD = _word_bytes()


@dataclass(frozen=True)
class Context:
    """What of a position's past a table looks at: its last `order` bytes, or its last `words` words."""

    order: int = 0
    words: int = 0

    @property
    def name(self) -> str:
        """For manifests."""
        return f"order{self.order}" if self.order else f"word{self.words}"

    def hashes(self, data: np.ndarray, positions: np.ndarray, salts: np.ndarray) -> np.ndarray:
        """uint64 [n]; equal contexts with equal salts have equal hashes."""
        out = np.empty(len(positions), np.uint64)
        loops.context_hashes(data, positions, self.order, self.words, salts, IS_WORD, LONGEST_WORD, out)
        return out


@dataclass(frozen=True)
class Table:
    """CSR of contexts and their followers.

    Attributes:
        shift: hashes are found through their top bits: hash >> 8 >> shift is the entry of the directory.
        directory: int32 [D + 1].
        checks: uint32 [C], low half of each context's hash.
        offsets: int32 [C + 1] into the rest.
        followers: uint32 [G], count << 8 | byte.
    """

    shift: int
    directory: np.ndarray
    checks: np.ndarray
    offsets: np.ndarray
    followers: np.ndarray

    @classmethod
    def build(cls, hashes: np.ndarray, followers: np.ndarray) -> Table:
        """Count followers uint8 [n] of contexts with these hashes uint64 [n]."""
        grams = (hashes & ~np.uint64(255)) | followers
        grams.sort()
        size = len(grams)
        contexts = np.empty(size, np.uint64)
        checks = np.empty(size, np.uint32)
        offsets = np.empty(size + 1, np.int32)
        counted = np.empty(size, np.uint32)
        num_contexts, num_grams = loops.run_lengths(grams, contexts, checks, offsets, counted)
        bits = max(int(num_contexts - 1).bit_length(), 1)
        directory = np.empty((1 << bits) + 1, np.int32)
        loops.fill_directory(contexts, num_contexts, 56 - bits, directory)
        return cls(
            56 - bits,
            directory,
            checks[:num_contexts].copy(),
            offsets[: num_contexts + 1].copy(),
            counted[:num_grams].copy(),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.nbytes for array in self.arrays().values())

    def arrays(self) -> dict[str, np.ndarray]:
        """What `restore` takes."""
        return {
            "directory": self.directory,
            "checks": self.checks,
            "offsets": self.offsets,
            "followers": self.followers,
        }

    @classmethod
    def restore(cls, arrays: dict[str, np.ndarray]) -> Table:
        """The table that `arrays` came from."""
        bits = (len(arrays["directory"]) - 1).bit_length() - 1
        return cls(56 - bits, **arrays)

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """Context of each hash, int64 [n]; -1 where it has not been seen."""
        out = np.empty(len(hashes), np.int64)
        loops.find(hashes, len(hashes), self.shift, self.directory, self.checks, out)
        return out

    def add_evidence(
        self, hashes: np.ndarray, targets: np.ndarray, sign: int, evidence: np.ndarray, distinct: np.ndarray
    ) -> None:
        """Add (or with sign -1 take away) the counts of each position's context; see the loop of that name."""
        found = self.find(hashes)
        loops.add_evidence(found, sign, self.offsets, self.followers, targets, evidence, distinct)
