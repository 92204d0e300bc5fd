"""Measurements of a machine or a link, made inside ranks: `python -m trimaran.probe`."""
