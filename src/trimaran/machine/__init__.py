"""What the machines are and how fast: devices, clusters, links, host limits, calibration and checks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
