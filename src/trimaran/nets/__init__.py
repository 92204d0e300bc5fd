"""Reference networks, their initial weights and their Hugging Face format. `nets.hf` needs an extra."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
