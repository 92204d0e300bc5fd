"""The fused head and loss on a GPU: the kernels are exact, logits are not saved, and the host never synchronises."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trimaran.core import Plan
from trimaran.models import PRESETS
from trimaran.nets import Network, decoder_network, initialise
from trimaran.parallel import autocast
from trimaran.train import IGNORED, LanguageObjective, build_loss_function, head_losses, row_losses, scale_to_dtype
from trimaran.train.loss import cross_entropy

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
SPEC = replace(PRESETS["tiny"], layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=512, vocab=32_000)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
MIB = 2**20


@pytest.fixture(autouse=True)
def free_gpu_memory() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def fail_on_sync() -> Iterator[None]:
    """Fail if the host synchronises with the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def relative_error(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None
    assert expected is not None
    return float((found.double() - expected).norm() / expected.norm())


def labels_of(rows: int, vocab: int) -> Tensor:
    labels = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(2))
    labels[::5] = IGNORED
    labels[1], labels[2] = 0, vocab - 1
    return labels.cuda()


@DTYPES
@pytest.mark.parametrize("vocab", [1, 2, 37, 320, 8192, 8193, 128_256])
def test_the_loss_of_a_row_and_its_gradient_are_exact(dtype: torch.dtype, vocab: int) -> None:
    wide = (4 * torch.randn(23, vocab + 3, generator=torch.Generator().manual_seed(1))).to(GPU, dtype)
    logits, beside, labels = wide[:, :vocab], wide[:, vocab:].clone(), labels_of(23, vocab)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, labels, ignore_index=IGNORED, reduction="none")
    (2 * expected).sum().backward()
    before = logits.clone()
    only = row_losses(logits, labels, grad_scale=None)
    assert torch.equal(logits, before), "without a grad_scale the logits are unchanged"
    losses = row_losses(logits, labels, grad_scale=2.0)
    assert torch.equal(losses, only)
    # The losses are about 20; fp32 holds six of their decimals.
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=2e-6, atol=1e-5)
    assert exact.grad is not None
    rounding = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(logits.double(), exact.grad, rtol=rounding + 2e-6, atol=1e-5)
    assert logits[labels == IGNORED].count_nonzero() == 0
    assert torch.equal(wide[:, vocab:], beside), "nothing is written after the end of a row"


def test_a_row_offset_above_2_to_the_31_is_correct() -> None:
    logits = torch.zeros(16_500, 131_072, dtype=torch.bfloat16, device=GPU)
    logits[-1, 5] = 3.0
    labels = torch.full((16_500,), IGNORED, device=GPU)
    labels[-1] = 5
    losses = row_losses(logits, labels, grad_scale=1.0)
    expected = torch.zeros(131_072, dtype=torch.float64)
    expected[5] = 3.0
    assert float(losses[-1]) == pytest.approx(float(expected.logsumexp(0) - 3.0), rel=1e-6)
    assert losses[:-1].count_nonzero() == 0
    assert float(logits[-1, 5]) == pytest.approx(float(expected.softmax(0)[5]) - 1, rel=1e-2)


def test_a_label_outside_the_vocabulary_makes_the_loss_nan() -> None:
    labels = torch.tensor([3, 50, -1, IGNORED], device=GPU)
    losses = row_losses(torch.randn(4, 50, device=GPU), labels, grad_scale=1.0)
    assert losses.isnan().tolist() == [False, True, True, False]


@DTYPES
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16], ids=str)
def test_a_scaled_tensor_is_rounded_once(dtype: torch.dtype, out: torch.dtype) -> None:
    tensor = torch.randn(1031, 77, device=GPU).to(dtype)
    factor = torch.tensor([0.3], device=GPU)
    expected, address = (tensor.float() * factor).to(out), tensor.data_ptr()
    found = scale_to_dtype(tensor, factor, out)
    assert torch.equal(found, expected)
    assert (found.data_ptr() == address) == (dtype == out)


