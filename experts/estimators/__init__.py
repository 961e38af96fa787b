"""Estimators that can be used by hand: evaluate a loss where `ask` says, and `tell` gives the gradient."""

from .activation import Activation
from .base import Estimator, EstimatorState
from .weights import Agzo, Fzoo, LowRank, Spsa, WeightEstimator

ESTIMATORS = {"activation": Activation, "spsa": Spsa, "fzoo": Fzoo, "lowrank": LowRank, "agzo": Agzo}

__all__ = [
    "ESTIMATORS",
    "Activation",
    "Agzo",
    "Estimator",
    "EstimatorState",
    "Fzoo",
    "LowRank",
    "Spsa",
    "WeightEstimator",
]
