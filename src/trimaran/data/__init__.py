"""Training data: text sources, packed token shards, samples with images, and the order of samples.

Only `loader` and `step_batch` import torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
