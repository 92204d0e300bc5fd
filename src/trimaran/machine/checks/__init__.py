"""Checks of this machine, or of several together, before a run."""
