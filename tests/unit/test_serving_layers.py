"""Layers for serving, and attention over pages, where there is no GPU; with one see tests/gpu/test_serving.py."""

from dataclasses import replace

import pytest
import torch

from trimaran.models import PRESETS
from trimaran.nets import (
    AttentionOptions,
    Decoder,
    HostLengthsNeededError,
    PagedCache,
    PagedExtension,
    decoder_network,
    has_paged_kernel,
    initialise,
)
from trimaran.serve import join_projections, joined_linear

SPEC = replace(PRESETS["tiny"], layers=2)


def test_one_linear_layer_computes_what_its_parts_compute() -> None:
    parts = [torch.nn.Linear(8, size) for size in (4, 2, 3)]
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    expected = torch.cat([each(x) for each in parts], dim=-1)
    assert torch.allclose(joined_linear(parts)(x), expected, atol=1e-6)


def test_projections_on_a_cpu_stay_apart_and_compute_the_same() -> None:
    network = decoder_network(SPEC)
    initialise(network.module, seed=0, spec=SPEC)
    assert isinstance(network.module, Decoder)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        expected = network.module(tokens=tokens)[0]
        join_projections(network)
        found = network.module(tokens=tokens)[0]
    assert not any(layer.self_attn.joint for layer in network.module.blocks)
    assert torch.allclose(found, expected, atol=1e-5)


def test_attention_without_a_kernel_refuses_a_step_whose_lengths_only_the_device_knows() -> None:
    query, key = torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 1, 8)
    assert not has_paged_kernel(query, key)
    index = torch.zeros(1, dtype=torch.long)
    step = PagedExtension(
        cache=PagedCache(1, 4), positions=index[None], slots=index, page_tables=index[None], context_lengths=index + 1,
        query_starts=torch.tensor([0, 1]), kept=None, query_lengths=(), key_lengths=(), num_decodes=1,
    )  # fmt: skip
    with pytest.raises(HostLengthsNeededError, match="no kernel"):
        step.layer(0).attend(query, key, key, AttentionOptions())
