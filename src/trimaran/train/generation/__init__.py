"""Samples from a network, during training and after it."""
