"""Colonnade: ten thousand small experts, trained alone by zeroth-order optimisation, combined into one model."""
