"""Kernels of our own for GPUs. They need Triton, so each is imported where a tensor is on one."""
