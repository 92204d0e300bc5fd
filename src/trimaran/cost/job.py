"""What is trained, and by whose profile: the question that every term of the cost answers."""

from dataclasses import dataclass

from trimaran.core import Plan
from trimaran.cost.stack_profiles import STACKS, Stack
from trimaran.models import Outline, Tower

STATE_BYTES = {"fp32": 8.0, "bf16": 4.0, "8bit": 2.03}  # a parameter: AdamW's two moments; 8bit has a scale a block
WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}  # bytes of an activation; fp8 products take and give bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A network, the length of its sequences, the software that trains it, and the bytes of its moments."""

    outline: Outline
    seq_len: int
    stack: Stack = STACKS["trimaran"]
    state_bytes: float = STATE_BYTES["fp32"]

    def positions(self, tower: Tower, plan: Plan) -> int:
        """Return the positions of a micro-batch that one rank works on in `tower`: its part of every sample."""
        return plan.micro_batch * tower.places(self.seq_len)[0] // plan.mesh.cp

    def recompute_of(self, tower: Tower, plan: Plan) -> str | int:
        """Return what the tower computes again in backward."""
        own = plan.towers.get(tower.name)
        return plan.recompute if own is None or own.recompute is None else own.recompute

    def sharding_of(self, tower: Tower, plan: Plan) -> str:
        """Return what of the tower is sharded."""
        own = plan.towers.get(tower.name)
        return plan.sharding if own is None or own.sharding is None else own.sharding


def splits_weights(job: Job, plan: Plan) -> bool:
    """Return whether matrices are kept as two halves of 16 bits: by our own trainer, on a device of its own."""
    return job.stack.name == "trimaran" and plan.splits_weights


def frees_weights(plan: Plan, sharding: str) -> bool:
    """Return whether a block's gathered weights are freed after its forward, to be gathered again for its backward.

    A pipeline keeps them: it runs its micro-batches without telling FSDP which backward is the last.
    """
    if sharding == "none" or plan.mesh.pp > 1:
        return False
    reshard = plan.comm.reshard
    return sharding == "parameters" if reshard == "auto" else reshard != "never"
