"""Training on one rank: the worker, the training loop, and their parts."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
