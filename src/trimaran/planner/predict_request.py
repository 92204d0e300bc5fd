"""What one line of `predict` says: a network, machines and a plan, each read strictly and remembered by its text."""

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trimaran.core import Mesh, Plan, UserError, nearest
from trimaran.core.plan import Degree
from trimaran.cost import Job, find_stack
from trimaran.hardware import Cluster, find_device
from trimaran.models import ExpertSpec, Outline, OutlineLayer, Tower

Width = Annotated[int, Field(ge=1, le=2**24)]
Layers = Annotated[int, Field(ge=1, le=1024)]
STRICT = ConfigDict(frozen=True, extra="forbid")
MAX_BATCH = 2**24
REMEMBERED = 4096  # of each section: a sweep asks about few networks and clusters


class ModelLine(BaseModel):
    """The shape of a decoder. `name` is for the reader; left out, keys and values have as many heads as queries."""

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


class ExpertsLine(BaseModel):
    """The experts of every layer, gathered from the flat fields of a line."""

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
    """A mesh as a log has it: `dp` is all data ranks, and what is left out follows from the rest."""

    model_config = STRICT

    dp: Degree | None = None
    dp_replicate: Degree | None = None
    dp_shard: Degree | None = None
    tp: Degree = 1
    pp: Degree = 1
    cp: Degree = 1
    ep: Degree = 1


MODEL_FIELDS = (*ModelLine.model_fields, *ExpertsLine.model_fields)
PLAN_FIELDS = ("global_batch", *(field for field in Plan.model_fields if field != "prediction"))


