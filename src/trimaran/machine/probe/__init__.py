"""Measures this machine, in processes that import torch."""
