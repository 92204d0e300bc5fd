"""Computations over many tensors at once, with a few kernel launches instead of one or more for each tensor."""
