"""The outline of a model that trains an adapter: frozen weights, and small trained matrices beside some of them."""

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from trimaran.core import AdapterSection, UserError, did_you_mean
from trimaran.models.layer_adapter import LayerAdapter
from trimaran.models.outline import Opaque, Outline, OutlineLayer, Tower, TrainedParts, adapted, linears_of

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
            raise UserError("M012", f"there is no tower '{name}'{did_you_mean(name, names)}",
                            where="model.adapter.towers", fix=f"its towers are {', '.join(names)}")  # fmt: skip
    wanted = section.towers or (outline.main.name,)
    towers = tuple(_with_tower_adapter(tower, section, has_adapter=tower.name in wanted) for tower in outline.towers)
    return replace(outline, towers=towers)


def _with_tower_adapter(tower: Tower, section: AdapterSection, *, has_adapter: bool) -> Tower:
    if tower.name in section.train:
        return replace(tower, frozen=False)
    parts = _last_parts(section.train)
    names = () if section.targets == "all-linear" else section.targets
    targets_head = has_adapter and bool(tower.outputs) and any(part in HEADS for part in _last_parts(names))
    trained = TrainedParts(
        embedding=bool(tower.vocab) and any(part in EMBEDDINGS for part in parts),
        head=bool(tower.outputs) and any(part in HEADS for part in parts),
        head_rank=section.rank if targets_head else 0,
    )
    runs = tuple((_adapted(block, section), count) for block, count in tower.runs) if has_adapter else tower.runs
    bare_head = tower.bare_head and not targets_head
    return replace(tower, runs=runs, frozen=True, trained=trained, bare_head=bare_head)


def _adapted(block: OutlineLayer | Opaque, section: AdapterSection) -> OutlineLayer | Opaque:
    if isinstance(block, Opaque):
        return block
    own = [each.name for each in linears_of(block)]
    targets = own if section.targets == "all-linear" else _targets(section.targets, own)
    if not targets:
        return block
    adapter = LayerAdapter(
        rank=section.rank,
        targets=tuple(targets),
        has_magnitude=section.kind == "dora",
        has_dropout=section.dropout > 0,
        is_4bit=section.base == "4bit",
    )
    return adapted(block, adapter)


def _targets(patterns: Sequence[str], own: Sequence[str]) -> list[str]:
    """Return which of a layer's own linear layers the patterns name; all if none of them names anything known."""
    lasts = _last_parts(patterns)
    wanted = {name for last in lasts for name in (*SYNONYMS.get(last, ()), last)}
    found = [name for name in own if any(fnmatchcase(name, each) for each in wanted)]
    return found or ([] if any(last in HEADS for last in lasts) else list(own))


def _last_parts(patterns: Sequence[str]) -> list[str]:
    return [pattern.rpartition(".")[2] for pattern in patterns]
