"""`trimaran predict`: answers one JSON line at a time, for any stack. A wrong line never stops the rest."""

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from trimaran.core import Plan, UserError, show_bytes, without_duplicates
from trimaran.cost import Job, predict
from trimaran.models import OutlineLayer
from trimaran.planner.predict_request import cluster_of, job_of, plan_of, tidy, with_options
from trimaran.planner.rules.legal import check_loss

_SHAPE = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256, "seq_len": 8192}
_SHARDED: dict[str, Any] = {"sharding": "parameters", "recompute": "selective"}
_ONE_SEQUENCE = {"micro_batch": 1, "global_batch": 64}

EXAMPLE_LINES: tuple[dict[str, Any], ...] = (
    {"id": "8B, ZeRO-3", "model": "llama-3.1-8b", "cluster": "8xH100", "plan": _SHARDED | _ONE_SEQUENCE},
    {
        "id": "8B, tp 2",
        "model": {"preset": "llama-3.1-8b", "seq_len": 8192},
        "cluster": "8xH100",
        "plan": _SHARDED | _ONE_SEQUENCE | {"mesh": {"tp": 2}},
    },
    {
        "id": "own shape, Megatron",
        "model": _SHAPE,
        "cluster": {"gpu": "H100", "gpus": 64, "gpus_per_node": 8},
        "plan": {"mesh": {"tp": 2, "pp": 2}, "sharding": "optimizer", "micro_batch": 1, "global_batch": 512},
        "stack": "megatron",
    },
    {"id": "70B, does not fit", "model": "llama-3.1-70b", "cluster": "4xA100-80GB", "plan": _SHARDED | _ONE_SEQUENCE},
    {
        "id": "70B, LoRA",
        "model": {"preset": "llama-3.1-70b", "adapter": {"kind": "lora", "rank": 16}},
        "cluster": "4xA100-80GB",
        "plan": _ONE_SEQUENCE | {"sharding": "parameters", "recompute": "full", "loss": "fused"},
    },
    {
        "id": "70B, LoRA on 4 bits",
        "model": {"preset": "llama-3.1-70b", "adapter": {"kind": "lora", "rank": 16, "base": "4bit"}},
        "cluster": "1xH100",
        "plan": _ONE_SEQUENCE | {"recompute": "full", "loss": "fused"},
    },
)


def example_text() -> str:
    """Return the sample as the text of a file: one JSON object on each line."""
    return "".join(json.dumps(line) + "\n" for line in EXAMPLE_LINES)


MAX_LINE_BYTES = 1 << 20
PREDICTED = ("mfu", "memory", "time", "exposed", "device_bytes", "host_bytes", "disk_bytes")


def answer_line(text: bytes, number: int) -> dict[str, Any]:
    """Return the answer to line `number`, or its error: `{"id", "error"}`. Raises only for our own bugs."""
    line: Any = None
    try:
        line = _parse(text, number)
        return predict_line(line)
    except UserError as error:
        wrong = error
    except RecursionError:
        wrong = UserError("P051.line-nested-too", where=f"line {number}")
    return {"id": line.get("id") if isinstance(line, dict) else None, "error": wrong.as_dict()}


