"""Nearest centroids."""
