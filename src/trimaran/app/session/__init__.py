"""Runs that are started and shown from this terminal."""
