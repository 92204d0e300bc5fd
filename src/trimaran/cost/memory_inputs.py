"""What every term of memory looks at, read once from the plan: its fields are slow to ask, and asked many times."""

from typing import NamedTuple

from trimaran.core import Plan
from trimaran.cost.job import WIDTH, Job, splits_weights
from trimaran.cost.memory_profiles import ENGINE, HALVES, MemoryProfile, Saved
from trimaran.hardware import Cluster

KIND = {"fp32": " fp32", "fp8": " fp8"}


class MemoryInputs(NamedTuple):
    """A job and a plan, as one rank sees them.

    `shards` are the ranks that share what is sharded, `data` those that see different tokens. `casts` are bytes of the
    copy that autocast makes of each whole weight, and keeps for backward.
    """

    job: Job
    plan: Plan
    profile: MemoryProfile
    saved: Saved
    cpu: bool
    offload: str
    width: int
    tp: int
    pp: int
    shards: int
    data: int
    casts: int

    @property
    def halves(self) -> bool:
        """Whether matrices are kept as two halves of 16 bits."""
        return self.profile is HALVES


def memory_inputs_of(job: Job, cluster: Cluster, plan: Plan) -> MemoryInputs:
    """Return the plan's scene. On a CPU nothing is offloaded to anywhere."""
    mesh, precision, cpu = plan.mesh, plan.precision, cluster.device.kind == "cpu"
    profile = _profile(job, plan)
    kept = job.stack.memory if profile is HALVES and not plan.joins_projections else profile
    return MemoryInputs(
        job=job,
        plan=plan,
        profile=profile,
        saved=_saved(kept, precision, compiled=plan.compile, sharded=plan.sharding != "none"),
        cpu=cpu,
        offload="none" if cpu else plan.offload,
        width=WIDTH[precision],
        tp=mesh.tp,
        pp=mesh.pp,
        shards=mesh.shards,
        data=mesh.data,
        casts=2 if profile.weight == 4 and precision in ("bf16", "fp16") else 0,
    )


def _profile(job: Job, plan: Plan) -> MemoryProfile:
    """Return the stack's profile; ours are others with DeepSpeed underneath, and on a device of its own."""
    if job.stack.name != "trimaran":
        return job.stack.memory
    if plan.engine == "deepspeed":
        return ENGINE
    return HALVES if splits_weights(job, plan) else job.stack.memory


def _saved(profile: MemoryProfile, precision: str, *, compiled: bool, sharded: bool) -> Saved:
    """Return what layers save in this plan: of the names that fit it, the one that says most."""
    how = ("compiled" if compiled else "eager") + KIND.get(precision, "")
    how = how.removeprefix("eager ")
    return profile.saved[f"sharded {how}" if sharded and f"sharded {how}" in profile.saved else how]
