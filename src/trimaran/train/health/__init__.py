"""Checks on training itself: NaN and Inf, loss spikes, replica differences, recompilation."""
