"""A run on disk and between processes: run directory, lease, journal, heartbeat, attempts, incidents. No torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
