"""What a Hugging Face model does with its head and its attention, found out by a call without memory."""

import logging
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.nets.hf_attention import SIGHT, looks_ahead, strange_option, unlike_ours

try:
    from transformers import AttentionInterface
except ImportError:
    AttentionInterface = None

NAME = "trimaran_probe"
TOKENS = (2, 8)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Findings:
    """`ends_in_head`: the logits are what the head returned, and nothing is done to them afterwards.

    `unlike`: why our attention cannot take the place of the model's, or nothing.
    """

    ends_in_head: bool
    unlike: str


@dataclass(slots=True)
class _Notes:
    """What is seen during the call."""

    heads: int = 0
    attended: int = 0
    unlike: str = ""
    told: list[Any] = field(default_factory=list)


def probe(module: Any) -> Findings:
    """Return what a copy of the model without memory does with a few tokens. Nothing is computed or changed.

    A model that cannot be called so keeps its own ways; the log says why.
    """
    notes = _Notes()
    try:
        logits, mark = _call(_without_memory(module).train(), notes)
    except Exception as error:  # whatever the model's code cannot do without memory
        log.info("%s cannot be tried out: %s: %s", type(module).__name__, type(error).__name__, error)
        return Findings(ends_in_head=False, unlike="cannot be tried out")
    unlike = unlike_ours(module) or notes.unlike or ("" if notes.attended else "has attention of its own")
    return Findings(ends_in_head=logits is mark and notes.heads == 1, unlike=unlike)


def _call(hollow: Any, notes: _Notes) -> tuple[Any, Tensor]:
    """Return the logits of a call, and what the head returned in it."""
    assert AttentionInterface is not None, "there is no model without transformers"
    mark = torch.empty(1 + TOKENS[0] * TOKENS[1], device="meta")  # as a head that ends in the loss returns it
    sight = object()

    def head(input: Tensor) -> Tensor:
        notes.heads += 1
        return mark

    def attend(
        part: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        notes.attended += 1
        reasons = {
            "does not tell its attention what it is told": options.get(SIGHT) is not sight,
            "makes masks of its own": mask is not None,
            "looks ahead": looks_ahead(part, options),
            "has values of another width than keys": value.shape[-1] != query.shape[-1],
            f"attends with {strange_option(options)}": bool(strange_option(options)),
        }
        notes.unlike = notes.unlike or next((why for why, found in reasons.items() if found), "")
        return value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    if isinstance(last := hollow.get_output_embeddings(), nn.Linear):
        last.forward = head
    where: dict[str, Any] = {SIGHT: sight}
    if getattr(hollow, "_supports_attention_backend", False):
        AttentionInterface.register(NAME, attend)
        hollow.set_attn_implementation(NAME)
    else:  # a mask that is there is not made, which would take a look at values
        where = {"attention_mask": torch.ones(TOKENS[0], 1, TOKENS[1], TOKENS[1], dtype=torch.bool, device="meta")}
    tokens = torch.zeros(TOKENS, dtype=torch.long, device="meta")
    with torch.no_grad():
        out = hollow(input_ids=tokens, position_ids=tokens, use_cache=False, **where)
    return out.logits, mark


def _without_memory(module: nn.Module) -> Any:
    """Return a copy whose tensors have shapes only. They are bf16: some kernels for experts know nothing else."""

    def hollow(tensor: Tensor) -> Tensor:
        dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
        empty = torch.empty_like(tensor, device="meta", dtype=dtype)
        return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty

    return deepcopy(module, {id(each): hollow(each) for each in (*module.parameters(), *module.buffers())})
