"""Values that cross process boundaries: recipe, plan, events, units and errors. Only `regular_files` opens files."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
