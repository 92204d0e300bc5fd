"""Web pages, reports, pictures and tools for assistants. Nothing below imports it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
