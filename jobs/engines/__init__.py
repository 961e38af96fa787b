"""Engines: who runs the groups."""
