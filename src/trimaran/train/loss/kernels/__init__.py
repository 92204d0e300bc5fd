"""Triton kernels of the loss. Callers import them only for CUDA tensors, because CPU builds have no Triton."""
