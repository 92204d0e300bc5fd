"""Generation from trained weights."""
