"""Drills: injects one fault into a live run and measures detection, recovery and lost steps. No torch."""
