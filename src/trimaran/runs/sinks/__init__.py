"""Sinks export a run's metrics, events, incidents and samples, from the lines the run writes to its directory.

They run in a sidecar process beside the ranks (`runs/sinks/sidecar.py`), so that a failing sink never affects training.
"""
