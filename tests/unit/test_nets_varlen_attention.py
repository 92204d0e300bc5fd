"""Attention inside segments: all three implementations equal attention with a mask."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen as varlen
from torch import Tensor
from torch._dynamo.utils import counters

from trimaran.core import Plan
from trimaran.data import StepBatch
from trimaran.models import PRESETS
from trimaran.nets import (
    Decoder,
    Segments,
    decoder_network,
    document_mask,
    initialise,
    run_lengths,
    segment_attention,
    varlen_attention,
)
from trimaran.nets.varlen_attention import attention
from trimaran.parallel import apply_recompute

HERE = torch.device("cpu")
LENGTHS = (5, 1, 10, 16, 3, 3, 3, 7)  # three rows of 16
SPEC = replace(PRESETS["tiny"], layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=64)
CALLS: list[str] = []


def attention_weights(query: Tensor, key: Tensor, cu_seqlens: Tensor, causal: bool, scale: float | None) -> Tensor:
    lengths = cu_seqlens.diff().long()
    ids = torch.arange(len(lengths)).repeat_interleave(lengths)[None]
    mask = document_mask(ids, causal=causal)[0]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("qhd,khd->hqk", query, key) * factor
    return scores.masked_fill(~mask, -torch.inf).softmax(-1)


def repeated(query: Tensor, *others: Tensor) -> list[Tensor]:
    repeats = query.shape[1] // others[0].shape[1]
    return [each.float().repeat_interleave(repeats, 1) for each in others]


@pytest.fixture(scope="module")
def kernel() -> None:
    """Register a plain CPU implementation of the CUDA kernel: torch has none."""

    @torch.autocast("cpu", enabled=False)
    def forward(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
                is_causal: bool = False, scale: float | None = None, *_: Any) -> tuple[Tensor, ...]:  # fmt: skip
        CALLS.append("forward")
        assert torch.equal(cu_seq_q, cu_seq_k)
        assert cu_seq_q.dtype == torch.int32
        assert int(cu_seq_q.diff().max()) <= max_q == max_k
        key, value = repeated(query, key, value)
        weights = attention_weights(query.float(), key, cu_seq_q, is_causal, scale)
        out = torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype).contiguous()
        return out, torch.zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)

    def backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
                 cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, is_causal: bool, rng_state: Tensor,
                 scale: float | None = None, *_: Any) -> tuple[Tensor, ...]:  # fmt: skip
        CALLS.append("backward")
        groups = (query.shape[1] // key.shape[1], query.shape[-1] ** -0.5 if scale is None else scale)
        wide_key, wide_value = repeated(query, key, value)
        weights, grad = attention_weights(query.float(), wide_key, cu_seq_q, is_causal, scale), grad_out.float()
        grad_weights = torch.einsum("qhd,khd->hqk", grad, wide_value)
        grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True)) * groups[1]
        grads = (
            torch.einsum("hqk,khd->qhd", grad_scores, wide_key),
            torch.einsum("hqk,qhd->khd", grad_scores, query.float()).unflatten(1, (-1, groups[0])).sum(2),
            torch.einsum("hqk,qhd->khd", weights, grad).unflatten(1, (-1, groups[0])).sum(2),
        )
        return tuple(each.to(query.dtype).contiguous() for each in grads)

    operators: Any = varlen
    operators._varlen_attn.register_kernel("cpu")(forward)
    operators._varlen_attn_backward.register_kernel("cpu")(backward)


@pytest.fixture
def flash(kernel: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Pretend that the CPU has the kernel; return the list of its calls."""
    monkeypatch.setattr(varlen_attention, "has_flash", lambda device: True)
    CALLS.clear()
    yield CALLS
    CALLS.clear()


def documents_of(lengths: Sequence[int], rows: int) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).view(rows, -1)


def random_qkv(rows: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(rows, length, heads, 8) for heads in (4, 2, 2, 4)]  # the layout of the projections' outputs
    return [torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes]


def with_gradients(work: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    inputs = [each.detach().clone().requires_grad_() for each in tensors[:3]]
    out = work(*inputs)
    out.backward(tensors[3].to(out.dtype))
    return [out.detach(), *(each.grad for each in inputs if each.grad is not None)]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [LENGTHS, (16,) * 3, (4,) * 12], ids=["mixed", "whole rows", "equal"])
