"""Measures a machine and its links, in forked ranks: `python -m trimaran.probe`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
