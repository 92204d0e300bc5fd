"""Attention over parts of sequences: every method of context parallelism against one process."""

import os
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from tests.cases import slow
from tests.ranks import run_ranks
from trimaran.nets import AttentionOptions, causal_window, masked_attention
from trimaran.parallel import CONTEXTS
from trimaran.train import join_process_group, read_rank_info

DOCUMENTS = torch.tensor([[0] * 3 + [1] * 9 + [2] * 20 + [3] * 4 + [4] * 12, [0] * 48])
SHORT = torch.arange(48).div(5, rounding_mode="floor").expand(2, 48).contiguous()
CASES: dict[str, tuple[Tensor | None, dict[str, Any]]] = {
    "causal": (None, {}),
    "documents": (DOCUMENTS, {}),
    "short documents": (SHORT, {"scale": 0.3}),
    "window": (None, {"window": 7}),
    "window of documents": (DOCUMENTS, {"window": 11}),
    "window of all": (None, {"window": 48}),
    "soft cap": (DOCUMENTS, {"softcap": 1.5}),
    "sinks": (None, {"sinks": True}),
    "everything": (DOCUMENTS, {"window": 13, "softcap": 2.0, "sinks": True, "scale": 0.5}),
}


def tensors_of(key_heads: int, value_dim: int) -> list[Tensor]:
    """Return query, key, value, the weight of the output in the loss, and sinks."""
    torch.manual_seed(0)
    query, weight = torch.randn(2, 12, 48, 8), torch.randn(2, 12, 48, value_dim)
    return [query, torch.randn(2, key_heads, 48, 8), torch.randn(2, key_heads, 48, value_dim), weight, torch.randn(12)]


def options_of(settings: dict[str, Any], sinks: Tensor) -> AttentionOptions:
    options = AttentionOptions(**{name: value for name, value in settings.items() if name != "sinks"})
    return replace(options, sinks=sinks) if "sinks" in settings else options


def expected(case: str, tensors: list[Tensor]) -> list[Tensor]:
    """Return the output and the gradients of query, key, value and sinks, by a mask over the full sequence."""
    documents, settings = CASES[case]
    query, key, value, weight, sinks = tensors
    inputs = [each.clone().requires_grad_() for each in (query, key, value, sinks)]
    options = options_of(settings, inputs[3])
    mask = causal_window(torch.arange(48), torch.arange(48), options.window)
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    else:
        mask = mask[None, None]
    out = masked_attention(inputs[0], inputs[1], inputs[2], mask, options)
    (out * weight).sum().backward()
    return [out.detach(), *(torch.zeros_like(each) if each.grad is None else each.grad for each in inputs)]


def attend_in_parts(kind: str, tensors: list[Tensor]) -> dict[str, list[np.ndarray]]:
    """Return the same of this method for every case: full tensors, in order, equal on every rank."""
    join_process_group(read_rank_info(os.environ))
    assert dist.group.WORLD is not None
    context, found = CONTEXTS[kind](dist.group.WORLD), {}

    def mine(x: Tensor) -> Tensor:  # contexts split dim 1, these have their positions in dim 2
        return context.shard(x.transpose(1, 2)).transpose(1, 2)

    for case, (documents, settings) in CASES.items():
        query, key, value, weight, sinks = tensors
        parts = [mine(each).detach().requires_grad_() for each in (query, key, value)]
        sinks = sinks.clone().requires_grad_()
        options = options_of(settings, sinks)
        scope = None if documents is None else context.scope(documents)
        out = context.attend(parts[0], parts[1], parts[2], scope, options)
        (out * mine(weight)).sum().backward()
        shown = [out, *(each.grad for each in parts if each.grad is not None)]
        whole = [context.gather(each.transpose(1, 2)).transpose(1, 2).detach() for each in shown]
        of_sinks = torch.zeros(12) if sinks.grad is None else context.all_reduce(sinks.grad)
        found[case] = [each.numpy() for each in (*whole, of_sinks)]
    return found


@pytest.mark.parametrize(
    ("kind", "num_ranks", "key_heads", "value_dim"),
    [
        ("gather", 2, 4, 8),
        slow(("gather", 4, 4, 8)),
        slow(("exchange", 2, 4, 8)),
        ("exchange", 4, 2, 8),  # each key head goes to two ranks
        slow(("ring", 2, 4, 8)),
        ("ring", 3, 12, 6),  # values that are narrower than keys
        slow(("ring", 4, 1, 8)),
    ],
)
def test_attention_over_parts_of_a_sequence_is_exact(kind: str, num_ranks: int, key_heads: int, value_dim: int) -> None:
    tensors = tensors_of(key_heads, value_dim)
    whole = {case: expected(case, tensors) for case in CASES}
    for answers in run_ranks(num_ranks, attend_in_parts, kind, tensors):
        for case, parts in answers.items():
            names = ("output", "query", "key", "value", "sinks")
            for name, ours, theirs in zip(names, parts, whole[case], strict=True):
                message = partial("{}, {}: {}".format, case, name)
                torch.testing.assert_close(torch.from_numpy(ours), theirs, rtol=1e-5, atol=3e-6, msg=message)


def compiled_ring(tensors: list[Tensor]) -> int:
    """Return how often a compiled layer's attention was compiled, for three batches with other documents."""
    join_process_group(read_rank_info(os.environ))
    assert dist.group.WORLD is not None
    context = CONTEXTS["ring"](dist.group.WORLD)
    query, key, value = (context.shard(each.transpose(1, 2)).transpose(1, 2) for each in tensors[:3])
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    def attend(query: Tensor, scope: Any) -> Tensor:
        return 2.0 * context.attend(query, key, value, scope)

    run = torch.compile(attend, backend=count, fullgraph=True)
    for documents in (DOCUMENTS, SHORT, torch.zeros_like(SHORT)):
        found = []
        for function in (attend, run):
            given = query.detach().requires_grad_()
            out = function(given, context.scope(documents))
            out.square().sum().backward()
            assert given.grad is not None
            found.append((out.detach(), given.grad))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs)
    return len(graphs)


@pytest.mark.slow
def test_a_compiled_ring_is_one_graph_for_all_documents() -> None:
    assert max(run_ranks(2, compiled_ring, tensors_of(4, 8))) <= 2
