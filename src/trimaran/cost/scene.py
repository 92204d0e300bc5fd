"""What every term of memory looks at, read once from the plan: its fields are slow to ask, and asked many times."""

from typing import NamedTuple

from trimaran.core import Plan
from trimaran.cost.job import WIDTH, Job
from trimaran.cost.memory_habits import ENGINE, MemoryHabits, Saved
from trimaran.hardware import Cluster

KIND = {"fp32": " fp32", "fp8": " fp8"}


class Scene(NamedTuple):
    """A job and a plan, as one rank sees them.

    `shards` are the ranks that share what is sharded, `data` those that see different tokens. `autocasts` is whether
    whole weights are cast for each product.
    """

    job: Job
    plan: Plan
    habits: MemoryHabits
    saved: Saved
    cpu: bool
    offload: str
    width: int
    tp: int
    pp: int
    shards: int
    data: int
    autocasts: bool


def scene_of(job: Job, cluster: Cluster, plan: Plan) -> Scene:
    """Return the plan's scene. On a CPU nothing is offloaded to anywhere."""
    mesh, precision, cpu = plan.mesh, plan.precision, cluster.device.kind == "cpu"
    habits = ENGINE if plan.engine == "deepspeed" and job.stack.name == "trimaran" else job.stack.memory
    return Scene(
        job=job,
        plan=plan,
        habits=habits,
        saved=_saved(habits, precision, compiled=plan.compile, sharded=plan.sharding != "none"),
        cpu=cpu,
        offload="none" if cpu else plan.offload,
        width=WIDTH[precision],
        tp=mesh.tp,
        pp=mesh.pp,
        shards=mesh.shards,
        data=mesh.data,
        autocasts=habits.weight == 4 and precision in ("bf16", "fp16"),
    )


def _saved(habits: MemoryHabits, precision: str, *, compiled: bool, sharded: bool) -> Saved:
    """Return what layers save in this plan: of the names that fit it, the one that says most."""
    how = ("compiled" if compiled else "eager") + KIND.get(precision, "")
    how = how.removeprefix("eager ")
    return habits.saved[f"sharded {how}" if sharded and f"sharded {how}" in habits.saved else how]
