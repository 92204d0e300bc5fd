"""The job whose cost is predicted: the model and its software; what memory terms read of it and of a plan, once."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from trimaran.core import RECOMPUTED_BY_OPERATOR, Plan, num_units
from trimaran.cost.stack_profiles import (
    ENGINE_PROFILES,
    JOINT_PROJECTIONS,
    SPLIT_WEIGHTS,
    STACKS,
    MemoryProfile,
    Saved,
    Stack,
)
from trimaran.machine import Cluster
from trimaran.models import Outline, Tower

# AdamW's two moments, in bytes per parameter. 8-bit moments have one scale per block.
STATE_BYTES = {"fp32": 8.0, "bf16": 4.0, "8bit": 2.03}
# Bytes of one activation element. fp8 matmuls take and return bf16.
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model, its sequence length, the software that trains it, and the bytes per parameter of AdamW's moments.

    can_capture: every batch has tensors of the same shapes, and the host need not know what is in them, so that steps
        can be CUDA graphs. Packed documents and images differ from batch to batch.
    """

    outline: Outline
    seq_len: int
    stack: Stack = STACKS["trimaran"]
    state_bytes: float = STATE_BYTES["fp32"]
    can_capture: bool = True
    isolates_documents: bool = False  # rows hold several documents that do not attend to each other

    def __hash__(self) -> int:
        """Return the hash of a few fields: a search looks up thousands of results by job, and has few jobs."""
        return hash((self.outline.name, self.seq_len, self.state_bytes))

    def positions(self, tower: Tower, plan: Plan) -> int:
        """Return how many positions of a micro-batch one rank processes in `tower`: its part of every sample.

        Tensor-parallel ranks that all hold a vision tower encode different images, each of them whole.
        """
        positions = plan.micro_batch * tower.sample_positions(self.seq_len)[0]
        if not plan.towers or not self.splits_images(tower, plan):
            return positions // plan.mesh.cp
        first = self.outline.towers[0]
        num_images = plan.micro_batch * first.positions // first.segment
        per_rank = -(-num_images // (plan.mesh.cp * plan.mesh.tp))
        return positions * per_rank // num_images

    def tp_of(self, tower: Tower, plan: Plan) -> int:
        """Return how many ranks split the tower's matrices: those of the mesh, or 1."""
        own = plan.towers.get(tower.name) if plan.towers else None
        return plan.mesh.tp if own is None or own.tp is None else own.tp

    def splits_images(self, tower: Tower, plan: Plan) -> bool:
        """Return whether tensor-parallel ranks encode different images in `tower`: it and the first are replicated."""
        first = self.outline.towers[0]
        is_replicated = self.tp_of(tower, plan) == self.tp_of(first, plan) == 1 < plan.mesh.tp
        return is_replicated and 0 < first.segment <= first.positions

    def recompute_of(self, tower: Tower, plan: Plan) -> str | int:
        """Return the tower's recompute mode."""
        own = plan.towers.get(tower.name)
        return plan.recompute if own is None or own.recompute is None else own.recompute

    def sharding_of(self, tower: Tower, plan: Plan) -> str:
        """Return the tower's sharding."""
        own = plan.towers.get(tower.name)
        return plan.sharding if own is None or own.sharding is None else own.sharding

    def image_ranks(self, tower: Tower, plan: Plan) -> int:
        """Return how many tensor-parallel ranks encode different images in `tower`; 1 if they encode the same."""
        return plan.mesh.tp if plan.towers and self.splits_images(tower, plan) else 1


def splits_weights(job: Job, plan: Plan) -> bool:
    """Return whether each matrix is stored as its upper and its lower 16 bits: our own trainer on one device does."""
    return job.stack.name == "trimaran" and plan.splits_weights


def frees_weights(plan: Plan, sharding: str) -> bool:
    """Return whether a block's gathered weights are freed after its forward and gathered again for its backward.

    A pipeline keeps them, because it does not tell FSDP which backward is the last.
    """
    if sharding == "none" or plan.mesh.pp > 1:
        return False
    reshard = plan.comm.reshard
    return sharding == "parameters" if reshard == "auto" else reshard != "never"


def regathers(job: Job, plan: Plan) -> bool:
    """Return whether tensor-parallel ranks of our trainer save their part of a gathered input and gather it again."""
    return plan.comm.regather and plan.mesh.tp > 1 and job.stack.name == "trimaran"


def gathers_fp8(job: Job, plan: Plan) -> bool:
    """Return whether sharded weights of the layers are gathered in one byte."""
    ours = plan.fp8.all_gather and job.stack.name == "trimaran"
    return plan.precision == "fp8" and (ours or job.stack.gathers_fp8)


def joins_projections(job: Job, plan: Plan) -> bool:
    """Return whether projections of the same input are one matmul: in our own decoder, without adapters."""
    can_join = plan.sharding == "none" and job.stack.joins_projections and not job.outline.adapter
    return can_join and plan.joins_projections


def num_fsdp_units(job: Job, plan: Plan, block_parameters: float, num_blocks: int) -> int:
    """Return how many FSDP units so many equal blocks are: as many, unless small blocks share them.

    Towers of a VLM that are no decoders have a unit for each block. An adapter's are counted as if they had.
    """
    if num_blocks < 2 or not job.stack.joins_blocks or len(job.outline.towers) > 1 or job.outline.adapter:
        return num_blocks
    return num_units(plan, block_parameters, num_blocks)


def captures_steps(job: Job, plan: Plan) -> bool:
    """Return whether our trainer replays forward and backward as CUDA graphs."""
    can_be = plan.sharding == "none" and job.can_capture  # a search asks often, and the property is slow
    return can_be and job.stack.name == "trimaran" and plan.captures_steps


# Limits of one chunk of a chunked loss. Fewer than MIN_CHUNK_ROWS do not fill a device; whole tiles have TILE_ROWS
# rows.
MAX_CHUNK_BYTES, MIN_CHUNK_ROWS, TILE_ROWS = 2**28, 1024, 128
# The gradient of the head's weight is accumulated over the chunks in fp32.
FP32_BYTES = 4


def loss_of(job: Job, plan: Plan) -> str:
    """Return how the loss is computed: as the plan says where our trainer can fuse it, else from full logits.

    Tensor and pipeline parallelism need the logits, and so does a model whose logits are more than one matmul.
    Other stacks' losses are part of their profiles.
    """
    is_ours = job.stack.name == "trimaran" and not plan.engine_traits.needs_logits
    can_fuse = plan.mesh.tp == plan.mesh.pp == 1 and job.outline.main.bare_head
    return plan.loss if is_ours and can_fuse else "logits"


def chunk_rows(rows: int, outputs: int, element_bytes: int) -> int:
    """Return how many rows of logits a chunked loss computes at a time."""
    fitting = MAX_CHUNK_BYTES // (element_bytes * max(1, outputs))
    return max(1, min(rows, max(MIN_CHUNK_ROWS, fitting - fitting % TILE_ROWS)))


PRECISION_SUFFIX = {"fp32": " fp32", "fp8": " fp8"}


class MemoryInputs(NamedTuple):
    """A job and a plan as one rank sees them."""

    job: Job
    plan: Plan
    profile: MemoryProfile
    saved: Saved
    cpu: bool
    offload: str
    element_bytes: int
    tp: int
    pp: int
    shards: int  # ranks that each hold one shard
    data: int  # ranks that see different tokens
    cast_bytes: int  # bytes of the 16-bit copy that autocast makes of each unsharded weight and keeps for backward

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
    profile = job.stack.memory
    if job.stack.name == "trimaran":  # our own trainer has two more: on DeepSpeed's engine, and with split weights
        profile = ENGINE_PROFILES.get(plan.engine, SPLIT_WEIGHTS if splits_weights(job, plan) else profile)
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


def _saved(profile: MemoryProfile, precision: str, *, compiled: bool, sharded: bool) -> Saved:
    """Return what layers save in this plan: the most specific entry of the profile that matches."""
    key = ("compiled" if compiled else "eager") + PRECISION_SUFFIX.get(precision, "")
    key = key.removeprefix("eager ")
    return profile.saved[f"sharded {key}" if sharded and f"sharded {key}" in profile.saved else key]
