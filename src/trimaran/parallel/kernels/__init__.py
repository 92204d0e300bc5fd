"""Triton kernels of this package. Only CUDA builds of torch have Triton."""
