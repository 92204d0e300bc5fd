"""Applies a Plan to an nn.Module: parallel axes, memory, precision and communication."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
