"""Estimators that can be used by hand: evaluate a loss where `ask` says, and `tell` gives the gradient."""

from .activation import Activation
from .base import Estimator, EstimatorState
from .spsa import Spsa

ESTIMATORS = {"activation": Activation, "spsa": Spsa}

__all__ = ["ESTIMATORS", "Activation", "Estimator", "EstimatorState", "Spsa"]
