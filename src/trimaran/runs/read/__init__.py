"""Reads a run: steps, series, ledger, profiles and traces."""
