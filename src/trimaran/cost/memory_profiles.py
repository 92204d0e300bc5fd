"""What each training system keeps in memory, counted in its source, operator by operator."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from trimaran.cost.rank_part import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a layer keeps of each token for backward, in 16-bit precision.

    `stream`, `inputs`, `input` are bytes a feature of the hidden state: what both norms keep, what the projections keep
    of theirs, and the layer's own input, all that is left when it is computed again. `gated` and `plain` are tensors as
    wide as the feed-forward, `masks` bytes a feature of dropout, which only plain layers have. With `repeats` keys and
    values are there once for each query head. `slices` says what tensor parallelism splits besides heads and features:
    the stream, also the inputs, or nothing (no sequence parallelism). `selective` is what selective recompute keeps:
    every second product, every first, or all but the scores of attention, which flash attention never had.
    """

    stream: float
    inputs: float
    input: float = 2
    gated: float = 4
    plain: float = 2
    masks: float = 0
    repeats: bool = False
    slices: Literal["stream", "all", "nothing"] = "stream"
    selective: Literal["second", "first", "attention"] = "second"

    def in_fp32(self) -> "Saved":
        return replace(self, stream=2 * self.stream, inputs=2 * self.inputs, input=2 * self.input)

    def in_fp8(self) -> "Saved":
        """Return the same with products that keep their inputs in one byte."""
        return replace(self, inputs=self.inputs / 2, gated=self.gated - 0.5, plain=self.plain - 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Which bytes a system holds in 16-bit precision; in fp32, weights and gradients take 4.

    Of each parameter: weights (with 2 bytes there is an fp32 master beside the moments), gradients as they accumulate,
    `loose` ones in 16 bit beside those, another copy in the `buckets` of replicas (those of shards have a size), and
    what an `update` needs in passing: of all parameters where several ranks share them, of the rank's own. `fsdp` says
    where embedding and head are gathered: in one root, or each at its end; without FSDP weights stay whole until the
    third stage of sharding. `logits` are bytes of each: at the loss, and while they wait for backward. `regathers` are
    bytes a feature of a token: what a slice keeps of inputs that it gathered, and what passes between slices. `holes`
    is the allocator's share beyond what comes and goes: without sharding, with it, and on the worst of many ranks.
    `reports` is the rank whose log people read, and which figure it shows; `split` how layers become stages.
    """

    weight: int = 4
    gradient: int = 4
    loose: int = 0
    buckets: tuple[int, int] = (0, 0)
    update: tuple[int, int] = (0, 0)
    fsdp: Literal["root", "ends", "no"] = "root"
    logits: tuple[int, int] = (12, 8)
    regathers: tuple[float, float] = (0, 0)
    holes: tuple[float, float, float] = (0.10, 0.25, 0.25)
    reports: tuple[Literal["fullest", "first", "last"], Literal["allocated", "reserved"]] = ("fullest", "allocated")
    split: Split = "cheapest"
    saved: Mapping[str, Saved] = field(hash=False)

    @property
    def whole(self) -> bool:
        """Whether weights stay whole until the third stage of sharding."""
        return self.fsdp == "no"


def _saved(eager: Saved, **others: Saved) -> dict[str, Saved]:
    """Return what layers save by how they run; what is not told follows from the eager one."""
    compiled = replace(eager, stream=min(4, eager.stream), inputs=min(4, eager.inputs), gated=3, repeats=False)
    told = {"eager": eager, "compiled": compiled, "fp32": eager.in_fp32()} | others
    return {"fp8": eager.in_fp8(), "compiled fp8": told["compiled"].in_fp8(), "compiled fp32": told["fp32"]} | told


# The stream of our decoder has 16 bits from the embedding on. Eager norms keep an fp32 cast of it, compiled ones what
# came in; projections keep what both norms return; SwiGLU keeps gate, its silu, up and their product.
# A compiled fp8 block computes the inputs of its products again, casts and all.
OURS = Saved(stream=8, inputs=4)
OURS_COMPILED = Saved(stream=4, inputs=4, gated=3)
# Weights in halves lie side by side, and products of the same input are one (nets/joint_projections.py): its backward computes
# SwiGLU again.
JOINT = Saved(stream=4, inputs=4, gated=2)
TRIMARAN = _saved(
    OURS,
    compiled=OURS_COMPILED,
    fp32=Saved(stream=8, inputs=8, input=4, repeats=True),
    **{"compiled fp8": replace(OURS_COMPILED, inputs=0, gated=2)},
)
# torchtitan's norms cast up: 6 bytes each; keys are repeated; its selective recompute begins with the first product.
TORCHTITAN = Saved(stream=12, inputs=4, repeats=True, selective="first")
# Megatron's fused norms keep what came in, the products what came out; masks of dropout are bytes. Sequence
# parallelism is off unless asked for, and its golden values of 7B do not ask.
MEGATRON = Saved(stream=4, inputs=4, gated=3, masks=2, slices="nothing", selective="attention")
# nanotron also keeps attention's output once more, sequence first.
NANOTRON = Saved(stream=6, inputs=4, slices="all", selective="attention")
FOUNDRY = Saved(stream=4, inputs=4)
# transformers' norms keep an fp32 cast and its normed form; under autocast the stream itself is fp32, as are both.
TRANSFORMERS = Saved(stream=12, inputs=4, repeats=True)
AUTOCAST = Saved(stream=16, inputs=10, input=4, repeats=True)

MEMORY_PROFILES = {
    "trimaran": MemoryProfile(saved=TRIMARAN),
    "torchtitan": MemoryProfile(saved=_saved(TORCHTITAN), fsdp="ends"),
    # bf16 weights, fp32 gradients, a distributed optimizer; the loss turns fp32 logits into their gradient in place.
    "megatron": MemoryProfile(
        saved=_saved(MEGATRON), weight=2, fsdp="no", logits=(6, 4), holes=(0.15, 0.15, 0.15),
        reports=("last", "allocated"),
    ),
    # bf16 gradients are added to fp32 ones after each backward. Logits in bf16, in fp32 and as softmax. Four figures
    # are fitted to the published 1B and 8B: both `holes`; 6 bytes for the update, of the 8 that flattening twice for a
    # reduce-scatter takes, as the rest finds blocks that lie free; and 2.4 of the 4 bytes of gathered inputs. The runs
    # fall into two kinds, which differ by just these inputs and which nothing in the table tells apart; with a pipeline
    # most are of the kind that gathers again.
    "nanotron": MemoryProfile(
        saved=_saved(NANOTRON), weight=2, loose=2, update=(6, 0), fsdp="no", logits=(10, 4), regathers=(2.4, 6),
        holes=(0.10, 0.10, 0.22), reports=("first", "reserved"), split="thresholds",
    ),
    # MPT: a fused loss, in 16 bit throughout. Its micro-batches are the largest that fitted, which bounds both figures.
    "llm-foundry": MemoryProfile(saved=_saved(FOUNDRY), logits=(4, 2), holes=(0.05, 0.05, 0.05)),
    # Two buckets of 5e8 gradients; each slice of them is cast to fp32 for its update.
    "deepspeed": MemoryProfile(
        saved=_saved(TRANSFORMERS), weight=2, gradient=2, buckets=(0, 2 * 10**9), update=(0, 4), fsdp="no",
        logits=(14, 8),
    ),
    # Replicas reduce copies of their gradients; AdamW works on lists of tensors, and keeps one of them in passing.
    "hf": MemoryProfile(
        saved=_saved(AUTOCAST, **{"sharded eager": TRANSFORMERS}), buckets=(4, 0), update=(0, 4), logits=(14, 8)
    ),
}  # fmt: skip
# Our trainer with DeepSpeed under it: everything is 16 bit but gradients, which add up in fp32 (core/deepspeed_config.py).
ENGINE = replace(MEMORY_PROFILES["trimaran"], saved=_saved(Saved(stream=4, inputs=4)), weight=2, fsdp="no")
# And on a device of its own (`Plan.splits_weights`): the upper half of each matrix is what products take, the lower one
# lies beside it, and gradients have 16 bits, as the products left them.
HALVES = replace(
    MEMORY_PROFILES["trimaran"], weight=2, gradient=2, saved=TRIMARAN | {"eager": JOINT, "compiled": JOINT}
)
