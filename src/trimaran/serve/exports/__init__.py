"""Formats of other programs that a trained network is written to, and read from again to compare."""
