"""Memory constants of each training system, counted operator by operator in its source code."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from trimaran.cost.rank_part import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What one layer saves for backward, per token, in 16-bit precision.

    norm_bytes: bytes per hidden feature that both norms save.
    unfused_norm_bytes: the same besides, where norms are not fused: on a CPU.
    projection_bytes: bytes per hidden feature that the projections save of their inputs.
    input_bytes: bytes per hidden feature of the layer's own input, which is all that full recompute saves.
    gated_tensors, plain_tensors: saved tensors of feed-forward width, in a layer with and without a gate.
    mask_bytes: bytes per hidden feature of dropout masks. Only layers without a gate have them.
    repeats_kv: keys and values are saved once per query head instead of once per KV head.
    tp_splits: what tensor parallelism splits besides heads and features: the norms' tensors (sequence parallelism),
        also the projections' inputs, or nothing.
    selective: what selective recompute saves: every second matmul, every second one from the first on,
        or everything but attention scores, which flash attention never stores.
    drops_unused: recompute by operator saves no output that backward does not need: blocks are compiled.
    """

    norm_bytes: float
    projection_bytes: float
    unfused_norm_bytes: float = 8
    input_bytes: float = 2
    gated_tensors: float = 4
    plain_tensors: float = 2
    mask_bytes: float = 0
    repeats_kv: bool = False
    tp_splits: Literal["stream", "all", "nothing"] = "stream"
    selective: Literal["second", "first", "attention"] = "second"
    drops_unused: bool = False

    def in_fp32(self) -> "Saved":
        return replace(
            self,
            norm_bytes=2 * self.norm_bytes,
            projection_bytes=2 * self.projection_bytes,
            input_bytes=2 * self.input_bytes,
        )

    def in_fp8(self) -> "Saved":
        """Return the same with matmul inputs saved in one byte."""
        return replace(
            self,
            projection_bytes=self.projection_bytes / 2,
            gated_tensors=self.gated_tensors - 0.5,
            plain_tensors=self.plain_tensors - 0.5,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """The bytes that one training system holds in 16-bit precision. In fp32, weights and gradients take 4 bytes.

    weight_bytes: per parameter. With 2 bytes there is also an fp32 master weight.
    gradient_bytes: per parameter, while gradients accumulate.
    extra_gradient_bytes: per parameter, 16-bit gradients held beside the accumulated ones.
    bucket_bytes: a second copy of the gradients: bytes per parameter on replicas, total bytes on sharded ranks.
    update_bytes: temporary bytes of the optimizer update: per parameter of a sharded model, per parameter the rank
        owns.
    fsdp: where FSDP gathers embedding and head: in one root unit, each at its own end, or no FSDP at all.
    logit_bytes: per logit: while the loss is computed, while it waits for backward, and while the loss is computed by
        ranks that split the vocabulary (0: only logits and their gradient, in the precision of the matmul).
    gathered_input_bytes: per token and feature under tensor parallelism: gathered inputs that a rank saves, and
        buffers that ranks exchange.
    fragmentation: allocator overhead as a fraction of temporary memory: unsharded, sharded, on the worst of many ranks.
    logged: the rank and the figure that this system's log shows.
    split: how layers are split into pipeline stages.
    saved: what a layer saves, by how it runs (eager, compiled, precision, sharded).
    """

    weight_bytes: int = 4
    gradient_bytes: int = 4
    extra_gradient_bytes: int = 0
    bucket_bytes: tuple[int, int] = (0, 0)
    update_bytes: tuple[int, int] = (0, 0)
    fsdp: Literal["root", "ends", "no"] = "root"
    logit_bytes: tuple[int, int, int] = (12, 8, 12)
    gathered_input_bytes: tuple[float, float] = (0, 0)
    fragmentation: tuple[float, float, float] = (0.10, 0.25, 0.25)
    logged: tuple[Literal["fullest", "first", "last"], Literal["allocated", "reserved"]] = ("fullest", "allocated")
    split: Split = "cheapest"
    saved: Mapping[str, Saved] = field(hash=False)

    @property
    def keeps_full_weights(self) -> bool:
        """Whether weights stay unsharded below ZeRO-3."""
        return self.fsdp == "no"


def _by_execution(eager: Saved, **others: Saved) -> dict[str, Saved]:
    """Return what a layer saves for each way to run it. Entries that are not given are derived from the eager one."""
    compiled = replace(
        eager,
        norm_bytes=min(4, eager.norm_bytes),
        projection_bytes=min(4, eager.projection_bytes),
        gated_tensors=3,
        repeats_kv=False,
    )
    variants = {"eager": eager, "compiled": compiled, "fp32": eager.in_fp32()} | others
    return {
        "fp8": eager.in_fp8(),
        "compiled fp8": variants["compiled"].in_fp8(),
        "compiled fp32": variants["fp32"],
    } | variants


# Our decoder's residual stream is 16-bit from the embedding on. Norms save their input (one kernel on a GPU, eager or
# compiled). Projections save the output of both norms. SwiGLU saves gate, silu(gate), up and their product. A
# compiled fp8 block recomputes the inputs of its matmuls, including the casts.
TRIMARAN_EAGER = Saved(norm_bytes=4, projection_bytes=4, unfused_norm_bytes=12)
TRIMARAN_FP32 = Saved(norm_bytes=8, projection_bytes=8, input_bytes=4, repeats_kv=True)
TRIMARAN_COMPILED = Saved(norm_bytes=4, projection_bytes=4, gated_tensors=3, drops_unused=True)
# With split weights, projections of the same input are one matmul (nets/decoder/joint_projections.py).
# Its backward recomputes SwiGLU.
JOINT_PROJECTIONS = Saved(norm_bytes=4, projection_bytes=4, gated_tensors=2)
TRIMARAN = _by_execution(
    TRIMARAN_EAGER,
    compiled=TRIMARAN_COMPILED,
    fp32=TRIMARAN_FP32,
    **{
        "compiled fp32": replace(TRIMARAN_FP32, drops_unused=True),
        "compiled fp8": replace(TRIMARAN_COMPILED, projection_bytes=0, gated_tensors=2),
    },
)
# torchtitan's norms cast to fp32 (6 bytes each) and keys are repeated. Its selective recompute saves the first matmul.
TORCHTITAN = Saved(norm_bytes=12, projection_bytes=4, repeats_kv=True, selective="first")
# Its fp8 linears (torchao) are meant for compiled blocks, which recompute the casts, as ours do on an H200.
TORCHTITAN_FP8 = Saved(norm_bytes=4, projection_bytes=0, gated_tensors=2, selective="first")
# Megatron's fused norms save their input, the matmuls save the norms' output, and dropout masks take a byte. With
# sequence parallelism a rank saves its slice of those, and gathers the inputs of matmuls again in backward.
MEGATRON = Saved(
    norm_bytes=4, projection_bytes=4, gated_tensors=3, mask_bytes=2, tp_splits="all", selective="attention"
)
# nanotron also saves a second, sequence-first copy of attention's output.
NANOTRON = Saved(norm_bytes=6, projection_bytes=4, tp_splits="all", selective="attention")
FOUNDRY = Saved(norm_bytes=4, projection_bytes=4)
# transformers' norms save an fp32 cast and the normalised tensor. Under autocast the residual stream is fp32 too.
TRANSFORMERS = Saved(norm_bytes=12, projection_bytes=4, repeats_kv=True)
AUTOCAST = Saved(norm_bytes=16, projection_bytes=10, input_bytes=4, repeats_kv=True)

MEMORY_PROFILES = {
    "trimaran": MemoryProfile(saved=TRIMARAN, logit_bytes=(12, 8, 0)),
    "torchtitan": MemoryProfile(
        saved=_by_execution(TORCHTITAN, **{"fp8": TORCHTITAN_FP8, "compiled fp8": TORCHTITAN_FP8}), fsdp="ends",
    ),
    # bf16 weights, fp32 gradients, a distributed optimizer. The loss overwrites fp32 logits with their gradient.
    "megatron": MemoryProfile(
        saved=_by_execution(MEGATRON), weight_bytes=2, fsdp="no", logit_bytes=(6, 4, 6),
        fragmentation=(0.15, 0.15, 0.15), logged=("last", "allocated"),
    ),
    # bf16 gradients are added to fp32 ones after each backward. Logits exist in bf16, in fp32 and as softmax.
    # Four figures are fitted to the published 1B and 8B runs: two fractions of `fragmentation`; 6 bytes for the update
    # (flattening twice for a reduce-scatter takes 8, but the rest reuses free blocks); and 2.4 of the 4 bytes of
    # gathered inputs. The runs fall into two kinds that differ by just these inputs, and no column tells them apart.
    # With a pipeline most runs are of the kind that gathers again.
    "nanotron": MemoryProfile(
        saved=_by_execution(NANOTRON), weight_bytes=2, extra_gradient_bytes=2, update_bytes=(6, 0), fsdp="no",
        logit_bytes=(10, 4, 10), gathered_input_bytes=(2.4, 6), fragmentation=(0.10, 0.10, 0.22),
        logged=("first", "reserved"), split="thresholds",
    ),
    # MPT: a fused loss, 16-bit throughout. Its micro-batches are the largest that fit, which bounds both figures.
    "llm-foundry": MemoryProfile(saved=_by_execution(FOUNDRY), logit_bytes=(4, 2, 4), fragmentation=(0.05, 0.05, 0.05)),
    # Two buckets of 5e8 gradients. Each rank casts its shard of them to fp32 for the update.
    "deepspeed": MemoryProfile(
        saved=_by_execution(TRANSFORMERS), weight_bytes=2, gradient_bytes=2, bucket_bytes=(0, 2 * 10**9),
        update_bytes=(0, 4), fsdp="no", logit_bytes=(14, 8, 14),
    ),
    # Replicas reduce copies of their gradients. AdamW (foreach) holds one temporary list of tensors.
    "hf": MemoryProfile(
        saved=_by_execution(AUTOCAST, **{"sharded eager": TRANSFORMERS}), bucket_bytes=(4, 0), update_bytes=(0, 4),
        logit_bytes=(14, 8, 14),
    ),
}  # fmt: skip
# Our trainer on other engines than its own. On DeepSpeed's, all is 16-bit except gradients, which accumulate in fp32
# (core/deepspeed_config.py).
ENGINE_PROFILES = {
    "deepspeed": replace(
        MEMORY_PROFILES["trimaran"],
        saved=_by_execution(Saved(norm_bytes=4, projection_bytes=4)),
        weight_bytes=2,
        fsdp="no",
    ),
}
# Our trainer on a single device (`Plan.splits_weights`): matmuls read the upper 16 bits of each matrix, the lower 16
# bits lie beside it, and gradients stay in 16 bits as the matmuls produce them.
SPLIT_WEIGHTS = replace(
    MEMORY_PROFILES["trimaran"],
    weight_bytes=2,
    gradient_bytes=2,
    saved=TRIMARAN | {"eager": JOINT_PROJECTIONS, "compiled": JOINT_PROJECTIONS},
)
