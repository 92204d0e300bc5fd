"""A run on disk and who owns it: directory, lease, journal, wire; readers and sinks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
