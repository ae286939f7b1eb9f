"""Models that answer requests."""
