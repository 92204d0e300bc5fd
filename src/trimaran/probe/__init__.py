"""Measures a machine and its links, in forked ranks: `python -m trimaran.probe`."""
