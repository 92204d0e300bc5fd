"""Drills: injects one fault into a live run and measures detection, recovery and lost steps. No torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
