"""The planner: which plans can run, which fit, and which is best. Imports no torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
