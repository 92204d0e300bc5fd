"""Changes one thing of a running run at a time, measures it, and keeps it or rolls it back. Imports no torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
