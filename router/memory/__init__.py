"""A relay with memory: n-gram tables of the training split, and what they say of a position."""
