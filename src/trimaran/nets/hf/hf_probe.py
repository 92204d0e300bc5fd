"""Finds out what a Hugging Face model does with its head and its attention, by a call on the meta device."""

import logging
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.nets.hf.hf_attention import SCOPE_ARGUMENT, attention_difference, is_noncausal, unsupported_option

try:
    from transformers import AttentionInterface
except ImportError:
    AttentionInterface = None

NAME = "trimaran_probe"
OWN_MASK = "masks of its own"
TOKENS_SHAPE = (2, 8)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """`ends_in_head`: the logits are the head's output, without further processing.

    `attention_difference`: why our attention cannot replace the model's; empty if it can. `unsupported_option`: what
    the model attends with in training and our attention does not support; empty if there is no such option.
    """

    ends_in_head: bool
    attention_difference: str
    unsupported_option: str = ""
    is_noncausal: bool = False


@dataclass(slots=True)
class _CallRecord:
    """What the hooks recorded during the call."""

    head_calls: int = 0
    attention_calls: int = 0
    attention_difference: str = ""
    unsupported_option: str = ""
    is_noncausal: bool = False


def probe(module: Any) -> ProbeResult:
    """Return what a meta-device copy of the model does with a few tokens. `module` does not change.

    A model that does not run on the meta device keeps its own attention and head; the log says why.
    """
    record = _CallRecord()
    try:
        logits, head_output = _call(_meta_copy(module).train(), record)
    except Exception as error:  # any error of the model's own code
        log.info("%s does not run on the meta device: %s: %s", type(module).__name__, type(error).__name__, error)
        return ProbeResult(ends_in_head=False, attention_difference="does not run on the meta device")
    difference = attention_difference(module) or record.attention_difference
    if not difference and not record.attention_calls:
        difference = "has its own attention implementation"
    ends_in_head = logits is head_output and record.head_calls == 1
    return ProbeResult(ends_in_head, difference, record.unsupported_option, record.is_noncausal)


def _call(meta_model: Any, record: _CallRecord) -> tuple[Any, Tensor]:
    """Return the logits of a call, and the tensor that the head returned in it."""
    assert AttentionInterface is not None, "there is no model without transformers"
    batch, length = TOKENS_SHAPE
    head_output = torch.empty(1 + batch * length, device="meta")  # as a head that computes the loss returns it
    scope = object()

    def head(input: Tensor) -> Tensor:
        record.head_calls += 1
        return head_output

    def attend(
        part: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        record.attention_calls += 1
        record.is_noncausal = record.is_noncausal or is_noncausal(part, options)
        own_mask = OWN_MASK if attention_mask is not None else ""
        record.unsupported_option = record.unsupported_option or unsupported_option(options) or own_mask
        reasons = {
            "does not pass extra arguments on to its attention": options.get(SCOPE_ARGUMENT) is not scope,
            "builds its own attention masks": attention_mask is not None,
            "has non-causal attention": is_noncausal(part, options),
            "has values of another head size than keys": value.shape[-1] != query.shape[-1],
            f"attends with {unsupported_option(options)}": bool(unsupported_option(options)),
        }
        if not record.attention_difference:
            record.attention_difference = next((reason for reason, applies in reasons.items() if applies), "")
        return value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    if isinstance(last := meta_model.get_output_embeddings(), nn.Linear):
        last.forward = head
    arguments: dict[str, Any] = {SCOPE_ARGUMENT: scope}
    if getattr(meta_model, "_supports_attention_backend", False):
        AttentionInterface.register(NAME, attend)
        meta_model.set_attn_implementation(NAME)
    else:  # with a mask given the model does not build one, which would read values
        arguments = {"attention_mask": torch.ones(batch, 1, length, length, dtype=torch.bool, device="meta")}
    tokens = torch.zeros(TOKENS_SHAPE, dtype=torch.long, device="meta")
    with torch.no_grad():
        out = meta_model(input_ids=tokens, position_ids=tokens, use_cache=False, **arguments)
    return out.logits, head_output


def _meta_copy(module: nn.Module) -> Any:
    """Return a copy on the meta device, in bf16: some kernels for experts support nothing else."""

    def on_meta(tensor: Tensor) -> Tensor:
        dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
        empty = torch.empty_like(tensor, device="meta", dtype=dtype)
        return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty

    return deepcopy(module, {id(each): on_meta(each) for each in (*module.parameters(), *module.buffers())})
