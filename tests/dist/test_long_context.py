"""Ring attention at length: memory of a rank beside gathered keys, and 128k tokens on eight ranks as in one process."""

import os
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.cases import slow
from tests.ranks import run_ranks
from trimaran.core import Mesh, Plan
from trimaran.models import PRESETS
from trimaran.nets import decoder_network, full_tensor, initialise
from trimaran.parallel import CONTEXTS, apply_plan, build_mesh
from trimaran.train import join_process_group, measured_tensors, read_rank_info

NARROW = replace(PRESETS["tiny"], layers=1, hidden=16, heads=1, kv_heads=1, head_dim=16, ffn=32, max_seq_len=1 << 17)


def peak_of_attention(kind: str, seq_len: int, packed: bool) -> int:
    """Return the peak of this rank's tensors, in bytes, in forward and backward of two layers' attention."""
    join_process_group(read_rank_info(os.environ))
    assert dist.group.WORLD is not None
    context = CONTEXTS[kind](dist.group.WORLD)
    documents = torch.arange(seq_len).div(seq_len // 6, rounding_mode="floor")[None]
    with measured_tensors() as peak:
        scope = context.scope(documents) if packed else None
        length = seq_len // dist.get_world_size()
        query, key, value = (torch.randn(1, heads, length, 16, requires_grad=True) for heads in (8, 2, 2))
        out = query
        for _ in range(2):
            out = context.attend(out, key, value, scope)
        out.sum().backward()
    return peak.whole


@pytest.mark.parametrize("packed", [slow(False), True], ids=["causal", "documents"])
def test_a_rank_of_a_ring_needs_less_memory_than_one_that_gathers_keys(packed: bool) -> None:
    gathered, ring = (max(run_ranks(4, peak_of_attention, kind, 2048, packed)) for kind in ("gather", "ring"))
    assert ring < 0.7 * gathered


def test_the_memory_of_a_rank_does_not_grow_with_the_ring() -> None:
    few, many = (max(run_ranks(ranks, peak_of_attention, "ring", 512 * ranks, False)) for ranks in (2, 4))
    assert many < 1.3 * few


def step_of_long_sequence(plan: Plan, lengths: list[int]) -> dict[str, Any]:
    """Return loss and gradients of one step of a narrow decoder, the seconds, and the peak of resident memory."""
    join_process_group(read_rank_info(os.environ))
    with torch.device("meta"):
        network = decoder_network(NARROW)
    apply_plan(network, plan, build_mesh(plan.mesh, device_type="cpu"))
    network.module.to_empty(device="cpu")
    initialise(network.module, seed=5, spec=NARROW)
    seq_len = sum(lengths)
    tokens = torch.randint(0, NARROW.vocab, (1, seq_len), generator=torch.Generator().manual_seed(1))
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    began = time.monotonic()
    with measured_tensors() as peak:
        logits, _ = network.forward({"tokens": tokens, "documents": documents, "host_documents": documents})
        labels = network.context.shard(tokens.roll(-1, 1))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / seq_len
        loss.backward()
    loss = network.context.all_reduce(loss.detach())
    gradients = {}
    for name, each in network.module.named_parameters():
        assert each.grad is not None
        # DDP has averaged them over the ranks.
        gradients[name] = (full_tensor(each.grad) * plan.mesh.cp).numpy()
    return {"loss": loss.item(), "gradients": gradients, "seconds": time.monotonic() - began, "peak": peak.whole}


def assert_as_in_one_process(context: str, lengths: list[int], num_ranks: int) -> None:
    plan = Plan.model_validate({"mesh": Mesh(cp=num_ranks), "comm": {"context": context}})
    (alone,) = run_ranks(1, step_of_long_sequence, Plan(), lengths, timeout=3000.0)
    ranks = run_ranks(num_ranks, step_of_long_sequence, plan, lengths, timeout=3000.0)
    seconds, peak = (max(each[name] for each in ranks) for name in ("seconds", "peak"))
    print(f"{context}, {sum(lengths)} tokens on {num_ranks} ranks: {seconds:.0f} s, {peak / 2**20:.0f} MiB a rank; "
          f"one process: {alone['seconds']:.0f} s, {alone['peak'] / 2**20:.0f} MiB")  # fmt: skip
    assert ranks[0]["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    for name, theirs in alone["gradients"].items():
        difference = np.linalg.norm(ranks[0]["gradients"][name] - theirs) / np.linalg.norm(theirs)
        assert difference <= 1e-5, f"{name} is off by {difference:.1e}"
    assert peak < 0.35 * alone["peak"]


def test_a_long_sequence_on_a_ring_trains_as_in_one_process() -> None:
    assert_as_in_one_process("ring", [3000, 40, 1056], 4)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[1 << 17], [90_000, 72, 41_000]], ids=["one document", "three documents"])
def test_128k_tokens_on_eight_ranks_train_as_in_one_process(lengths: list[int]) -> None:
    assert_as_in_one_process("ring", lengths, 8)
