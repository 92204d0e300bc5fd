"""State on disk and in memory: complete and verified, or not there."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
