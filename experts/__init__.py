"""What an expert is, how its update is estimated, and where it is kept."""
