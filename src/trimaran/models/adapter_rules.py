"""Which recipes can train an adapter, and the outline of a model with one. The network is not built."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from trimaran.core import AdapterSection, ModelSection, Plan, UserError, did_you_mean, templated
from trimaran.models.any_spec import Spec
from trimaran.models.module_names import is_named, linear_names, linear_sizes
from trimaran.models.outline import (
    LayerAdapter,
    Opaque,
    Outline,
    OutlineLayer,
    TrainedParts,
    linears_of,
)

ALL_LINEAR, HEAD = "all-linear", "lm_head"
MAX_LISTED_NAMES = 12


def refuse_adapter(section: ModelSection, plan: Plan | None = None, spec: Spec | None = None) -> None:
    """Raise if the section's adapter contradicts the rest of it, the plan, or `spec`, the shape of a network of ours.

    Layers of a Hugging Face model are checked when it is built: it may have others than its shape suggests.
    """
    adapter = section.adapter
    if adapter is None:
        return
    if section.kind.reads == "scenes":
        raise UserError("M055.perception-model", where="model.adapter")
    both = [tower for tower in section.freeze if tower in (*adapter.towers, *adapter.train)]
    if "language" in section.freeze and not adapter.towers:
        both.append("language")
    if both:
        raise UserError("M056.tower-frozen-adapter", where="model.freeze", both=both[0])
    if spec is not None and not section.kind.is_hf:
        names = linear_names(spec)
        if spec.vision is not None:
            names = [name for name in names if name.split(".")[0] in (adapter.towers or ("language",))]
        names = [name for name in names if not _is_within(name, adapter.train)]
        if adapter.targets == ALL_LINEAR:
            names = [name for name in names if name.rpartition(".")[2] != HEAD]
        else:
            refuse_unknown_targets(adapter.targets, names)
            names = [name for name in names if any(is_named(name, target) for target in adapter.targets)]
        sizes = linear_sizes(spec)
        refuse_large_rank({name: sizes[name] for name in names}, adapter.rank)
    if plan is not None and not plan.engine_traits.trains_adapters:
        raise UserError("P064.deepspeed-engine", where="plan.engine")
    if plan is not None and plan.precision == "fp8":
        raise UserError("P066.linear-layer", where="plan.precision")
    if plan is not None and adapter.base == "4bit" and (plan.mesh.tp > 1 or plan.offload == "parameters"):
        field, why = ("mesh.tp", "tp splits") if plan.mesh.tp > 1 else ("offload", "FSDP's offload moves")
        raise UserError("P065.bit-base-weights", where=f"plan.{field}", why=why)


def _is_within(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern names this layer, a module that contains it, or its tower."""
    parts = name.split(".")
    outer = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return any(is_named(each, pattern) for each in outer for pattern in patterns)


def refuse_large_rank(sizes: Mapping[str, tuple[int, int]], rank: int) -> None:
    """Raise if the rank is larger than one of these layers: then its update would have more values than its weight."""
    name = min(sizes, key=lambda each: (min(sizes[each]), each), default="")
    inputs, outputs = sizes.get(name, (rank, rank))
    if rank > min(inputs, outputs):
        raise UserError(
            "M052.rank-inputs-outputs",
            where="model.adapter.rank",
            rank=rank,
            name=name,
            inputs=inputs,
            outputs=outputs,
            least=min(inputs, outputs),
        )


def refuse_unknown_targets(targets: Sequence[str], names: Iterable[str]) -> None:
    """Raise unless every target is the name of one of these linear layers."""
    linears = list(names)
    known = last_parts(linears)
    unknown = [each for each in targets if not any(is_named(name, each) for name in linears)]
    if unknown or not targets:
        what = f"no linear layer is called {unknown[0]!r}{did_you_mean(unknown[0], known)}" if unknown else "no targets"
        raise UserError(
            "M054",
            what,
            where="model.adapter.targets",
            fix=templated("the linear layers are {known}", known=listed(known)),
        )


