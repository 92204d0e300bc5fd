"""Turns image files into the patches of a vision tower. Does not import torch."""
