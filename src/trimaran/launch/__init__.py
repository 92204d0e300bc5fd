"""Starts the ranks and supervises them from outside. It shares only files, sockets and command lines with them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
