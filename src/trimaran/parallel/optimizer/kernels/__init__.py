"""Triton kernels of the optimizer. Imported only when a tensor is on a GPU."""
