"""Triton kernels of the optimizer. Imported only where a tensor is on a GPU."""
