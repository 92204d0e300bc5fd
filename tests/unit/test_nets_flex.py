"""Flex attention with soft caps, sinks, windows and documents: its tiles, and its result without a kernel."""

import pytest
import torch
from torch import Tensor

from trimaran.nets import (
    BLOCK,
    AttentionOptions,
    Segments,
    block_mask,
    causal_window,
    document_mask,
    flexible_attention,
    masked_attention,
)

LENGTH = 4 * BLOCK


def documents(*lengths: int) -> Tensor:
    ids = torch.arange(len(lengths)).flip(0) * 3  # any numbers, as long as neighbours differ
    return torch.repeat_interleave(ids, torch.tensor(lengths))[None]


CASES = {
    "causal": None,
    "one document": documents(LENGTH),
    "documents": documents(100, 30, 253, 129),
    "whole blocks": documents(2 * BLOCK, BLOCK, BLOCK),
}


def dense_mask(ids: Tensor | None, window: int | None) -> Tensor:
    positions = torch.arange(LENGTH)
    mask = causal_window(positions, positions, window)[None, None]
    return mask if ids is None else mask & document_mask(ids)


@pytest.mark.parametrize("ids", CASES.values(), ids=CASES)
@pytest.mark.parametrize("window", [None, 1, 128, 200])
def test_tiles_cover_exactly_what_a_mask_allows(ids: Tensor | None, window: int | None) -> None:
    found, mask = block_mask(ids, LENGTH, window, torch.device("cpu")), dense_mask(ids, window)
    tiles = mask.view(1, 4, BLOCK, 4, BLOCK).permute(0, 1, 3, 2, 4).flatten(3)
    full = torch.zeros(4, 4, dtype=torch.bool)
    for row in range(4):
        assert found.full_kv_num_blocks is not None
        assert found.full_kv_indices is not None
        full[row, found.full_kv_indices[0, 0, row, : found.full_kv_num_blocks[0, 0, row]].long()] = True
    computed = found.to_dense()[0, 0].bool()
    assert not (tiles.any(-1)[0] & ~computed).any(), "every tile with a pair is computed"
    assert not (full & ~tiles.all(-1)[0]).any(), "a tile without a mask needs none"
    assert torch.equal(full, tiles.all(-1)[0]), "tiles that need no mask have none"


@pytest.mark.parametrize(("softcap", "has_sinks"), [(5.0, False), (None, True), (5.0, True)])
@torch.no_grad()
def test_result_is_that_of_stored_scores(softcap: float | None, has_sinks: bool) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, LENGTH, 16) for heads in (4, 2, 2))
    sinks, ids = torch.randn(4) if has_sinks else None, CASES["documents"]
    assert ids is not None
    options = AttentionOptions(scale=0.3, window=150, softcap=softcap, sinks=sinks)
    found = flexible_attention(query, key, value, Segments.of_documents(ids), options)
    torch.testing.assert_close(found, masked_attention(query, key, value, dense_mask(ids, 150), options))
