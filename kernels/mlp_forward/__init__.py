"""Logits of many inputs under many one-hidden-layer experts."""
