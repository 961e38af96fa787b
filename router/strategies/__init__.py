"""Routing strategies by name. Each module has `fit` and `restore`, see `base.Strategy`."""

from . import hash as hash_strategy
from . import kmeans, random
from .base import Area, AreaConfig, Strategy

STRATEGIES: dict[str, Strategy] = {"hash": hash_strategy, "kmeans": kmeans, "random": random}  # type: ignore[dict-item]

__all__ = ["STRATEGIES", "Area", "AreaConfig", "Strategy"]