def last_parts(names: Iterable[str]) -> list[str]:
    """Return the distinct last parts of the names that are no numbers, in order."""
    parts = dict.fromkeys(name.rpartition(".")[2] for name in names)
    return [part for part in parts if not part.isdigit()]


def listed(names: Sequence[str]) -> str:
    """Return the first names as text, and how many more there are."""
    more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    return ", ".join(names[:MAX_LISTED_NAMES]) + more


HEADS = ("lm_head", "embed_out", "head")
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")
# Linear layers of other architectures, by the names that ours have. One that joins several counts as all of them.
SYNONYMS = {
    "query_key_value": ("q_proj", "k_proj", "v_proj"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "c_attn": ("q_proj", "k_proj", "v_proj"),
    "Wqkv": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "out_proj": ("o_proj",),
    "dense": ("o_proj",),
    "fc1": ("up_proj",),
    "c_fc": ("up_proj",),
    "dense_h_to_4h": ("up_proj",),
    "linear_1": ("up_proj",),
    "fc2": ("down_proj",),
    "dense_4h_to_h": ("down_proj",),
    "linear_2": ("down_proj",),
    "c_proj": ("o_proj", "down_proj"),
}


def with_adapter(outline: Outline, section: AdapterSection) -> Outline:
    """Return the outline with adapters on the section's targets, and everything else frozen but what it trains.

    Targets are compared by the last part of a module name, so a pattern that names single layers counts for all of
    them. A model of unknown names, of which no target is known, is predicted as with adapters on every linear layer.
    """
    names = [tower.name for tower in outline.towers]
    for name in section.towers:
        if name not in names:
            raise UserError(
                "M012.no-tower",
                where="model.adapter.towers",
                name=name,
                guess=did_you_mean(name, names),
                names=", ".join(names),
            )
    parts = _last_parts(section.train)
    targets = () if section.targets == "all-linear" else _last_parts(section.targets)
    towers = []
    for tower in outline.towers:
        if tower.name in section.train:
            towers.append(replace(tower, frozen=False))
            continue
        has_adapter = tower.name in (section.towers or (outline.main.name,))
        targets_head = has_adapter and bool(tower.outputs) and any(part in HEADS for part in targets)
        trained = TrainedParts(
            embedding=bool(tower.vocab) and any(part in EMBEDDINGS for part in parts),
            head=bool(tower.outputs) and any(part in HEADS for part in parts),
            head_rank=section.rank if targets_head else 0,
        )
        runs = tuple((_adapted(block, section), count) for block, count in tower.runs) if has_adapter else tower.runs
        bare_head = tower.bare_head and not targets_head
        towers.append(replace(tower, runs=runs, frozen=True, trained=trained, bare_head=bare_head))
    return replace(outline, towers=tuple(towers))


def _adapted(block: OutlineLayer | Opaque, section: AdapterSection) -> OutlineLayer | Opaque:
    if isinstance(block, Opaque):
        return block
    targets = own = [each.name for each in linears_of(block)]
    if section.targets != "all-linear":  # all, too, if the patterns name nothing known
        lasts = _last_parts(section.targets)
        wanted = {name for last in lasts for name in (*SYNONYMS.get(last, ()), last)}
        found = [name for name in own if any(fnmatchcase(name, each) for each in wanted)]
        targets = found or ([] if any(last in HEADS for last in lasts) else own)
    if not targets:
        return block
    adapter = LayerAdapter(
        rank=section.rank,
        targets=tuple(targets),
        has_magnitude=section.kind == "dora",
        has_dropout=section.dropout > 0,
        is_4bit=section.base == "4bit",
    )
    return replace(block, adapter=adapter)


def _last_parts(patterns: Sequence[str]) -> list[str]:
    return [pattern.rpartition(".")[2] for pattern in patterns]
