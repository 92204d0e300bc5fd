"""Single ranks of a plan run for real on one device, without the others, and measured."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