def test_a_tensor_is_scaled_at_memory_bandwidth() -> None:
    tensor, other = (torch.randn(128_256, 2048, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    factor = torch.tensor([1.0], device=GPU)
    works = {"copy": lambda: other.copy_(tensor), "scale": lambda: scale_to_dtype(tensor, factor, torch.bfloat16)}
    milliseconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(12):
        for name, work in works.items():
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            work()
            ended.record()
            ended.synchronize()
            milliseconds[name].append(began.elapsed_time(ended))
    copy, scale = (median(milliseconds[name][2:]) for name in works)
    print(f"525 MB of bf16: copied in {copy:.2f} ms, scaled in {scale:.2f} ms")
    assert scale < 1.5 * copy


@DTYPES
@pytest.mark.parametrize("rows", [4096, 1024, 1000], ids=["one chunk", "even chunks", "a small last chunk"])
@pytest.mark.parametrize("split", [False, True], ids=["fp32 weights", "weights in the dtype of the matmuls"])
def test_loss_and_gradients_are_those_of_a_cross_entropy(dtype: torch.dtype, rows: int, split: bool) -> None:
    torch.manual_seed(4)
    hidden = torch.randn(4096, 256, device=GPU).to(dtype).requires_grad_()
    weight = nn.Parameter((0.1 * torch.randn(32_000, 256, device=GPU)).to(dtype).to(dtype if split else torch.float32))
    labels, factor = labels_of(4096, 32_000), torch.tensor(16.0 if dtype == torch.float16 else 1 / 3000, device=GPU)
    with fail_on_sync():
        total, each = head_losses(hidden, weight, labels, rows=rows)
        (total * factor).sum().backward()
    plain, matrix = (given.detach().double().requires_grad_() for given in (hidden, weight))
    expected = F.cross_entropy(plain @ matrix.t(), labels, ignore_index=IGNORED, reduction="none")
    (expected.sum() * factor.double()).backward()
    # fp32 matmuls do not use TF32, because torch does not allow it by default.
    bound = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype]
    assert relative_error(total.detach(), expected.sum().detach()) < bound / 10
    assert relative_error(each, expected.detach()) < bound
    assert relative_error(hidden.grad, plain.grad) < bound
    assert relative_error(weight.grad, matrix.grad) < bound
    assert weight.grad is not None
    assert weight.grad.dtype == weight.dtype


def network_on_gpu() -> Network:
    with GPU:
        network = decoder_network(SPEC)
    initialise(network.module, seed=0, spec=SPEC)
    return network


def loss_gradients_and_peak(loss: str) -> tuple[Tensor, dict[str, Tensor | None], float]:
    """Return the summed loss of a micro-batch, its gradients, and the peak memory in MiB."""
    network, plan = network_on_gpu(), Plan.model_validate({"precision": "bf16", "loss": loss})
    loss_function = build_loss_function(LanguageObjective(), network, plan)
    tokens = torch.randint(0, SPEC.vocab, (8, 1025), generator=torch.Generator().manual_seed(5)).cuda()
    inputs = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].contiguous()}
    scale = torch.full((), 1 / inputs["labels"].numel(), device=GPU)
    peak, total = 0.0, torch.zeros(())
    for number in range(2):  # the first may initialise libraries, which synchronises and takes memory
        network.module.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        try:
            with autocast(plan, GPU):
                losses, _ = loss_function(inputs)
            (losses.total * scale).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        total, peak = losses.total.detach(), (torch.cuda.max_memory_allocated() - before) / MIB
        del losses
    return total, {name: each.grad for name, each in network.module.named_parameters()}, peak


def test_a_network_with_a_fused_loss_needs_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS_BYTES", 64 * MIB)
    total, gradients, peak = loss_gradients_and_peak("logits")
    logits_mib = 8 * 1024 * SPEC.vocab * 2 / MIB  # 500
    peaks = {}
    for loss in ("fused", "chunked"):
        our_total, our_gradients, peaks[loss] = loss_gradients_and_peak(loss)
        assert relative_error(our_total, total) < 1e-4
        for name, each in gradients.items():
            assert relative_error(our_gradients[name], each) < 2e-2, name
    print(f"peak MiB: logits {peak:.0f}, {peaks}, of bf16 logits {logits_mib:.0f}")
    # Full logits are saved in bf16 and in fp32 for backward, which computes gradients of both.
    assert peaks["fused"] < peak - 2 * logits_mib
    assert peaks["chunked"] < peaks["fused"] - 0.6 * logits_mib
