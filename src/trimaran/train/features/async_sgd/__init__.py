"""Asynchronous training: a parameter server that is sharded over the ranks, and workers that do not wait in step."""