def tidy(value: Any) -> Any:
    """Return a JSON value without its nulls, which mean absent, and with `8.0` as 8, as spreadsheets write it."""
    if isinstance(value, dict):
        return {key: tidy(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [tidy(each) for each in value]
    return int(value) if type(value) is float and value.is_integer() else value


@lru_cache(maxsize=REMEMBERED)
def job_of(text: str, stack: str) -> Job:
    """Return the network of a line, in the hands of `stack`."""
    flat = json.loads(text)
    mixture = {key: flat.pop(key) for key in list(flat) if key in ExpertsLine.model_fields}
    told = _read(ModelLine, json.dumps(flat), "model", known=MODEL_FIELDS)
    experts = _experts(mixture, told)
    kv_heads, head_dim = told.kv_heads or told.heads, told.head_dim or told.hidden // told.heads
    if told.head_dim is None and told.hidden % told.heads:
        raise _wrong(f"{told.heads} heads do not divide hidden {told.hidden}", "model.heads", "or give model.head_dim")
    if told.heads % kv_heads:
        raise _wrong(f"{kv_heads} kv_heads do not divide {told.heads} heads", "model.kv_heads", "or leave it out")
    # A gated block is Llama's: two norms, no biases. A plain one is GPT's: two norms with, and products with, biases.
    biases = (told.heads + 2 * kv_heads) * head_dim + told.ffn + 4 * told.hidden
    layer = OutlineLayer(
        hidden=told.hidden, heads=told.heads, kv_heads=kv_heads, head_dim=head_dim, ffn=told.ffn, gated=told.gated,
        experts=experts, extras=2 * told.hidden + (0 if told.gated else biases),
    )  # fmt: skip
    tower = Tower(
        name="language", runs=((layer, told.layers),), hidden=told.hidden, vocab=told.vocab, outputs=told.vocab,
        tied=told.tied, extras=told.hidden,
    )  # fmt: skip
    return Job(outline=Outline(name=told.name, towers=(tower,)), seq_len=told.seq_len, stack=find_stack(stack))


def _experts(flat: dict[str, Any], told: ModelLine) -> ExpertSpec | None:
    if not flat.get("experts"):  # a dense model says 0, or nothing
        for field, value in flat.items():
            if value:
                raise _wrong(f"{field} is {value!r}, and the model has no experts", f"model.{field}",
                             f"add model.experts, or leave {field} out")  # fmt: skip
        return None
    mixture = _read(ExpertsLine, json.dumps(flat), "model")
    if mixture.top_k > mixture.experts:
        raise _wrong(
            f"a token cannot go to {mixture.top_k} of {mixture.experts} experts", "model.top_k", "or leave it out"
        )
    return ExpertSpec(
        num_experts=mixture.experts,
        top_k=mixture.top_k,
        ffn=mixture.expert_ffn or told.ffn,
        shared_ffn=mixture.shared_ffn,
    )


@lru_cache(maxsize=REMEMBERED)
def cluster_of(text: str) -> Cluster:
    """Return the machines of a line. Nodes are equal: the largest that the GPUs fill, at most as large as said."""
    told = _read(ClusterLine, text, "cluster")
    device = find_device(told.gpu)
    most = min(told.gpus, told.gpus_per_node or device.node_size)
    per_node = next(size for size in range(most, 0, -1) if told.gpus % size == 0)
    return Cluster(device=device, num_nodes=told.gpus // per_node, devices_per_node=per_node)


@lru_cache(maxsize=REMEMBERED)
def plan_of(text: str, world_size: int) -> tuple[Plan, str]:
    """Return the plan of a line, and why its batch cannot be made up; '' where it can.

    Data ranks are what the other axes leave, and accumulation what the global batch leaves, unless they are given.
    """
    fields = json.loads(text)
    fields.pop("name", None)
    if "prediction" in fields:
        raise _wrong("a plan that asks for a prediction has none", "plan.prediction")
    for key in ("global_batch", "micro_batch", "grad_accum"):
        _refuse_no_batch(fields.get(key, 1), key)
    mesh = _mesh(fields, world_size)
    if mesh.world_size != world_size:
        raise UserError("P051", f"the mesh ({mesh}) has {mesh.world_size} ranks, the cluster {world_size} GPUs",
                        where="plan.mesh", fix="let dp x tp x pp x cp be them, or leave dp out")  # fmt: skip
    asked = fields.pop("global_batch", None)
    share = (asked or 0) // mesh.dp
    if asked and "micro_batch" not in fields:
        fields["micro_batch"] = max(1, share // fields["grad_accum"]) if "grad_accum" in fields else 1
    if asked and "grad_accum" not in fields:
        fields["grad_accum"] = max(1, share // fields["micro_batch"])
    fields = {"precision": "bf16"} | fields | {"mesh": mesh.model_dump()}
    plan = _read(Plan, json.dumps(fields), "plan", known=PLAN_FIELDS)
    if asked in (None, plan.global_batch):
        return plan, ""
    made = f"{mesh.dp} data ranks x micro-batch {plan.micro_batch} x accumulation {plan.grad_accum}"
    return plan, f"{made} make no global batch of {asked}"


def _mesh(fields: dict[str, Any], world_size: int) -> Mesh:
    """Return the mesh with its data ranks filled in, and note in `fields` what is sharded where nobody said.

    A log that has only one number of data ranks means all of them: ZeRO shards over them, whatever they are called.
    """
    told = _read(Degrees, json.dumps(fields.get("mesh", {})), "plan.mesh")
    sharding = fields.setdefault("sharding", "parameters" if (told.dp_shard or 1) > 1 else "none")
    inner = {"tp": told.tp, "pp": told.pp, "cp": told.cp, "ep": told.ep}
    replicas, shards = told.dp_replicate, told.dp_shard
    _refuse_other_sum(told)
    if replicas is None and shards is None:
        total = told.dp or max(1, world_size // (told.tp * told.pp * told.cp))
    else:
        total = told.dp or (replicas or 1) * (shards or 1)
    if sharding == "none":
        return _built(dp_replicate=total, **inner)
    shards = shards if shards and shards > 1 else total
    return _built(dp_replicate=max(1, total // shards), dp_shard=shards, **inner)


def _refuse_other_sum(told: Degrees) -> None:
    """Raise when `dp`, all data ranks, is not what its two parts make together."""
    parts = [degree for degree in (told.dp_replicate, told.dp_shard) if degree]
    product = math.prod(parts)
    if told.dp and (told.dp % product or (len(parts) == 2 and told.dp != product)):
        words = " x ".join(map(str, parts))
        raise _wrong(f"dp {told.dp} is all data ranks, and its parts are {words}", "plan.mesh.dp",
                     "let dp be dp_replicate x dp_shard, or leave it out")  # fmt: skip


def _built(**degrees: int) -> Mesh:
    return _read(Mesh, json.dumps(degrees), "plan.mesh")


def _refuse_no_batch(value: Any, key: str) -> None:
    if type(value) is not int or not 1 <= value <= MAX_BATCH:
        raise _wrong(f"{value!r} is not a number of sequences or micro-batches", f"plan.{key}")


Section = TypeVar("Section", bound=BaseModel)


def _read(kind: type[Section], text: str, where: str, *, known: Sequence[str] = ()) -> Section:
    """Return the section that `text` is, strictly: `"8"` is no number. `known` are the fields to choose from."""
    try:
        return kind.model_validate_json(text, strict=True)
    except ValidationError as error:
        mistake = error.errors(include_url=False)[0]
    path = [str(part)[:80] for part in mistake["loc"]]
    if mistake["type"] == "extra_forbidden":
        fields = (known or list(kind.model_fields)) if len(path) == 1 else []
        raise _wrong(f"there is no field '{path[-1]}'{nearest(path[-1], fields)}", ".".join([where, *path]),
                     f"the fields are {', '.join(fields)}" if fields else "") from None  # fmt: skip
    # What pydantic tried of a union stands in the location too: `literal['none','full']`, `int`.
    place = ".".join([where, *(part for part in path if part.isidentifier() and part != "int")])
    if mistake["type"] == "missing":
        raise _wrong(f"{path[-1]} is missing", place, f"add {place}") from None
    raise _wrong(f"{str(mistake['input'])[:80]!r}: {mistake['msg']}", place) from None


def _wrong(what: str, where: str, fix: str = "") -> UserError:
    return UserError("P051", what, where=where, fix=fix or f"correct or remove {where}")
