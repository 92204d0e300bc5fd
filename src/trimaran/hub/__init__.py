"""Files of the Hugging Face Hub: names, and what is fetched into the local cache before ranks start. No torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
