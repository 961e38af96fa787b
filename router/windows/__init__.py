"""Routing of whole windows of text: a window goes to one expert for training, and is found again by its first bytes.

Source: Chaubard, Kochenderfer, Ré, "Scaling Zero-Order Pretraining Through Model Sharding" (2026).
"""
