"""State on disk."""

from trimaran.checkpoint.export_hf import save_network

__all__ = ["save_network"]
