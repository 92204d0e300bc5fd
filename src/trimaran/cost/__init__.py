"""The cost model: memory and step time of a plan, one pure function per term. Imports no torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
