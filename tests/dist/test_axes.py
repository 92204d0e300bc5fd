"""Properties of each parallel axis besides parity, which tests/dist/test_matrix.py covers."""

import os
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.ranks import run_ranks
from trimaran.core import Mesh, Plan
from trimaran.models import PRESETS
from trimaran.nets import Network, decoder_network, initialise, local_part
from trimaran.parallel import (
    AllGatherContext,
    apply_plan,
    autocast,
    build_mesh,
    gather_sequence,
    gradient_norm,
    kept_weight_casts,
    reduce_gradient,
    reduce_sum,
    reduce_to_sequence,
    vocab_parallel_token_losses,
)
from trimaran.train import join_process_group, read_rank_info

SPEC = replace(PRESETS["tiny"], layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=64)


def network_under(plan: Plan) -> Network:
    """Join the process group and return this rank's part of a small decoder."""
    if not dist.is_initialized():
        join_process_group(read_rank_info(os.environ))
    with torch.device("meta"):
        network = decoder_network(SPEC)
    apply_plan(network, plan, build_mesh(plan.mesh, device_type="cpu"))
    network.module.to_empty(device="cpu")
    initialise(network.module, seed=5, spec=SPEC)
    return network


def loss_of_sharded_logits(logits: torch.Tensor, labels: torch.Tensor) -> tuple[float, np.ndarray, int]:
    join_process_group(read_rank_info(os.environ))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    mine = logits.chunk(mesh.size(), -1)[mesh.get_local_rank()].clone().requires_grad_()
    loss = vocab_parallel_token_losses(DTensor.from_local(mine, mesh, [Shard(2)]), labels, ignored=-100).sum()
    (loss * 0.25).backward()
    assert mine.grad is not None
    return loss.item(), mine.grad.numpy(), mine.shape[-1]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_loss_of_sharded_logits_is_that_of_full_logits(num_ranks: int) -> None:
    torch.manual_seed(0)
    logits = (10 * torch.randn(2, 5, 16)).requires_grad_()
    labels = torch.tensor([[3, -100, 15, 0, 7], [8, 9, -100, -100, 4]])
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    (expected * 0.25).backward()
    answers = run_ranks(num_ranks, loss_of_sharded_logits, logits.detach(), labels)
    for loss, _, width in answers:
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        assert width == 16 // num_ranks
    gradient = torch.from_numpy(np.concatenate([each for _, each, _ in answers], -1))
    torch.testing.assert_close(gradient, logits.grad)


def logits_under_tp() -> tuple[tuple[int, ...], tuple[int, ...], int]:
    network = network_under(Plan(mesh=Mesh(tp=2)))
    logits, _ = network.forward({"tokens": torch.arange(32).view(2, 16)})
    assert isinstance(logits, DTensor)
    held = sum(each.to_local().numel() for each in network.module.parameters() if isinstance(each, DTensor))
    return tuple(logits.shape), tuple(logits.to_local().shape), held


