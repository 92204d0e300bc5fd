"""Devices, clusters and the limits of this machine. Imports no torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
