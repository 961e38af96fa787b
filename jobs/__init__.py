"""Command line, plan, engines, tracking: the only package that reads configuration."""
