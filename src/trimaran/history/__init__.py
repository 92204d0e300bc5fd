"""Plans that were measured: what runs on disk say about speed, an index of them, and rates fitted to them. No torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
