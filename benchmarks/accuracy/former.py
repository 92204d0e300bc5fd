"""The profile that our trainer had before `plan.loss`: for the `older` rows of h200.jsonl, measured then."""

from dataclasses import replace

from trimaran.cost import STACKS, Stack
from trimaran.cost.memory_profiles import Saved
from trimaran.cost.time_profiles import COMPILED, EAGER

# The stream was fp32 on one device: both norms kept it, each projection had its own cast of its input (one for all when
# compiled), weights were fp32 with a cast for each product, and torch's own AdamW came after a pass that clipped.
_EAGER = Saved(stream=8, inputs=10, input=4)
_COMPILED = replace(_EAGER, inputs=2, gated=3)
FORMER = Stack(
    name="trimaran before plan.loss",
    memory=replace(
        STACKS["trimaran"].memory,
        saved={
            "eager": _EAGER,
            "compiled": _COMPILED,
            "fp32": replace(_EAGER, inputs=8, repeats=True),
            "fp8": _EAGER.in_fp8(),
            "compiled fp8": replace(_COMPILED, inputs=0, gated=2),
            "sharded compiled": replace(_COMPILED, stream=4, input=2),
        },
    ),
    time=replace(STACKS["trimaran"].time, eager=EAGER, compiled=COMPILED, update="torch"),
)
