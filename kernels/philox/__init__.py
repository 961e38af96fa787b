"""Philox4x32-10, the counter-based generator of every draw."""