@pytest.mark.parametrize("call", [0, 1 << 60], ids=["apart", "mask"])
def test_attention_inside_segments_equals_attention_with_a_mask(
    causal: bool, dtype: torch.dtype, lengths: tuple[int, ...], call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(varlen_attention.CALL_COST, "cpu", call)
    tensors, documents = random_qkv(3, 16, dtype), documents_of(lengths, 3)
    segments = Segments.of_documents(documents)
    assert segments.lengths == lengths
    expected = with_gradients(
        lambda q, k, v: attention(q, k, v, document_mask(documents, causal=causal), scale=0.3),
        [each.float() for each in tensors],
    )
    ours = with_gradients(lambda q, k, v: segment_attention(q, k, v, segments, causal=causal, scale=0.3), tensors)
    for one, other in zip(ours, expected, strict=True):
        assert one.dtype == dtype
        tolerance = 2e-6 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(one.float(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_the_varlen_kernel_gets_concatenated_rows(causal: bool, flash: list[str]) -> None:
    tensors, documents = random_qkv(3, 16, torch.bfloat16), documents_of(LENGTHS, 3)
    expected = with_gradients(
        lambda q, k, v: attention(q, k, v, document_mask(documents, causal=causal)),
        [each.float() for each in tensors],
    )
    segments = Segments.of_documents(documents)
    ours = with_gradients(lambda q, k, v: segment_attention(q, k, v, segments, causal=causal), tensors)
    assert flash == ["forward", "backward"]
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=3e-2, atol=3e-2)


def test_inputs_that_the_kernel_does_not_support_use_another_implementation(flash: list[str]) -> None:
    documents = documents_of(LENGTHS, 3)
    segments = Segments.of_documents(documents)
    for tensors in (random_qkv(3, 16, torch.float32), [each[..., :6] for each in random_qkv(3, 16, torch.bfloat16)]):
        query, key, value, _ = tensors
        out = segment_attention(query, key, value, segments, causal=True)
        expected = attention(query.float(), key.float(), value.float(), document_mask(documents))
        torch.testing.assert_close(out.float(), expected, rtol=3e-2, atol=3e-2)
    assert flash == []


@pytest.mark.parametrize("call", [0, 1 << 60], ids=["apart", "mask"])
def test_a_change_in_one_segment_changes_no_bit_of_another(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(varlen_attention.CALL_COST, "cpu", call)
    segments = Segments.of_lengths(LENGTHS, 48, HERE)
    query, key, value, _ = random_qkv(1, 48, torch.float32)
    before = segment_attention(query, key, value, segments, causal=False)
    key[:, :, 16:32] = 7
    value[:, :, 16:32] = -9
    after = segment_attention(query, key, value, segments, causal=False)
    changed = (before != after).any(-1).any(1)[0]
    assert changed[16:32].all()
    assert not changed[:16].any()
    assert not changed[32:].any()


def test_segments_of_lengths_equal_those_of_ids() -> None:
    by_length, by_id = (
        Segments.of_lengths(torch.tensor(LENGTHS), 48, HERE),
        Segments.of_documents(documents_of(LENGTHS, 1)),
    )
    assert by_length.lengths == by_id.lengths == LENGTHS
    assert torch.equal(by_length.ids, by_id.ids)
    assert by_length.max_length == by_id.max_length == 16


def test_attention_over_zero_positions_is_empty() -> None:
    query, key, value, _ = random_qkv(1, 0, torch.float32)
    out = segment_attention(query, key, value, Segments.of_lengths((), 0, HERE), causal=False)
    assert out.shape == query.shape


def test_layers_share_one_mask() -> None:
    segments = Segments.of_documents(documents_of(LENGTHS, 3))
    assert segments.mask(causal=True) is segments.mask(causal=True)
    assert not torch.equal(segments.mask(causal=True), segments.mask(causal=False))


def test_run_lengths_end_at_the_end_of_a_row() -> None:
    assert run_lengths(torch.tensor([[0, 0, 1], [1, 1, 1], [0, 1, 0]])) == (2, 1, 3, 1, 1, 1)


def test_many_short_documents_are_computed_by_length_and_small_rows_with_a_mask() -> None:
    is_cheaper = varlen_attention._by_length_is_cheaper
    assert is_cheaper(torch.empty(1, 8, 4096, 64), (1024,) * 4, causal=True)
    assert is_cheaper(torch.empty(1, 8, 4096, 64), (4096,), causal=True)  # without a mask half of the pairs are skipped
    assert not is_cheaper(torch.empty(1, 8, 4096, 64), (4096,), causal=False)
    assert not is_cheaper(torch.empty(2, 4, 64, 16), (16, 48, 31, 33), causal=True)


def test_a_batch_on_a_device_keeps_documents_and_grids_on_the_host() -> None:
    documents, grids = torch.arange(8).view(2, 1, 4), torch.tensor([[2, 2], [4, 2], [2, 6]])
    batch = StepBatch(0, {"documents": documents, "grids": grids}, 0, offsets={"grids": (0, 1, 3)})
    micro = batch.to(torch.device("meta")).micro(1)
    assert micro["documents"].is_meta
    assert torch.equal(micro["host_documents"], documents[1])
    assert torch.equal(micro["host_grids"], grids[1:])


def decoder() -> Decoder:
    module = Decoder(SPEC)
    initialise(module, seed=0, spec=SPEC)
    return module


def step(module: Decoder, lengths: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    tokens = torch.randint(0, SPEC.vocab, (3, 16), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        logits, _ = module(tokens=tokens, documents=documents_of(lengths, 3), lengths=lengths)
    module.zero_grad()
    logits.float().square().mean().backward()
    return logits.detach(), [each.grad.clone() for each in module.parameters() if each.grad is not None]


@pytest.mark.slow
def test_compiled_layers_do_not_recompile_for_other_documents(flash: list[str]) -> None:
    eager, compiled = decoder(), decoder()
    for layer in compiled.blocks:
        layer.compile(backend="aot_eager", fullgraph=True)
    graphs = []
    torch._dynamo.reset()
    counters.clear()
    for lengths in (LENGTHS, (7, 9, 6, 10, 8, 8), (16,) * 3, (2,) * 24, (3, 13, 15, 1, 8, 8), (1, 15, 16, 16)):
        for one, other in zip(step(compiled, lengths)[1], step(eager, lengths)[1], strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1] * 6
    assert not counters["graph_break"]


def recomputed(how: str) -> list[Tensor]:
    network = decoder_network(SPEC)
    initialise(network.module, seed=0, spec=SPEC)
    apply_recompute(network, Plan.model_validate({"recompute": how}), None)  # pyrefly: ignore[bad-argument-type]
    return step(network.module, LENGTHS)[1]  # pyrefly: ignore[bad-argument-type]


def test_selective_recompute_saves_the_output_of_the_kernel(flash: list[str]) -> None:
    selective = recomputed("selective")
    assert flash.count("forward") == SPEC.layers
    flash.clear()
    full = recomputed("full")
    assert flash.count("forward") == 2 * SPEC.layers
    assert all(torch.equal(one, other) for one, other in zip(selective, full, strict=True))
