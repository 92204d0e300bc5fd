"""Triton kernels of the networks. Imported only on a GPU."""
