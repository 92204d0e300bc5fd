"""Local SGD: replicas train independently for some steps, then average their weights."""

from collections.abc import Callable, Sequence

from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from trimaran.core import Plan
from trimaran.parallel.mesh import RankMesh


def weight_averaging(plan: Plan, ranks: RankMesh, parameters: Sequence[nn.Parameter]) -> Callable[[], None]:
    """Return a function to call after every update. Every `local_steps` calls it averages the replicas' weights."""
    if plan.comm.local_steps == 1:
        return lambda: None
    # torch averages first after the warm-up steps, then once per period.
    period = plan.comm.local_steps
    averager = PeriodicModelAverager(period, warmup_steps=period - 1, process_group=ranks.data.get_group())
    return lambda: averager.average_parameters(iter(parameters))
