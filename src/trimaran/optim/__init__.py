"""AdamW for the parameters of this rank, with optimizer states in fp32, bf16 or 8 bits, on the device or the host."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
