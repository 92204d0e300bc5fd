"""Recompute and activation offload on a GPU: less memory, almost the same time, and no changed bit."""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trimaran.core import Plan
from trimaran.models import PRESETS, ModelSpec
from trimaran.nets import Network, decoder_network, initialise
from trimaran.parallel import MIN_OFFLOAD_BYTES, ActivationOffload, StreamCopies, apply_recompute, offload_blocks

pytestmark = pytest.mark.gpu

# Large activations and small weights: about 800 MB per block in bf16, against 60 MB of weights.
WIDE = replace(PRESETS["tiny"], layers=12, hidden=1024, heads=8, kv_heads=4, head_dim=128, ffn=4096, max_seq_len=4096)
# In fp32 a block computes longer than the copy of its activations takes.
HEAVY = replace(WIDE, layers=4, hidden=4096, heads=32, kv_heads=32, ffn=16384)


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(
        torch.utils.deterministic, "fill_uninitialized_memory", False
    )  # it would fill pinned memory too, which takes seconds
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def network_with(spec: ModelSpec, *, recompute: Any = "none", offload: bool = False) -> Network:
    with torch.device("cuda"):
        network = decoder_network(spec)
    initialise(network.module, seed=0, spec=spec)
    apply_recompute(network, Plan(recompute=recompute), None)
    if offload:
        offload_blocks(network, ActivationOffload(StreamCopies(), device="cuda", min_bytes=MIN_OFFLOAD_BYTES["cuda"]))
    return network


def tokens_of(sequences: int, length: int) -> Tensor:
    return torch.randint(0, 320, (sequences, length), generator=torch.Generator().manual_seed(7)).cuda()


def loss_of(network: Network, tokens: Tensor, *, low: bool = True) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16, enabled=low):
        logits, balance = network.forward({"tokens": tokens})
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()) + balance


def grads_of(network: Network) -> list[Tensor]:
    grads = [each.grad for each in network.module.parameters()]
    network.module.zero_grad()
    return [each for each in grads if each is not None]


def step_and_peak(network: Network, tokens: Tensor) -> tuple[list[Tensor], int]:
    """Return the gradients and the peak of allocated bytes above the start."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss_of(network, tokens).backward()
    torch.cuda.synchronize()
    return grads_of(network), torch.cuda.max_memory_allocated() - before


def seconds_of(step: Callable[[], None], steps: int = 5) -> float:
    """Return the seconds of a step after two warm-up steps (pinning, kernel selection)."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_offload_takes_activations_off_the_gpu_and_changes_no_bit(recompute: str) -> None:
    tokens, spec = tokens_of(4, 4096), WIDE
    if recompute == "full":  # only block inputs are offloaded, so there must be many blocks
        spec = replace(WIDE, layers=48, ffn=1024)
    expected, whole = step_and_peak(network_with(spec, recompute=recompute), tokens)
    found, peak = step_and_peak(network_with(spec, recompute=recompute, offload=True), tokens)
    print(f"recompute {recompute}: peak {whole / 2**30:.2f} GiB, with offload {peak / 2**30:.2f} GiB")
    assert peak < (0.5 if recompute == "none" else 0.85) * whole
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.whole_gpu
def test_offload_overlaps_with_a_heavy_computation() -> None:
    tokens, seconds = tokens_of(2, 2048), {}
    for offload in (False, True):
        network = network_with(HEAVY, offload=offload)

        def step(network: Network = network) -> None:
            loss_of(network, tokens, low=False).backward()
            network.module.zero_grad()

        seconds[offload] = seconds_of(step)
        del network, step
        torch.cuda.empty_cache()
    print(
        f"fp32 step {seconds[False]:.3f} s, with offload {seconds[True]:.3f} s: x {seconds[True] / seconds[False]:.2f}"
    )
    assert seconds[True] < 1.5 * seconds[False]


@pytest.mark.whole_gpu
def test_offload_of_block_inputs_costs_little_in_bf16() -> None:
    tokens, seconds = tokens_of(4, 4096), {}
    for offload in (False, True):
        network = network_with(WIDE, recompute="full", offload=offload)

        def step(network: Network = network) -> None:
            loss_of(network, tokens).backward()
            network.module.zero_grad()

        seconds[offload] = seconds_of(step)
        del network, step
    ratio = seconds[True] / seconds[False]
    print(f"bf16 with full recompute {seconds[False]:.3f} s, with offload {seconds[True]:.3f} s: x {ratio:.2f}")
    assert ratio < 1.5


@pytest.mark.usefixtures("deterministic")
def test_memory_is_never_freed_before_a_copy_is_done() -> None:
    """Many micro-batches in flight, in and out of order, with graphs dropped in between."""
    batches = tokens_of(6, 1024).split(1)
    small = replace(WIDE, layers=6, hidden=512)
    plain, network = network_with(small), network_with(small, offload=True)
    for order in ((0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (2, 0, 5, 1, 4, 3)):
        results = []
        for each in (plain, network):
            losses = [loss_of(each, tokens) for tokens in batches]
            loss_of(each, batches[0])  # its graph is dropped without a backward
            for number in order:
                losses[number].backward()
            results.append(grads_of(each))
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.usefixtures("deterministic")
def test_more_recompute_uses_less_memory() -> None:
    tokens, peaks = tokens_of(4, 4096), {}
    expected: list[Tensor] = []
    for mode in ("none", 2, "selective", "full"):
        grads, peaks[mode] = step_and_peak(network_with(WIDE, recompute=mode), tokens)
        expected = expected or grads
        assert all(torch.equal(one, other) for one, other in zip(grads, expected, strict=True)), mode
    print({mode: f"{peak / 2**30:.2f} GiB" for mode, peak in peaks.items()})
    assert peaks["full"] < peaks[2] < peaks["none"]
    assert peaks["full"] < peaks["selective"] < peaks["none"]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_blocks_are_offloaded_and_recomputed_too(recompute: str) -> None:
    torch.compiler.reset()
    tokens, small = tokens_of(2, 1024), replace(WIDE, layers=3)
    expected, _ = step_and_peak(network_with(small), tokens)
    network = network_with(small, recompute=recompute, offload=True)
    for block in network.blocks:
        block.compile()
    found, _ = step_and_peak(network, tokens)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 0.03 * other.norm()


def test_offload_never_synchronizes_the_host() -> None:
    network, tokens = network_with(replace(WIDE, layers=3), offload=True), tokens_of(2, 1024)
    step_and_peak(network, tokens)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss_of(network, tokens).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
