"""Reads one line of `predict`: a model, a cluster and a plan, each parsed strictly and cached by its text."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trimaran.core import AdapterSection, Degree, Mesh, Plan, UserError, did_you_mean
from trimaran.cost import Job, find_stack, with_16_bit_gradients, without_sequence_parallelism
from trimaran.machine import Cluster, find_device, parse_cluster
from trimaran.models import PRESETS, ExpertSpec, Outline, OutlineLayer, Tower, outline_of, with_adapter
from trimaran.planner.rules.replica_rules import check_micro_batches

Width = Annotated[int, Field(ge=1, le=2**24)]
Layers = Annotated[int, Field(ge=1, le=1024)]
STRICT = ConfigDict(frozen=True, extra="forbid")
MAX_BATCH = 2**24
DEFAULT_SEQ_LEN = 4096  # of a preset
MAX_CACHED_SECTIONS = 4096  # per section; a sweep has few models and clusters


class ModelLine(BaseModel):
    """The shape of a decoder. `name` is only for the reader. Without `kv_heads` there are as many as `heads`."""

    model_config = STRICT

    name: str = ""
    layers: Layers
    hidden: Width
    heads: Width
    kv_heads: Width | None = None
    head_dim: Width | None = None
    ffn: Width
    vocab: Width
    seq_len: Width
    gated: bool = True
    tied: bool = False


class PresetLine(BaseModel):
    """A preset of a decoder, instead of its shape. Without `seq_len` it is 4,096 or the longest that the model has."""

    model_config = STRICT

    preset: str
    seq_len: Width | None = None


class ExpertsLine(BaseModel):
    """The experts of every layer, from the flat fields of a line."""

    model_config = STRICT

    experts: Degree
    top_k: Degree = 2
    expert_ffn: Width | None = None
    shared_ffn: Annotated[int, Field(ge=0, le=2**24)] = 0


class ClusterLine(BaseModel):
    """GPUs of one kind in equal nodes."""

    model_config = STRICT

    gpu: str
    gpus: Degree
    gpus_per_node: Degree | None = None


class Degrees(BaseModel):
    """A mesh as logs have it: `dp` counts all data ranks, and missing degrees follow from the others."""

    model_config = STRICT

    dp: Degree | None = None
    dp_replicate: Degree | None = None
    dp_shard: Degree | None = None
    tp: Degree = 1
    pp: Degree = 1
    cp: Degree = 1
    ep: Degree = 1


MODEL_FIELDS = (*ModelLine.model_fields, *ExpertsLine.model_fields, "adapter")
PRESET_FIELDS = (*PresetLine.model_fields, "adapter")
PLAN_FIELDS = (
    "global_batch",
    "sequence_parallel",
    "gradient_dtype",
    *(field for field in Plan.model_fields if field != "prediction"),
)


def tidy(value: Any) -> Any:
    """Return a JSON value without nulls, which mean absent, and with `8.0` as 8, as spreadsheets write it."""
    if isinstance(value, dict):
        return {key: tidy(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [tidy(each) for each in value]
    return int(value) if type(value) is float and value.is_integer() else value


@lru_cache(maxsize=MAX_CACHED_SECTIONS)
def job_of(text: str, stack: str) -> Job:
    """Return the model of a line, trained by `stack`: a preset by its name, or a shape; or an adapter of either."""
    given = json.loads(text)
    flat, where = ({"preset": given}, "model") if isinstance(given, str) else (given, "model.preset")
    adapter = flat.pop("adapter", None)
    if "preset" in flat:
        section = _read(PresetLine, json.dumps(flat), "model", known=PRESET_FIELDS)
        if section.preset not in PRESETS:
            near = did_you_mean(section.preset, PRESETS)
            fix = "see `trimaran presets`, or give layers, hidden, heads, ffn, vocab and seq_len"
            raise _line_error(f"there is no preset '{section.preset[:80]}' of a decoder{near}", where, fix)
        outline = outline_of(PRESETS[section.preset])
        seq_len = section.seq_len or min(DEFAULT_SEQ_LEN, outline.max_seq_len)
    else:
        outline, seq_len = _shape(flat)
    if adapter is not None:
        section = _read(AdapterSection, json.dumps(adapter), "model.adapter", strict=False)
        if section.towers or section.path:
            raise _line_error("an adapter of a line has no towers and no path", "model.adapter")
        outline = with_adapter(outline, section)
    return Job(outline=outline, seq_len=seq_len, stack=find_stack(stack))


def _shape(flat: dict[str, Any]) -> tuple[Outline, int]:
    mixture = {key: flat.pop(key) for key in list(flat) if key in ExpertsLine.model_fields}
    section = _read(ModelLine, json.dumps(flat), "model", known=MODEL_FIELDS)
    experts = _experts(mixture, section)
    heads, hidden, ffn = section.heads, section.hidden, section.ffn
    kv_heads, head_dim = section.kv_heads or heads, section.head_dim or hidden // heads
    if section.head_dim is None and hidden % heads:
        raise _line_error(f"{heads} heads do not divide hidden {hidden}", "model.heads", "or give model.head_dim")
    if heads % kv_heads:
        raise _line_error(f"{kv_heads} kv_heads do not divide {heads} heads", "model.kv_heads", "or leave it out")
    # A gated block is Llama's: two norms, no biases. One without a gate is GPT's: norms and matmuls with biases.
    biases = (heads + 2 * kv_heads) * head_dim + ffn + 4 * hidden
    layer = OutlineLayer(
        hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn, gated=section.gated,
        experts=experts, extras=2 * hidden + (0 if section.gated else biases),
    )  # fmt: skip
    tower = Tower(
        name="language", runs=((layer, section.layers),), hidden=hidden, vocab=section.vocab, outputs=section.vocab,
        tied=section.tied, extras=hidden,
    )  # fmt: skip
    return Outline(name=section.name, towers=(tower,)), section.seq_len


def _experts(flat: dict[str, Any], section: ModelLine) -> ExpertSpec | None:
    if not flat.get("experts"):  # a dense model says 0, or nothing
        for field, value in flat.items():
            if value:
                raise _line_error(f"{field} is {value!r}, and the model has no experts", f"model.{field}",
                             f"add model.experts, or leave {field} out")  # fmt: skip
        return None
    mixture = _read(ExpertsLine, json.dumps(flat), "model")
    if mixture.top_k > mixture.experts:
        raise _line_error(
            f"a token cannot go to {mixture.top_k} of {mixture.experts} experts", "model.top_k", "or leave it out"
        )
    return ExpertSpec(
        num_experts=mixture.experts,
        top_k=mixture.top_k,
        ffn=mixture.expert_ffn or section.ffn,
        shared_ffn=mixture.shared_ffn,
    )


@lru_cache(maxsize=MAX_CACHED_SECTIONS)
def cluster_of(text: str) -> Cluster:
    """Return the cluster of a line, as `8xH100` or by its fields: the largest equal nodes that the GPUs fill."""
    if isinstance(given := json.loads(text), str):
        return parse_cluster(given)
    section = _read(ClusterLine, text, "cluster")
    device = find_device(section.gpu)
    most = min(section.gpus, section.gpus_per_node or device.node_size)
    per_node = next(size for size in range(most, 0, -1) if section.gpus % size == 0)
    return Cluster(device=device, num_nodes=section.gpus // per_node, devices_per_node=per_node)


class SoftwareLine(BaseModel):
    """Options of other training systems, beside the fields of a plan."""

    model_config = STRICT

    sequence_parallel: bool = True  # tensor parallelism also splits the sequence
    gradient_dtype: Literal["fp32", "bf16"] = "fp32"  # in which gradients are held, added up and reduced


def with_options(job: Job, plan_text: str) -> Job:
    """Return the job with the options in the plan of its line. Our own trainer has the defaults."""
    given = json.loads(plan_text)
    options = {key: given[key] for key in SoftwareLine.model_fields if key in given}
    if not options:
        return job
    section, stack = _read(SoftwareLine, json.dumps(options), "plan"), job.stack
    if section != SoftwareLine() and stack.name == "trimaran":
        raise _line_error(f"our trainer has no {next(iter(options))}", f"plan.{next(iter(options))}",
                          "leave it out, or name another stack")  # fmt: skip
    stack = stack if section.sequence_parallel else without_sequence_parallelism(stack)
    return replace(job, stack=with_16_bit_gradients(stack) if section.gradient_dtype == "bf16" else stack)


@lru_cache(maxsize=MAX_CACHED_SECTIONS)
def plan_of(text: str, world_size: int, default_sharding: str = "none") -> tuple[Plan, str]:
    """Return the plan of a line, and why its batch does not add up; '' if it does.

    Missing data ranks follow from the other axes, and missing accumulation from the global batch. Without a sharding
    it is that of the stack.
    """
    fields = json.loads(text)
    fields.pop("name", None)
    for option in SoftwareLine.model_fields:
        fields.pop(option, None)
    if "prediction" in fields:
        raise _line_error("the plan of a line must not contain a prediction", "plan.prediction")
    for key in ("global_batch", "micro_batch", "grad_accum"):
        value = fields.get(key, 1)
        if type(value) is not int or not 1 <= value <= MAX_BATCH:
            raise _line_error(f"{value!r} is not a number of sequences or micro-batches", f"plan.{key}")
    mesh = _mesh(fields, world_size, default_sharding)
    if mesh.world_size != world_size:
        raise UserError(
            "P051.mesh-ranks-cluster", where="plan.mesh", mesh=mesh, num_ranks=mesh.world_size, num_devices=world_size
        )
    asked = fields.pop("global_batch", None)
    batch_per_rank = (asked or 0) // mesh.dp
    if asked and "micro_batch" not in fields:
        fields["micro_batch"] = max(1, batch_per_rank // fields["grad_accum"]) if "grad_accum" in fields else 1
    is_counted = "grad_accum" in fields
    if asked and not is_counted:
        fields["grad_accum"] = max(1, batch_per_rank // fields["micro_batch"])
    fields = {"precision": "bf16"} | fields | {"mesh": mesh.model_dump()}
    plan = _read(Plan, json.dumps(fields), "plan", known=PLAN_FIELDS)
    check_micro_batches(plan)
    if asked and plan.rows_by_rank and not is_counted:
        plan = plan.model_copy(update={"grad_accum": max(1, asked // plan.rows_at_once)})
    if asked in (None, plan.global_batch):
        return plan, ""
    made = f"{mesh.dp} data ranks x micro-batch {plan.micro_batch} x accumulation {plan.grad_accum}"
    return plan, f"{made} do not make a global batch of {asked}"


def _mesh(fields: dict[str, Any], world_size: int, default_sharding: str) -> Mesh:
    """Return the mesh with its data ranks filled in, and set the default sharding in `fields`.

    A log with only one number of data ranks means all of them: ZeRO shards over them, whatever their name.
    """
    section = _read(Degrees, json.dumps(fields.get("mesh", {})), "plan.mesh")
    if default_sharding == "none" and (section.dp_shard or 1) > 1:
        default_sharding = "parameters"
    sharding = fields.setdefault("sharding", default_sharding)
    inner = {"tp": section.tp, "pp": section.pp, "cp": section.cp, "ep": section.ep}
    parts = [degree for degree in (section.dp_replicate, section.dp_shard) if degree]
    product = math.prod(parts)
    if section.dp and (section.dp % product or (len(parts) == 2 and section.dp != product)):
        text = " x ".join(map(str, parts))
        raise _line_error(f"dp {section.dp} counts all data ranks, but its parts are {text}", "plan.mesh.dp",
                     "set dp to dp_replicate x dp_shard, or leave it out")  # fmt: skip
    total = section.dp or (product if parts else max(1, world_size // (section.tp * section.pp * section.cp)))
    data = {"dp_replicate": total}
    if sharding != "none":
        shards = section.dp_shard if section.dp_shard and section.dp_shard > 1 else total
        data = {"dp_replicate": max(1, total // shards), "dp_shard": shards}
    return _read(Mesh, json.dumps(data | inner), "plan.mesh")


Section = TypeVar("Section", bound=BaseModel)


def _read(
    kind: type[Section], text: str, where: str, *, known: Sequence[str] = (), strict: bool | None = True
) -> Section:
    """Return `text` parsed strictly as a section. `known` are the fields that an error suggests."""
    try:
        return kind.model_validate_json(text, strict=strict)
    except ValidationError as error:
        mistake = error.errors(include_url=False)[0]
    path = [str(part)[:80] for part in mistake["loc"]]
    if mistake["type"] == "extra_forbidden":
        fields = (known or list(kind.model_fields)) if len(path) == 1 else []
        raise _line_error(f"there is no field '{path[-1]}'{did_you_mean(path[-1], fields)}", ".".join([where, *path]),
                     f"the fields are {', '.join(fields)}" if fields else "") from None  # fmt: skip
    # The location also names the union members that pydantic tried: `literal['none','full']`, `int`.
    place = ".".join([where, *(part for part in path if part.isidentifier() and part != "int")])
    if mistake["type"] == "missing":
        raise _line_error(f"{path[-1]} is missing", place, f"add {place}") from None
    raise _line_error(f"{str(mistake['input'])[:80]!r}: {mistake['msg']}", place) from None


def _line_error(what: str, where: str, fix: str = "") -> UserError:
    return UserError("P051", what, where=where, fix=fix or f"correct or remove {where}")
