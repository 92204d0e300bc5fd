"""Serving over several ranks: tensor and pipeline parallelism behind the interface of one process."""
