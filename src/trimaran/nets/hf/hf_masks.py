"""Keeps the documents of a row apart in Hugging Face models that build their own attention masks.

Most models derive documents from positions that restart. Some ignore positions when they build a mask. A call that
computes no layer shows which masks a model gives its layers.
"""

from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.nets.decoder.attention_context import document_positions

try:
    from transformers.masking_utils import create_masks_for_generate
except ImportError:
    create_masks_for_generate = None

LAYER_MASKS_ATTRIBUTE = "trimaran_layer_masks"  # the attribute of a model that needs the masks of `layer_masks`
NUM_TOKENS = 8


def choose_document_masks(module: Any) -> bool:
    """Return whether masks keep documents apart in a model with attention windows. True, too, if no call shows it.

    A model whose own masks do not isolate documents gets those of `layer_masks` from now on.
    """
    documents = torch.arange(NUM_TOKENS)[None] // (NUM_TOKENS // 2)
    positions = document_positions(documents)
    if _isolate(_given_masks(module, {"position_ids": positions})):
        return True
    if create_masks_for_generate is None:
        return False
    if not _isolate(
        _given_masks(module, {"position_ids": positions, "attention_mask": layer_masks(module, positions)})
    ):
        return False
    setattr(module, LAYER_MASKS_ATTRIBUTE, True)
    return True


def needs_layer_masks(module: nn.Module) -> bool:
    """Return whether documents are kept apart by the masks of `layer_masks`."""
    return getattr(module, LAYER_MASKS_ATTRIBUTE, False)


def layer_masks(module: Any, positions: Tensor) -> Any:
    """Return masks by kind of layer that keep documents apart; `positions` [B, T] restart with each document."""
    assert create_masks_for_generate is not None, "a model of transformers before 5 does not need layer masks"
    device = positions.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
    shape_only = torch.empty(*positions.shape, 0, dtype=dtype, device=positions.device)
    return create_masks_for_generate(
        config=module.config.get_text_config(),
        inputs_embeds=shape_only,
        attention_mask=None,
        past_key_values=None,
        position_ids=positions,
    )


def _isolate(masks: list[Tensor | None]) -> bool:
    """Return whether no mask lets a token of the second document attend to the first."""
    return all(
        mask is not None and not _attended(mask)[..., NUM_TOKENS // 2 :, : NUM_TOKENS // 2].any() for mask in masks
    )


def _attended(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask == 0


def _given_masks(module: Any, arguments: Mapping[str, Any]) -> list[Tensor | None]:
    """Return the mask that each layer gets in a call; an empty list if the model does not run without its layers."""
    copy = deepcopy(module, {id(each): _on_meta(each) for each in module.parameters()})
    masks: list[Tensor | None] = []

    def record(stream: Tensor, *args: Any, **options: Any) -> Tensor:
        given = [each for each in (*args, *options.values()) if isinstance(each, Tensor)]
        masks.append(next((each for each in given if each.ndim == 4 and each.shape[-2:] == (NUM_TOKENS,) * 2), None))
        return stream

    lists = [each for each in copy.modules() if isinstance(each, nn.ModuleList)]
    for layer in max(lists, key=lambda each: sum(parameter.numel() for parameter in each.parameters()), default=()):
        layer.forward = record
    embedding = copy.get_input_embeddings()
    embedding.forward = lambda tokens: torch.zeros(*tokens.shape, embedding.embedding_dim)
    with torch.no_grad(), suppress(Exception):  # what follows the layers has no values; the masks are known by then
        copy(input_ids=torch.zeros(1, NUM_TOKENS, dtype=torch.long), use_cache=False, **arguments)
    return masks


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
