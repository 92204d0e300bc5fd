"""The command line and its output. Only this package prints, and no other package imports it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
