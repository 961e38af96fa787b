"""What a split says of an ensemble: the mixed loss, and the rows that put it in its place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..router.relay import ArrayRelay
from ..router.sources import Corpus, TextCorpus
from ..router.sources.overlap import novel_mask
from . import mixing as mix
from .metrics import LOG2, document_interval
from .model import EnsembleModel
from .pools import SOFTMAX_POOLS


@dataclass(frozen=True)
class SplitOpinions:
    """Everything that an evaluation asks of the experts on one split.

    Attributes:
        positions: int64 [n].
        targets: int64 [n], or float32 [n, V] for regression.
        trained: float32 [n, A, K].
        untrained: float32 [n, A, K], or None if it was not asked for.
    """

    positions: np.ndarray
    targets: np.ndarray
    trained: np.ndarray
    untrained: np.ndarray | None


def gather(
    model: EnsembleModel,
    corpus: Corpus,
    splits: tuple[int, ...],
    untrained: bool = True,
    memory: np.ndarray | None = None,
) -> dict[int, SplitOpinions]:
    """Opinions of all areas on some splits, each expert's weights read once for all of them.

    `memory` holds the corpus's rows of memory features where the experts take them.
    """
    positions = [corpus.positions(split) for split in splits]
    every = np.concatenate(positions)
    if isinstance(corpus, TextCorpus):
        inputs, targets = model.inputs(corpus.data, memory), corpus.data[every].astype(np.int64)
    elif corpus.num_classes:
        inputs, targets = model.inputs(corpus.x), corpus.y[every].astype(np.int64)
    else:
        assert isinstance(model.relay, ArrayRelay)
        inputs, targets = model.inputs(corpus.x), model.relay.scaled_targets(corpus.y[every])
    found = model.opinions(inputs, every, targets, untrained=untrained)
    ends = np.cumsum([len(own) for own in positions])
    result = {}
    for split, own, end in zip(splits, positions, ends, strict=True):
        part = slice(end - len(own), end)
        before = found.untrained[part] if found.untrained is not None else None
        result[split] = SplitOpinions(own, targets[part], found.trained[part], before)
    return result


def evaluate_text(
    corpus: TextCorpus, heldout: SplitOpinions, calibration: SplitOpinions, mixing: mix.Mixing, seed: int
) -> dict[str, float | list[float] | int]:
    """Held-out figures of a text, all in bits per byte.

    Returns:
        bits_per_byte with its 95 % document bootstrap `interval`; novel_bits_per_byte and novel_bytes, outside of
        matches of 64 bytes or more with the training split; untrained (count biases alone, the same kind of pool
        fitted to them); mean_logits (plain mean); best_area (chosen on calibration) and areas; oracle (the best
        area for every byte, known afterwards: a bound for choosing one area, not a model); bytes.
    """
    bits = mix.losses(mixing, heldout.trained, heldout.targets) / LOG2
    novel = novel_mask(corpus, heldout.positions)
    rows, _ = _rows(heldout, calibration, mixing, LOG2)
    return {
        "bits_per_byte": float(bits.mean()),
        "interval": list(document_interval(bits, corpus.doc_of(heldout.positions), seed)),
        "novel_bits_per_byte": float(bits[novel].mean()) if novel.any() else float("nan"),
        "novel_bytes": int(novel.sum()),
        "bytes": len(bits),
        **rows,
    }


def evaluate_arrays(
    heldout: SplitOpinions, calibration: SplitOpinions, mixing: mix.Mixing, target_scale: float = 1.0
) -> dict[str, float | list[float] | int]:
    """Held-out figures of rows: nll_nats, accuracy, and the same rows as `evaluate_text` in nats.

    For regression: rmse in the targets' own units (the experts' times `target_scale`), and the other rows as root
    mean squares too.
    """
    targets = heldout.targets
    rows, before = _rows(heldout, calibration, mixing, 1.0)
    if mixing.head == "regression":

        def root(value: float) -> float:
            return target_scale * float(np.sqrt(value))

        roots = {
            key: [root(entry) for entry in value] if isinstance(value, list) else root(value)
            for key, value in rows.items()
        }
        return {
            "rmse": root(float(mix.losses(mixing, heldout.trained, targets).mean())),
            "examples": len(targets),
            **roots,
        }
    result: dict[str, float | list[float] | int] = {
        "nll_nats": float(mix.losses(mixing, heldout.trained, targets).mean()),
        "examples": len(targets),
        **rows,
    }
    if mixing.head == "softmax":
        assert heldout.untrained is not None
        pool = SOFTMAX_POOLS[mixing.pool]
        result["accuracy"] = accuracy(pool.log_proba(heldout.trained, mixing.weights), targets)
        result["untrained_accuracy"] = accuracy(pool.log_proba(heldout.untrained, before.weights), targets)
    return result


def _rows(
    heldout: SplitOpinions, calibration: SplitOpinions, mixing: mix.Mixing, nats_per_unit: float
) -> tuple[dict[str, float | list[float]], mix.Mixing]:
    """What puts a mixed loss in its place, and the mixing fitted to the untrained experts."""
    assert heldout.untrained is not None
    assert calibration.untrained is not None
    before = mix.fit(mixing.head, mixing.pool, calibration.untrained, calibration.targets)
    plain = mix.fit(mixing.head, "mean_logits", calibration.trained, calibration.targets)
    alone = mix.area_losses(mixing.head, heldout.trained, heldout.targets) / nats_per_unit
    chosen = int(mix.area_losses(mixing.head, calibration.trained, calibration.targets).mean(0).argmin())
    rows: dict[str, float | list[float]] = {
        "untrained": float(mix.losses(before, heldout.untrained, heldout.targets).mean() / nats_per_unit),
        "mean_logits": float(mix.losses(plain, heldout.trained, heldout.targets).mean() / nats_per_unit),
        "best_area": float(alone[:, chosen].mean()),
        "areas": [float(value) for value in alone.mean(0)],
        "oracle": float(alone.min(1).mean()),
    }
    return rows, before


def accuracy(scores: np.ndarray, targets: np.ndarray) -> float:
    """Share of inputs whose highest score [n, V] is at the target; ties go to the lower class."""
    return float((scores.argmax(1) == targets).mean())
