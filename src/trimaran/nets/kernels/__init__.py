"""Kernels of our own for what the networks compute, in Triton. Imported where there is a GPU."""
