"""A job at scale, simulated: pipeline steps, collectives on a network, failures, checkpoints, spares. No torch.

Read in this order: `pipeline_order` (who computes what when), `step_costs` (how long the parts take), `fabric` (what
concurrent groups leave to each other), `step_simulation` (one step, event by event), `step_sample` (many steps, with
nodes that are not equal), `failure_classes`, `job_history` (weeks, event by event), `simulation` (all of it).
"""

from trimaran.simulate.fabric import Fabric
from trimaran.simulate.job_history import ACTIVITIES, JobHistory, JobTerms
from trimaran.simulate.simulation import Scenario, Simulation, Worth, simulate, with_worth

__all__ = [
    "ACTIVITIES",
    "Fabric",
    "JobHistory",
    "JobTerms",
    "Scenario",
    "Simulation",
    "Worth",
    "simulate",
    "with_worth",
]
