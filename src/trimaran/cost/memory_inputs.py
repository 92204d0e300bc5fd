"""The inputs of all memory terms, read from the plan once: pydantic fields are slow and are read many times."""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from trimaran.core import Plan
from trimaran.core.plan import RECOMPUTED_BY_OPERATOR
from trimaran.cost.job import ELEMENT_BYTES, Job, captures_steps, regathers, splits_weights
from trimaran.cost.memory_profiles import ENGINE_PROFILES, JOINT_PROJECTIONS, SPLIT_WEIGHTS, MemoryProfile, Saved
from trimaran.machine import Cluster

PRECISION_SUFFIX = {"fp32": " fp32", "fp8": " fp8"}


class MemoryInputs(NamedTuple):
    """A job and a plan as one rank sees them.

    shards: ranks that each hold one shard.
    data: ranks that see different tokens.
    cast_bytes: bytes of the 16-bit copy that autocast makes of each unsharded weight and keeps for backward.
    """

    job: Job
    plan: Plan
    profile: MemoryProfile
    saved: Saved
    cpu: bool
    offload: str
    element_bytes: int
    tp: int
    pp: int
    shards: int
    data: int
    cast_bytes: int

    @property
    def splits_weights(self) -> bool:
        """Whether each matrix is stored as its upper and its lower 16 bits."""
        return self.profile is SPLIT_WEIGHTS

    @property
    def is_captured(self) -> bool:
        """Whether forward and backward are replayed as CUDA graphs, which have their own pool of memory."""
        return not self.cpu and captures_steps(self.job, self.plan)


def memory_inputs_of(job: Job, cluster: Cluster, plan: Plan) -> MemoryInputs:
    """Return the inputs of the plan's memory terms. On a CPU nothing is offloaded, except to disk."""
    mesh, precision, cpu = plan.mesh, plan.precision, not cluster.device.traits.has_own_memory
    profile = _profile(job, plan)
    source = job.stack.memory if profile is SPLIT_WEIGHTS and not plan.joins_projections else profile
    saved = _saved(source, precision, compiled=plan.compile, sharded=plan.sharding != "none")
    if saved is JOINT_PROJECTIONS and job.outline.adapter:  # only the norms: frozen projections are never joined
        plain = _saved(job.stack.memory, precision, compiled=plan.compile, sharded=plan.sharding != "none")
        saved = replace(plain, norm_bytes=JOINT_PROJECTIONS.norm_bytes)
    gathers_anyway = plan.recompute in ("full", *RECOMPUTED_BY_OPERATOR)
    if regathers(job, plan) and not gathers_anyway:
        saved = _split_inputs(saved)
    return MemoryInputs(
        job=job,
        plan=plan,
        profile=profile,
        saved=saved,
        cpu=cpu,
        offload="none" if cpu and not plan.offloads_to_disk else plan.offload,
        element_bytes=ELEMENT_BYTES[precision],
        tp=mesh.tp,
        pp=mesh.pp,
        shards=mesh.shards,
        data=mesh.data,
        cast_bytes=2 if profile.weight_bytes == 4 and precision in ("bf16", "fp16") else 0,
    )


@lru_cache(maxsize=64)
def _split_inputs(saved: Saved) -> Saved:
    """Return the same for ranks that save only their part of the projections' inputs."""
    return replace(saved, tp_splits="all")


def _profile(job: Job, plan: Plan) -> MemoryProfile:
    """Return the stack's profile. Our own trainer has two more: on DeepSpeed's engine, and with split weights."""
    if job.stack.name != "trimaran":
        return job.stack.memory
    ours = SPLIT_WEIGHTS if splits_weights(job, plan) else job.stack.memory
    return ENGINE_PROFILES.get(plan.engine, ours)


def _saved(profile: MemoryProfile, precision: str, *, compiled: bool, sharded: bool) -> Saved:
    """Return what layers save in this plan: the most specific entry of the profile that matches."""
    key = ("compiled" if compiled else "eager") + PRECISION_SUFFIX.get(precision, "")
    key = key.removeprefix("eager ")
    return profile.saved[f"sharded {key}" if sharded and f"sharded {key}" in profile.saved else key]
