"""A job at scale, simulated: pipeline steps, collectives on a network, failures, checkpoints, spares. No torch.

Read in this order: `pipeline_order` (who computes what when), `step_costs` (how long the parts take), `fabric` (what
concurrent groups leave to each other), `step_simulation` (one step, event by event), `step_sample` (many steps, with
nodes that are not equal), `failure_classes`, `job_history` (weeks, event by event), `simulation` (all of it).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
