"""Measurements of each step on a rank: time, memory, norms, router statistics, traces."""
