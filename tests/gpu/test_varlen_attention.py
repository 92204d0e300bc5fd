"""Attention inside segments on a GPU: exact, without a mask, and the host never synchronises."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from trimaran.core import Plan
from trimaran.data import text_batch
from trimaran.models import PRESETS
from trimaran.nets import (
    Decoder,
    Network,
    Segments,
    decoder_network,
    document_mask,
    has_flash,
    initialise,
    segment_attention,
)
from trimaran.nets.varlen_attention import attention
from trimaran.parallel import apply_recompute

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
LENGTHS = (37, 1, 90, 64, 64, 128, 5, 5, 5, 113)  # four rows of 128
SPEC = replace(PRESETS["tiny"], layers=2, hidden=128, heads=8, kv_heads=2, head_dim=16)
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
BOTH_WAYS = pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])


def documents_of(lengths: Sequence[int], rows: int) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).view(rows, -1)


def random_qkv(rows: int, length: int, heads: tuple[int, int], width: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(rows, length, each, width) for each in (heads[0], heads[1], heads[1], heads[0])]
    return [torch.randn(shape, generator=generator).to(GPU, dtype).transpose(1, 2) for shape in shapes]


def with_gradients(work: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    inputs = [each.detach().clone().requires_grad_() for each in tensors[:3]]
    out = work(*inputs)
    out.backward(tensors[3].to(out.dtype))
    return [out.detach(), *(each.grad for each in inputs if each.grad is not None)]


def assert_as_accurate_as_a_mask(segments: Segments, documents: Tensor, tensors: list[Tensor], *, causal: bool) -> None:
    """Compare with fp64; the error of masked attention in the same dtype is the tolerance."""
    mask = document_mask(documents.to(GPU), causal=causal)
    exact = with_gradients(lambda q, k, v: attention(q, k, v, mask), [each.double() for each in tensors])
    masked = with_gradients(lambda q, k, v: attention(q, k, v, mask), tensors)
    ours = with_gradients(lambda q, k, v: segment_attention(q, k, v, segments, causal=causal), tensors)
    for one, other, truth in zip(ours, masked, exact, strict=True):
        error, allowed = (one - truth).norm(), (other - truth).norm()
        assert error <= 2 * allowed + 1e-6 * truth.norm()


@BOTH_WAYS
@HALF
@pytest.mark.parametrize(("heads", "width"), [((8, 2), 64), ((4, 4), 80), ((8, 8), 128), ((2, 1), 16)], ids=str)
def test_the_kernel_equals_attention_with_a_mask(
    causal: bool, dtype: torch.dtype, heads: tuple[int, int], width: int
) -> None:
    assert has_flash(GPU)
    documents = documents_of(LENGTHS, 4)
    segments = Segments.of_documents(documents.to(GPU), LENGTHS)
    assert segments.cu_seqlens is not None
    assert_as_accurate_as_a_mask(segments, documents, random_qkv(4, 128, heads, width, dtype), causal=causal)


@BOTH_WAYS
def test_fp32_has_no_such_kernel_and_is_computed_by_length(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(segment_attention.__globals__["CALL_COST"], "cuda", 0)
    documents = documents_of(LENGTHS, 4)
    segments = Segments.of_documents(documents.to(GPU), LENGTHS)
    assert_as_accurate_as_a_mask(segments, documents, random_qkv(4, 128, (8, 2), 64, torch.float32), causal=causal)
    assert not segments._masks


def test_lengths_on_the_device_work_and_may_be_zero() -> None:
    lengths = (37, 0, 91, 0, 0, 128)
    tensors = random_qkv(1, 256, (4, 4), 80, torch.bfloat16)
    on_device = torch.tensor(lengths).to(GPU)
    torch.cuda.set_sync_debug_mode("error")
    try:
        segments = Segments.of_lengths(on_device, 256, GPU)
        segment_attention(tensors[0], tensors[1], tensors[2], segments, causal=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_as_accurate_as_a_mask(segments, documents_of(lengths, 1), tensors, causal=False)


def test_memory_does_not_grow_with_the_square_of_the_row_length() -> None:
    length, parts = 32768, (8192, 24576)
    tensors = random_qkv(1, length, (2, 1), 64, torch.bfloat16)
    segments = Segments.of_documents(documents_of(parts, 1).to(GPU), parts)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with_gradients(lambda q, k, v: segment_attention(q, k, v, segments, causal=True), tensors)
    assert torch.cuda.max_memory_allocated() - before < 2**27 <= length**2 / 8  # a mask of bits


def network() -> Network:
    created = decoder_network(SPEC)
    initialise(created.module, seed=0, spec=SPEC)
    created.module.to(GPU)
    return created


def step(of: Network, lengths: tuple[int, ...], *, watched: bool = True) -> list[Tensor]:
    """Return the gradients of a bf16 step on a batch from the host. If `watched`, synchronisation is an error."""
    tokens = torch.randint(0, SPEC.vocab, (1, 4, 128), generator=torch.Generator().manual_seed(1))
    batch = text_batch(0, tokens, tokens, documents_of(lengths, 4)[None].int()).to(GPU)
    of.module.zero_grad()
    torch.cuda.set_sync_debug_mode("error" if watched else "default")
    try:
        with torch.autocast("cuda", torch.bfloat16):
            logits, _ = of.forward(batch.micro(0))
        logits.float().logsumexp(-1).square().mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [each.grad.clone() for each in of.module.parameters() if each.grad is not None]


def test_a_step_with_documents_never_synchronises_and_equals_one_with_a_mask() -> None:
    ours, masked = network(), network()
    grads = step(ours, LENGTHS)
    context = masked.context
    context.scope = lambda documents, lengths=None: context.mask(documents)  # pyrefly: ignore[bad-assignment]
    for (name, _), one, other in zip(ours.module.named_parameters(), grads, step(masked, LENGTHS), strict=True):
        assert (one - other).norm() <= 3e-2 * other.norm(), name


def test_compiled_layers_do_not_recompile_for_other_documents() -> None:
    eager, compiled = network(), network()
    for layer in compiled.blocks:
        layer.compile(fullgraph=True)
    torch._dynamo.reset()
    counters.clear()
    graphs = []
    for turn, lengths in enumerate([LENGTHS, (100, 28, 60, 68, 64, 64, 77, 51), (128,) * 4, (4,) * 128]):
        ours = step(compiled, lengths, watched=turn > 0)  # later turns compile nothing
        for one, other in zip(ours, step(eager, lengths), strict=True):
            assert (one - other).norm() <= 3e-2 * other.norm()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1] * 4


@pytest.mark.parametrize(("how", "times"), [("none", 1), ("selective", 1), ("full", 2)])
def test_selective_recompute_does_not_repeat_attention(how: str, times: int) -> None:
    decoder = network()
    apply_recompute(decoder, Plan.model_validate({"recompute": how}), None)  # pyrefly: ignore[bad-argument-type]
    assert isinstance(decoder.module, Decoder)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(decoder, LENGTHS)
    events = profiler.events()
    assert events is not None
    calls = [event for event in events if event.name == "aten::_flash_attention_forward"]
    assert len(calls) == times * SPEC.layers


def test_a_deterministic_step_with_documents_is_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    decoder = network()
    torch.use_deterministic_algorithms(True)
    try:
        first, second = step(decoder, LENGTHS), step(decoder, LENGTHS)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_values_may_be_narrower_than_keys() -> None:
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, 4, 64, width, device="cuda", dtype=torch.bfloat16, requires_grad=True) for width in (48, 48, 32)
    )
    documents = torch.tensor([0] * 20 + [1] * 44)[None].cuda()
    segments = Segments.of_documents(documents, (20, 44))
    assert segments.has_kernel(query, value)
    found = segment_attention(query, key, value, segments, causal=True)
    expected = attention(query, key, value, segments.mask(causal=True))
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    gradients = [torch.autograd.grad(out.float().square().sum(), (query, key, value)) for out in (found, expected)]
    assert all(((ours - theirs).norm() / theirs.norm()) < 2e-2 for ours, theirs in zip(*gradients, strict=True))
