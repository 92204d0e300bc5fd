"""Attention inside segments: three ways to compute it, all of which are what a mask gives."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen as varlen
from torch import Tensor
from torch._dynamo.utils import counters

from trimaran.core import Plan
from trimaran.data.step_batch import StepBatch
from trimaran.models import PRESETS
from trimaran.nets import Decoder, decoder_network, initialise, varlen_attention
from trimaran.nets.varlen_attention import Segments, attention, document_mask, run_lengths, segment_attention
from trimaran.parallel.memory.recompute import apply_recompute

HERE = torch.device("cpu")
LENGTHS = (5, 1, 10, 16, 3, 3, 3, 7)  # three rows of 16
SPEC = replace(PRESETS["tiny"], layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=64)
CALLS: list[str] = []


def scores(query: Tensor, key: Tensor, bounds: Tensor, causal: bool, scale: float | None) -> Tensor:
    lengths = bounds.diff().long()
    ids = torch.arange(len(lengths)).repeat_interleave(lengths)[None]
    seen = document_mask(ids, causal=causal)[0]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    found = torch.einsum("qhd,khd->hqk", query, key) * factor
    return found.masked_fill(~seen, -torch.inf).softmax(-1)


def repeated(query: Tensor, *others: Tensor) -> list[Tensor]:
    repeats = query.shape[1] // others[0].shape[1]
    return [each.float().repeat_interleave(repeats, 1) for each in others]


@pytest.fixture(scope="module")
def kernel() -> None:
    """The CUDA kernel, in plain arithmetic for the CPU: torch has none there."""

    @torch.autocast("cpu", enabled=False)
    def forward(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
                is_causal: bool = False, scale: float | None = None, *_: Any) -> tuple[Tensor, ...]:  # fmt: skip
        CALLS.append("forward")
        assert torch.equal(cu_seq_q, cu_seq_k)
        assert cu_seq_q.dtype == torch.int32
        assert int(cu_seq_q.diff().max()) <= max_q == max_k
        key, value = repeated(query, key, value)
        shares = scores(query.float(), key, cu_seq_q, is_causal, scale)
        out = torch.einsum("hqk,khd->qhd", shares, value).to(query.dtype).contiguous()
        return out, torch.zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)

    def backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
                 cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, is_causal: bool, rng_state: Tensor,
                 scale: float | None = None, *_: Any) -> tuple[Tensor, ...]:  # fmt: skip
        CALLS.append("backward")
        groups = (query.shape[1] // key.shape[1], query.shape[-1] ** -0.5 if scale is None else scale)
        wide_key, wide_value = repeated(query, key, value)
        shares, grad = scores(query.float(), wide_key, cu_seq_q, is_causal, scale), grad_out.float()
        to_shares = torch.einsum("qhd,khd->hqk", grad, wide_value)
        to_scores = shares * (to_shares - (to_shares * shares).sum(-1, keepdim=True)) * groups[1]
        grads = (
            torch.einsum("hqk,khd->qhd", to_scores, wide_key),
            torch.einsum("hqk,qhd->khd", to_scores, query.float()).unflatten(1, (-1, groups[0])).sum(2),
            torch.einsum("hqk,qhd->khd", shares, grad).unflatten(1, (-1, groups[0])).sum(2),
        )
        return tuple(each.to(query.dtype).contiguous() for each in grads)

    operators: Any = varlen
    operators._varlen_attn.register_kernel("cpu")(forward)
    operators._varlen_attn_backward.register_kernel("cpu")(backward)


@pytest.fixture
def flash(kernel: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """As if the CPU had that kernel; the list tells how often it was called."""
    monkeypatch.setattr(varlen_attention, "has_flash", lambda device: True)
    CALLS.clear()
    yield CALLS
    CALLS.clear()


def documents_of(lengths: Sequence[int], rows: int) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).view(rows, -1)


def drawn(rows: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(rows, length, heads, 8) for heads in (4, 2, 2, 4)]  # as the projections leave them
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
def test_attention_inside_segments_is_what_a_mask_gives(
    causal: bool, dtype: torch.dtype, lengths: tuple[int, ...], call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(varlen_attention.CALL, "cpu", call)
    tensors, documents = drawn(3, 16, dtype), documents_of(lengths, 3)
    found = Segments.of_documents(documents)
    assert found.lengths == lengths
    expected = with_gradients(
        lambda q, k, v: attention(q, k, v, document_mask(documents, causal=causal), scale=0.3),
        [each.float() for each in tensors],
    )
    ours = with_gradients(lambda *qkv: segment_attention(*qkv, found, causal=causal, scale=0.3), tensors)
    for one, other in zip(ours, expected, strict=True):
        assert one.dtype == dtype
        tolerance = 2e-6 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(one.float(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_the_kernel_for_any_lengths_is_given_rows_end_to_end(causal: bool, flash: list[str]) -> None:
    tensors, documents = drawn(3, 16, torch.bfloat16), documents_of(LENGTHS, 3)
    expected = with_gradients(
        lambda q, k, v: attention(q, k, v, document_mask(documents, causal=causal)),
        [each.float() for each in tensors],
    )
    found = Segments.of_documents(documents)
    ours = with_gradients(lambda *qkv: segment_attention(*qkv, found, causal=causal), tensors)
    assert flash == ["forward", "backward"]
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=3e-2, atol=3e-2)


def test_what_the_kernel_cannot_do_goes_another_way(flash: list[str]) -> None:
    documents = documents_of(LENGTHS, 3)
    found = Segments.of_documents(documents)
    for tensors in (drawn(3, 16, torch.float32), [each[..., :6] for each in drawn(3, 16, torch.bfloat16)]):
        query, key, value, _ = tensors
        out = segment_attention(query, key, value, found, causal=True)
        expected = attention(query.float(), key.float(), value.float(), document_mask(documents))
        torch.testing.assert_close(out.float(), expected, rtol=3e-2, atol=3e-2)
    assert flash == []


@pytest.mark.parametrize("call", [0, 1 << 60], ids=["apart", "mask"])
def test_what_happens_in_one_segment_changes_no_bit_of_another(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(varlen_attention.CALL, "cpu", call)
    found = Segments.of_lengths(LENGTHS, 48, HERE)
    query, key, value, _ = drawn(1, 48, torch.float32)
    before = segment_attention(query, key, value, found, causal=False)
    key[:, :, 16:32] = 7
    value[:, :, 16:32] = -9
    after = segment_attention(query, key, value, found, causal=False)
    changed = (before != after).any(-1).any(1)[0]
    assert changed[16:32].all()
    assert not changed[:16].any()
    assert not changed[32:].any()


def test_segments_of_lengths_are_those_of_ids() -> None:
    by_length, by_id = (
        Segments.of_lengths(torch.tensor(LENGTHS), 48, HERE),
        Segments.of_documents(documents_of(LENGTHS, 1)),
    )
    assert by_length.lengths == by_id.lengths == LENGTHS
    assert torch.equal(by_length.ids, by_id.ids)
    assert by_length.longest == by_id.longest == 16


def test_nothing_attends_to_nothing() -> None:
    query, key, value, _ = drawn(1, 0, torch.float32)
    out = segment_attention(query, key, value, Segments.of_lengths((), 0, HERE), causal=False)
    assert out.shape == query.shape


def test_layers_share_one_mask() -> None:
    found = Segments.of_documents(documents_of(LENGTHS, 3))
    assert found.mask(causal=True) is found.mask(causal=True)
    assert not torch.equal(found.mask(causal=True), found.mask(causal=False))


def test_runs_end_with_their_row() -> None:
    assert run_lengths(torch.tensor([[0, 0, 1], [1, 1, 1], [0, 1, 0]])) == (2, 1, 3, 1, 1, 1)


def test_many_short_documents_are_computed_apart_and_small_rows_under_a_mask() -> None:
    apart = varlen_attention._apart_is_cheaper
    assert apart(torch.empty(1, 8, 4096, 64), (1024,) * 4, causal=True)
    assert apart(torch.empty(1, 8, 4096, 64), (4096,), causal=True)  # without a mask, half of the pairs are left out
    assert not apart(torch.empty(1, 8, 4096, 64), (4096,), causal=False)
    assert not apart(torch.empty(2, 4, 64, 16), (16, 48, 31, 33), causal=True)


def test_a_batch_on_a_device_still_has_its_outlines_on_the_host() -> None:
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


def test_compiled_layers_take_other_documents_without_being_compiled_again(flash: list[str]) -> None:
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


def test_selective_recompute_keeps_what_the_kernel_gave(flash: list[str]) -> None:
    kept = recomputed("selective")
    assert flash.count("forward") == SPEC.layers
    flash.clear()
    anew = recomputed("full")
    assert flash.count("forward") == 2 * SPEC.layers
    assert all(torch.equal(one, other) for one, other in zip(kept, anew, strict=True))
