"""Pictures that explain how a model is split: what each consists of, computed from the cost model. Imports no torch.

Read in this order: `figures` (what a view consists of), `subject` (what it is about), `catalogue` (all views by name),
then one module for each view.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
