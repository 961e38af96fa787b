"""Learning rates of every step."""

from __future__ import annotations

import numpy as np

from .config import OptimizerConfig


def learning_rates(optimizer: OptimizerConfig, steps: int) -> np.ndarray:
    """Rate of every step, float32 [steps]; a plateau schedule starts from constant rates."""
    progress = np.linspace(0.0, 1.0, steps)
    last = optimizer.final_fraction
    if optimizer.schedule == "linear":
        shape = 1 + (last - 1) * progress
    elif optimizer.schedule == "cosine":
        shape = last + (1 - last) * (1 + np.cos(np.pi * progress)) / 2
    else:
        shape = np.ones(steps)
    return (optimizer.learning_rate * shape).astype(np.float32)
