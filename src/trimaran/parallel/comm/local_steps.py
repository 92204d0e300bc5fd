"""Replicas that train alone for some steps and then average their weights (local SGD)."""

from collections.abc import Callable, Sequence

from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from trimaran.core import Plan
from trimaran.parallel.mesh import RankMesh


def meeting(plan: Plan, ranks: RankMesh, parameters: Sequence[nn.Parameter]) -> Callable[[], None]:
    """Return what is called after every update: at each `local_steps`-th the replicas' weights become their mean."""
    if plan.comm.local_steps == 1:
        return lambda: None
    # torch averages first after its warm-up, and then each period after that.
    period = plan.comm.local_steps
    averager = PeriodicModelAverager(period, warmup_steps=period - 1, process_group=ranks.data.get_group())
    return lambda: averager.average_parameters(iter(parameters))
