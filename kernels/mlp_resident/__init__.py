"""Training loops for one-hidden-layer experts: `reference` is the specification, `numba` the fast CPU twin."""
