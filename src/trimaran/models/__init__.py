"""The shape of a network, from a preset, a Hugging Face config.json or the recipe. Imports no torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
