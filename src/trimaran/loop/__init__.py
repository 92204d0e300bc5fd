"""The API for a user's own training loop: `trimaran.prepare`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
