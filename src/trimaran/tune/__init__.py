"""Measures plans in short real runs, the most promising first, to find the fastest. No torch."""
