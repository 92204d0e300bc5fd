"""The data of a run, as the worker loads it."""
