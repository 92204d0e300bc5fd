"""Who else is told what happens in a run: each reads the lines that the run writes anyway.

Sinks live in a process beside the ranks (`telemetry/sidecar.py`), so nothing that happens to one reaches training.
"""
