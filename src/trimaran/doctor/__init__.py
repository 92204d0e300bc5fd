"""Diagnoses a machine before a run (`checks`), and a run while it trains or afterwards (`rules`)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