def predict_line(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to one line. Raises UserError for a line that is wrong.

    A plan that no system could run gets an answer too, because logs contain such rows: it does not fit, `why` says what
    is wrong, and the figures are those of the nearest plan that could run.
    """
    stack = line.get("stack")
    if not isinstance(stack, str | None):
        raise UserError("P051.stack-name", where="stack")
    job = job_of(_section(line, "model", named=True), stack or "trimaran")
    cluster = cluster_of(_section(line, "cluster", named=True))
    plan_text = _section(line, "plan")
    job = with_options(job, plan_text)
    plan, why = plan_of(plan_text, cluster.world_size, job.stack.default_sharding)
    if plan.recompute == "elementwise" and job.stack.name != "trimaran":
        raise UserError("P051.no-recompute-elementwise", where="plan.recompute", stack=job.stack.name)
    plan, obstacle = _runnable(plan, job)
    loss_problem = ""
    if job.stack.name == "trimaran":  # other stacks ignore the loss
        try:
            check_loss(plan, None)
        except UserError as error:
            plan, loss_problem = plan.model_copy(update={"loss": "logits"}), error.what
    found = predict(job, cluster, plan)
    why = obstacle or loss_problem or why
    if not why and not found.fits:
        over = found.device_bytes - (found.memory_limit or cluster.device.memory_bytes)
        host = found.host_bytes - cluster.host_bytes
        why = f"{show_bytes(over)} over" if over > 0 else f"{show_bytes(host)} over in the host's memory"
    answer = {
        "id": line.get("id"),
        "fits": not why,
        **{name: getattr(found, name) for name in ("peak_bytes", "reserved_bytes", "step_seconds")},
        "tokens_per_second_per_gpu": found.tokens_per_second / cluster.world_size,
        **{name: getattr(found, name) for name in PREDICTED},
        "margin": found.error,
    }
    return answer | {"why": why} if why else answer


def _parse(text: bytes, number: int) -> dict[str, Any]:
    where = f"line {number}"
    if len(text) > MAX_LINE_BYTES:
        raise UserError("P051.line-longer-mib", where=where)
    if not text.strip():
        raise UserError("P051.line-blank", where=where)
    try:
        line = json.loads(text.decode("utf-8-sig" if number == 1 else "utf-8"), parse_constant=_reject_constant,
                          parse_float=_finite_number, object_pairs_hook=without_duplicates)  # fmt: skip
    except ValueError as error:
        problem = error.msg if isinstance(error, json.JSONDecodeError) else str(error)[:80]
        raise UserError("P051.line-not-json", where=where, problem=problem) from None
    if not isinstance(line, dict):
        raise UserError("P051.line-not-object", where=where)
    return line


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite_number(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text[:20]} is too large for a number")
    return number


def _section(line: Mapping[str, Any], key: str, *, named: bool = False) -> str:
    """Return a section as canonical text, which is the key of the caches. `named`: it may be a name alone."""
    value = line.get(key)
    if not isinstance(value, dict) and not (named and isinstance(value, str)):
        raise UserError("P051.line-no-object", where=key, key=key)
    return json.dumps(tidy(value), sort_keys=True)


def _runnable(plan: Plan, job: Job) -> tuple[Plan, str]:
    """Return the plan and '', or the nearest plan that some system could run and what is wrong with this one."""
    mesh, layers = plan.mesh, job.outline.layers
    (layer, _), *_ = job.outline.main.runs
    assert isinstance(layer, OutlineLayer), "a line describes a decoder"
    experts = layer.experts.num_experts if layer.experts else 1
    stages, valid_stages = plan.pipeline.stages, ()
    degrees: dict[str, int] = {}
    why = ""
    for axis, degree, size, what in (
        ("tp", mesh.tp, layer.heads, "heads"),
        ("cp", mesh.cp, job.seq_len, "positions"),
        ("ep", mesh.ep, math.gcd(experts, mesh.world_size // mesh.pp), "experts and ranks"),
    ):
        if size % degree:
            degrees[axis], why = math.gcd(degree, size), f"{axis} {degree} does not divide {size} {what}"
    if mesh.pp > 1 and stages and (sum(stages) != layers or min(stages) < 0 or len(stages) % mesh.pp):
        why = f"the {len(stages)} listed stages do not split {layers} layers over {mesh.pp} ranks"
    elif plan.num_stages > layers:
        why, degrees["pp"] = f"{plan.num_stages} stages are more than {layers} layers", min(mesh.pp, layers // 2 or 1)
    else:
        valid_stages = stages
    if not why:
        return plan, ""
    pipeline = plan.pipeline.model_copy(update={"stages": valid_stages})
    return plan.model_copy(update={"mesh": mesh.model_copy(update=degrees), "pipeline": pipeline}), why
