"""`trimaran drill`: injects a fault into a run, and measures how the run survives it."""
