"""The experts of a Hugging Face config.json, also under field names that no known family uses."""

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from trimaran.models.config_fields import Fields
from trimaran.models.spec import ExpertSpec

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k")
WIDTH = ("moe_intermediate_size", "expert_intermediate_size")
# What a field is probably called that no known family has. Names that say more, as a size or a group, are not meant.
LIKE_TOP_K = re.compile(r"top_?k|per_?tok|activ|selected", re.IGNORECASE)
LIKE_EXPERTS = re.compile(r"experts?$|^(num|n|nr)_.*experts?|experts?_(count|num|number)$", re.IGNORECASE)
OTHER_MEANING = re.compile(r"shared|size|dim|layer|group|capacity|parallel|redundant", re.IGNORECASE)
ASSUMED_TOP_K = 2
WITHOUT_DEFAULT = ("deepseek_v2",)  # transformers has no default of their top_k, and fails in the first step

log = logging.getLogger(__name__)


def experts_of(fields: Fields, ffn: int) -> ExpertSpec | None:
    """Return the experts of a layer with experts; None if the model is dense. `ffn` is the default of their width.

    They are for the prediction alone: transformers builds the model from its own field names and defaults. So an
    unknown name is guessed with a warning and not refused.
    """
    fields = replace(fields, config={**fields.config, **_listed(fields)})
    count = _count(fields)
    if count < 2:
        return None
    needed = fields.word("model_type", default="") in WITHOUT_DEFAULT
    width = fields.size(*WIDTH, default=ffn)
    gated = fields.size("shared_expert_intermediate_size", default=0, least=0)
    return ExpertSpec(
        num_experts=count,
        top_k=fields.size(*TOP_K, most=count) if needed or fields.has(*TOP_K) else _guessed_top_k(fields, count),
        ffn=width,
        shared_ffn=gated or width * fields.size("n_shared_experts", "num_shared_experts", default=0, least=0),
        shared_gate=gated > 0,
    )


def _listed(fields: Fields) -> dict[str, int]:
    """Return one value for each field that lists one for every layer: the largest, which never predicts too little."""
    found = {}
    for name in (*EXPERTS, *TOP_K, *WIDTH):
        values = fields.config.get(name)
        if isinstance(values, list) and values and all(type(each) is int for each in values):
            found[name] = max(values)
            if min(values) != max(values):
                _warn(f"{fields.where}: {name} differs between layers; all are predicted with {max(values)}")
    return found


def _count(fields: Fields) -> int:
    """Return the number of experts, 0 if there are none. A known name wins, even if it is null."""
    if fields.has(*EXPERTS) or any(name in fields.config for name in EXPERTS):
        return fields.size(*EXPERTS, default=0, least=0)
    found = [
        (name, value)
        for name, value in _numbers(fields)
        if LIKE_EXPERTS.search(name) and not LIKE_TOP_K.search(name) and value > 1
    ]
    if not found:
        return 0
    names = ", ".join(name for name, _ in found)
    if len(found) > 1:
        _warn(f"{fields.where}: it is not known which field is the number of experts ({names}); predicted as dense")
        return 0
    _warn(f"{fields.where}: {names} is read as the number of experts, and the prediction depends on it")
    return found[0][1]


def _guessed_top_k(fields: Fields, count: int) -> int:
    """Return the experts of a token from a field whose name suggests it; without one, a usual number."""
    found = [
        (name, value)
        for name, value in _numbers(fields)
        if LIKE_TOP_K.search(name) and re.search("expert|moe|rout", name, re.IGNORECASE) and value <= count
    ]
    if len(found) == 1:
        _warn(f"{fields.where}: {found[0][0]} is read as the experts of a token, and the prediction depends on it")
        return found[0][1]
    top_k = min(ASSUMED_TOP_K, count)
    _warn(f"{fields.where}: no known field gives the experts of a token; the time is predicted for {top_k} of {count}")
    return top_k


def _numbers(fields: Fields) -> Iterator[tuple[str, int]]:
    """Yield the fields with a positive whole number that may describe experts."""
    for name, value in fields.config.items():
        if type(value) is int and value > 0 and isinstance(name, str) and not OTHER_MEANING.search(name):
            yield name, value


@cache
def _warn(text: str) -> None:
    """Log the warning once in a process: a config is read several times."""
    log.warning("%s", text)