def test_tensor_parallel_ranks_hold_shards_of_logits_and_matrices() -> None:
    for whole, mine, held in run_ranks(2, logits_under_tp):
        assert whole == (2, 16, SPEC.vocab)
        assert mine == (2, 16, SPEC.vocab // 2)
        norms = (2 * SPEC.layers + 1) * SPEC.hidden
        assert held == (SPEC.num_parameters - norms) // 2 + norms


class DTensorOperators(TorchDispatchMode):
    """Counts the operators that get a DTensor: each is dispatched in Python and takes as long as several kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(isinstance(each, DTensor) for each in tree_iter((args, kwargs))):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def dtensor_operators_and_embedding_gradient() -> tuple[list[str], list[str], tuple[int, ...]]:
    network = network_under(Plan(mesh=Mesh(tp=2)))
    with DTensorOperators() as in_forward:
        logits, _ = network.forward({"tokens": torch.arange(32).view(2, 16)})
    assert isinstance(logits, DTensor)
    loss = logits.to_local().square().sum()
    with DTensorOperators() as in_backward:
        loss.backward()
    gradient = network.module.get_parameter("embed_tokens.weight").grad
    assert isinstance(gradient, DTensor)
    assert gradient.placements == (Shard(0),)
    return in_forward.found, in_backward.found, tuple(gradient.to_local().shape)


def test_tensor_parallel_layers_compute_with_plain_tensors_and_rows_of_the_embedding() -> None:
    num_parameters = 9 * SPEC.layers + 2  # the head is the embedding
    for in_forward, in_backward, gradient_shape in run_ranks(2, dtensor_operators_and_embedding_gradient):
        assert in_forward == []
        # Autograd stores each gradient detached, and adds the two of the tied embedding.
        assert len(in_backward) <= num_parameters + 1
        assert {each.partition(".")[2] for each in in_backward} <= {"detach.default", "add.Tensor"}
        assert gradient_shape == (SPEC.vocab // 2, SPEC.hidden)


def saved_copies_of_weights(kept: bool) -> tuple[int, list[np.ndarray]]:
    """Return how many 16-bit weights two micro-batches in flight save for backward, and this rank's gradients."""
    plan, saved = Plan(mesh=Mesh(tp=2), precision="bf16"), set()
    network = network_under(plan)

    shapes = {local_part(each).shape for each in network.module.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        is_copy = tensor.ndim == 2 and tensor.dtype == torch.bfloat16
        if is_copy and (tensor.shape in shapes or tensor.t().shape in shapes):
            saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    with kept_weight_casts() if kept else nullcontext(), saved_tensors_hooks(pack, lambda packed: packed):
        losses = []
        for _ in range(2):
            with autocast(plan, torch.device("cpu")):
                logits, _ = network.forward({"tokens": torch.arange(24).view(2, 12)})
                assert isinstance(logits, DTensor)
                losses.append(logits.to_local().square().sum())
        for loss in losses:
            loss.backward()
    return len(saved), [local_part(each.grad).numpy() for each in network.module.parameters() if each.grad is not None]


def test_micro_batches_in_flight_share_the_16_bit_copies_of_sharded_weights() -> None:
    answers = zip(*(run_ranks(2, saved_copies_of_weights, kept) for kept in (False, True)), strict=True)
    for (alone, ours), (shared, theirs) in answers:
        assert alone == 2 * shared == 2 * (7 * SPEC.layers + 1)
        assert all((mine == other).all() for mine, other in zip(ours, theirs, strict=True))


def results_of_collectives(compiled: bool, parts: torch.Tensor, gradients: torch.Tensor) -> dict[str, list[np.ndarray]]:
    """Return the output of each collective of this rank's part, and the gradient of the part for that of the output."""
    join_process_group(read_rank_info(os.environ))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    for function in (gather_sequence, reduce_to_sequence, reduce_sum, reduce_gradient):
        x = parts[mesh.get_local_rank()].clone().requires_grad_()
        run = torch.compile(function, backend="aot_eager") if compiled else function
        out = run(2.0 * x, mesh)
        out.backward(gradients[mesh.get_local_rank(), :, : out.shape[1]])
        assert x.grad is not None
        found[function.__name__] = [out.detach().numpy(), x.grad.numpy()]
    return found


@pytest.mark.parametrize(("rows", "compiled"), [(1, False), (3, False), (3, True)])
def test_a_collective_between_sharded_modules_has_the_collective_of_its_gradient(rows: int, compiled: bool) -> None:
    torch.manual_seed(0)
    x, y = 2.0 * torch.randn(2, rows, 4, 5), torch.randn(2, rows, 8, 5)
    answers = run_ranks(2, results_of_collectives, compiled, x / 2.0, y)
    for rank, answer in enumerate(answers):
        expected = {  # the first rank has the first half of all tokens
            "gather_sequence": [x.reshape(rows, 8, 5), y.sum(0).reshape(2, rows, 4, 5)[rank]],
            "reduce_to_sequence": [x.sum(0).reshape(2, rows, 2, 5)[rank], y[:, :, :2].reshape(rows, 4, 5)],
            "reduce_sum": [x.sum(0), y[rank, :, :4]],
            "reduce_gradient": [x[rank], y.sum(0)[:, :4]],
        }
        for name, (out, gradient) in expected.items():
            torch.testing.assert_close(torch.from_numpy(answer[name][0]), out)
            torch.testing.assert_close(torch.from_numpy(answer[name][1]), 2.0 * gradient)


def num_attended_keys() -> int:
    join_process_group(read_rank_info(os.environ))
    assert dist.group.WORLD is not None
    return int(AllGatherContext(dist.group.WORLD).mask(torch.zeros(1, 64, dtype=torch.long)).sum())


def test_every_rank_attends_to_the_same_number_of_keys() -> None:
    counts = run_ranks(4, num_attended_keys)
    assert counts == [64 * 65 // 2 // 4] * 4


def norms_after_backward(plans: list[Plan]) -> list[bytes]:
    found = []
    for plan in plans:
        network = network_under(plan)
        logits, _ = network.forward({"tokens": torch.arange(32).view(2, 16)})
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        logits.square().mean().backward()
        found.append(gradient_norm([*network.module.parameters()]).detach().numpy().tobytes())
    return found


def test_the_gradient_norm_is_bitwise_equal_on_all_ranks() -> None:
    plans = [
        Plan(mesh=Mesh(dp_shard=2, tp=2), sharding="parameters"),
        Plan(mesh=Mesh(dp_replicate=2, dp_shard=2), sharding="gradients"),
    ]
    first, *others = run_ranks(4, norms_after_backward, plans)
    assert others == [first] * 3


def norm_with_gradients_on_one_rank() -> float:
    """Return the norm when only rank 0 has gradients, as if only its stage was trained."""
    dist.init_process_group("gloo")
    weight = nn.Parameter(torch.zeros(2))
    if dist.get_rank() == 0:
        weight.grad = torch.tensor([3.0, 4.0])
    return gradient_norm([weight], pp=2).item()


def test_a_rank_without_gradients_contributes_zero_to_the_norm() -> None:
    assert run_ranks(2, norm_with_gradients_on_one_rank) == [5.0, 5.0]


def bytes_after_forward(shardings: list[str]) -> list[tuple[int, int]]:
    """Return how many parameter values this rank holds after a forward, and when sharded, for each sharding."""
    found = []
    for sharding in shardings:
        network = network_under(Plan.model_validate({"mesh": {"dp_shard": 2}, "sharding": sharding}))
        at_rest = sum(local_part(each).numel() for each in network.module.parameters())
        network.forward({"tokens": torch.arange(32).view(2, 16)})
        found.append((sum(local_part(each).numel() for each in network.module.parameters()), at_rest))
    return found


def test_only_zero_3_reshards_blocks_after_forward() -> None:
    shardings = ["optimizer", "gradients", "parameters"]
    for found in run_ranks(2, bytes_after_forward, shardings):
        assert [at_rest for _, at_rest in found] == [SPEC.num_parameters // 2] * 3
        in_zero_1, in_zero_2, in_zero_3 = (after for after, _ in found)
        assert in_zero_1 == in_zero_2 == SPEC.num_parameters
        assert SPEC.num_parameters // 2 <= in_zero_3 < SPEC.num_parameters


def places_and_seeds(mesh: Mesh) -> tuple[tuple[int, int, int], bool, int]:
    join_process_group(read_rank_info(os.environ))
    ranks = build_mesh(mesh, device_type="cpu")
    place = ranks.rank("pp"), ranks.data_rank, ranks.rank("tp")
    return place, ranks.counts_samples, ranks.dropout_seed(7)


def test_tensor_parallel_ranks_are_adjacent_and_drop_the_same_and_stages_are_far_apart() -> None:
    answers = run_ranks(8, places_and_seeds, Mesh(pp=2, dp_shard=2, tp=2))
    places, counts, seeds = zip(*answers, strict=True)
    assert list(places) == [(pp, dp, tp) for pp in (0, 1) for dp in (0, 1) for tp in (0, 1)]
    assert list(counts) == [True, False, True, False, False, False, False, False]
    assert seeds[::2] == seeds[1::2], "tp ranks must drop the same elements of replicated tensors"
    assert len(set(seeds)) == 4
