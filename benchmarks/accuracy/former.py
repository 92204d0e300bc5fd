"""The profile of our trainer before `plan.loss`, for the `older` rows of h200.jsonl."""

from dataclasses import replace

from trimaran.cost import STACKS, Stack
from trimaran.cost.stack_profiles import COMPILED_FP32_RESIDUAL, EAGER_FP32_RESIDUAL, TORCH_HOST, Saved

# The residual stream was fp32 on one device: both norms saved it, each projection had its own cast of its input (one
# for all when compiled), weights were fp32 with a cast per matmul, and torch's AdamW ran after a separate clipping
# pass.
_EAGER = Saved(norm_bytes=8, projection_bytes=10, input_bytes=4)
_COMPILED = replace(_EAGER, projection_bytes=2, gated_tensors=3)
FORMER = Stack(
    name="trimaran before plan.loss",
    memory=replace(
        STACKS["trimaran"].memory,
        saved={
            "eager": _EAGER,
            "compiled": _COMPILED,
            "fp32": replace(_EAGER, projection_bytes=8, repeats_kv=True),
            "fp8": _EAGER.in_fp8(),
            "compiled fp8": replace(_COMPILED, projection_bytes=0, gated_tensors=2),
            "sharded compiled": replace(_COMPILED, norm_bytes=4, input_bytes=2),
        },
    ),
    time=replace(
        STACKS["trimaran"].time,
        eager=EAGER_FP32_RESIDUAL,
        compiled=COMPILED_FP32_RESIDUAL,
        host=TORCH_HOST,
        update="torch",
    ),
)
