"""What changes the course of training, and by how much: the held-out loss at equal tokens, over three seeds.

The text is that of docs/decisions, in bytes. `synchronous` trains two replicas that sum exact gradients.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from tests.parity import plan_for
from trimaran.core import Plan, Recipe
from trimaran.runs import RunDirectory

SEEDS = (0, 1, 2)
TEXT = Path(__file__).parents[1] / "docs" / "decisions"
SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 128}
TASKS: dict[str, dict[str, Any]] = {
    "compression": {"steps": 200, "global_batch": 8},
    "replicas": {"steps": 160, "global_batch": 16, "schedule": {"warmup_steps": 10}},
}
LEARNED = 3.2  # nats per byte that synchronous training is below at its end
NESTEROV = {"optimizer": "nesterov"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way to train, and the most that its mean held-out loss may be above that of synchronous training.

    `bound` is in nats per byte or, if `is_relative`, a fraction of the synchronous loss.
    """

    task: str
    bound: float = 0.0
    is_relative: bool = False
    mesh: dict[str, int] = field(default_factory=lambda: {"dp_replicate": 2})
    fields: dict[str, Any] = field(default_factory=dict)

    def recipe(self, seed: int, **settings: Any) -> Recipe:
        train = {"lr": 3e-3, "seed": seed, "save": False, "sample": {"tokens": 0}, "evaluate": {"batches": 16}}
        return Recipe.model_validate(
            {
                "model": {"preset": "tiny", "shape": SHAPE},
                "data": {"source": "text", "path": str(TEXT), "seq_len": 64, "holdout": 0.1},
                "train": train | TASKS[self.task] | settings,
                "checkpoint": {"every": "off"},
            }
        )

    def plan(self) -> Plan:
        plan = plan_for(self.recipe(0), grad_accum=1, **self.mesh)
        return Plan.model_validate(plan.model_dump() | self.fields)

    def limit(self, synchronous: list[float]) -> float:
        """Return the largest mean loss that is within the bound."""
        return mean(synchronous) * (1 + self.bound) if self.is_relative else mean(synchronous) + self.bound


def _compression(bound: float, mesh: dict[str, int] | None = None, **settings: Any) -> Method:
    return Method(task="compression", bound=bound, is_relative=True, mesh=mesh or {"dp_replicate": 2},
                  fields={"comm": {"compression": settings}})  # fmt: skip


def _local_steps(bound: float, **settings: Any) -> Method:
    return Method(task="replicas", bound=bound, fields={"comm": {"local_steps": {"steps": 10} | settings}})


def _async_sgd(bound: float, staleness: int) -> Method:
    fields = {"engine": "async", "comm": {"async_sgd": {"staleness": staleness}}}
    return Method(task="replicas", bound=bound, fields=fields)


METHODS = {
    "fp16": _compression(0.01, kind="fp16"),
    "bf16": _compression(0.01, kind="bf16"),
    "int8": _compression(0.01, kind="int8"),
    "1bit": _compression(0.10, kind="1bit"),
    "topk": _compression(0.10, kind="topk", ratio=0.05, warmup_steps=20),
    "powersgd": _compression(0.03, kind="powersgd"),
    "int8-sharded": _compression(0.01, {"dp_shard": 2}, kind="int8"),
    "bf16-hsdp": _compression(0.01, {"dp_replicate": 2, "dp_shard": 2}, kind="bf16"),
    "local-steps": _local_steps(0.12),
    "diloco": _local_steps(0.3, outer=NESTEROV),
    "diloco-streaming": _local_steps(0.2, outer=NESTEROV, fragments=2, overlap_steps=2),
    "diloco-int8": _local_steps(0.3, outer=NESTEROV, compression="int8"),
    "local-steps-sparse": _local_steps(0.12, compression="sparse", density=0.03),
    "async-staleness-1": _async_sgd(0.3, 1),
    "async-staleness-4": _async_sgd(0.4, 4),
}
SYNCHRONOUS = {task: Method(task=task) for task in TASKS}


def held_out_loss(run: RunDirectory) -> float:
    """Return the loss on held-out text at the end of a finished run."""
    events = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    return [each["data"]["loss"] for each in events if each["kind"] == "evaluation"][-1]
