"""Expert parallelism equals one process: outputs, losses, every gradient and the statistics."""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.cases import slow
from tests.ranks import run_ranks
from trimaran.core import Mesh, Plan
from trimaran.models import PRESETS, ExpertSpec, ModelSpec
from trimaran.nets import MoeLayer, Network, decoder_network, initialise, local_part, local_slices
from trimaran.parallel import RankMesh, TokenDispatcher, apply_cp, apply_ep, apply_tp, build_mesh, sharding_steps
from trimaran.train import join_process_group, read_rank_info, router_details, routing_counts

HIDDEN, LENGTH, SEQUENCES = 16, 16, 8
SHARED = {"shared_ffn": 16, "shared_gate": True}
KINDS: dict[str, dict[str, Any]] = {
    "dropless": {"top_k": 2},
    "one-choice": {"top_k": 1, "normalize_top_k": False, **SHARED},
    "capacity": {"top_k": 2, "capacity": 0.8, "z_loss": 0.05, **SHARED},
    "few-experts": {"num_experts": 4, "top_k": 1, "capacity": 0.1},
    "uneven": {"num_experts": 6, "top_k": 2},
}
PRODUCTS: dict[str, dict[str, int]] = {
    "tp-2": {"tp": 2},
    "ep-2": {"dp_replicate": 2, "ep": 2},
    "ep-2-of-4": {"dp_replicate": 4, "ep": 2},
    "ep-2-sharded": {"dp_shard": 4, "ep": 2},
    "ep-2-hsdp": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    "ep-tp": {"dp_shard": 2, "tp": 2, "ep": 2},
    "ep-tp-replicated": {"dp_replicate": 2, "tp": 2, "ep": 2},
    "cp-2": {"cp": 2},
    "cp-ep": {"cp": 2, "ep": 2},
    "cp-ep-sharded": {"dp_shard": 2, "cp": 2, "ep": 2},
}


def start(mesh: Mesh) -> RankMesh:
    if not dist.is_initialized():
        join_process_group(read_rank_info(os.environ))
    return build_mesh(mesh, device_type="cpu")


def experts_of(kind: str) -> ExpertSpec:
    fields: dict[str, Any] = {"num_experts": 8, "ffn": 16, "balance": 0.1} | KINDS[kind]
    return ExpertSpec(**fields)


def seeded(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(11))


def moe_layer(kind: str) -> MoeLayer:
    module = MoeLayer(experts_of(kind), HIDDEN)
    torch.manual_seed(2)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return module


def backward(module: MoeLayer, rows: slice) -> Tensor:
    """Run backward for these sequences and return the output of the layer."""
    x, wish = seeded(2, SEQUENCES, LENGTH, HIDDEN)[:, rows]
    out, loss = module(x)
    ((out * wish).sum() + loss).backward()
    return out.detach()


def dispatch_tokens(kind: str, world_size: int) -> None:
    ranks = start(Mesh(dp_replicate=world_size, ep=world_size))
    alone, module = moe_layer(kind), moe_layer(kind)
    names = [name for name, _ in module.named_parameters()]
    apply_ep(Network(module, (), None), Plan(mesh=ranks.degrees), ranks)
    assert isinstance(module.dispatch, TokenDispatcher)
    assert [name for name, _ in module.named_parameters()] == names
    rank, each = dist.get_rank(), SEQUENCES // world_size
    mine = slice(rank * each, (rank + 1) * each)
    wanted = backward(alone, slice(None))[mine]
    torch.testing.assert_close(backward(module, mine), wanted, rtol=1e-5, atol=1e-5)
    for (name, whole), part in zip(alone.named_parameters(), module.parameters(), strict=True):
        assert whole.grad is not None, name
        assert part.grad is not None, name
        if isinstance(part, DTensor):
            assert isinstance(part.grad, DTensor)
            assert local_part(part).shape[0] == module.spec.num_experts // world_size, name
            torch.testing.assert_close(local_part(part.grad), whole.grad[local_slices(part)], rtol=1e-5, atol=1e-4)
        else:
            dist.all_reduce(part.grad)
            torch.testing.assert_close(part.grad, whole.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("world_size", [2, 4])
def test_tokens_are_sent_to_their_experts_and_back(world_size: int) -> None:
    run_ranks(world_size, dispatch_every_kind, world_size)


def dispatch_every_kind(world_size: int) -> None:
    for kind in ("dropless", "one-choice", "capacity", "few-experts"):
        dispatch_tokens(kind, world_size)


def dispatch_in_bf16() -> None:
    ranks = start(Mesh(dp_replicate=2, ep=2))
    alone, module = moe_layer("capacity"), moe_layer("capacity")
    apply_ep(Network(module, (), None), Plan(mesh=ranks.degrees), ranks)
    x = seeded(SEQUENCES, LENGTH, HIDDEN)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = module(x)[0], alone(x)[0]
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs)


def test_tokens_are_sent_in_the_precision_of_the_plan() -> None:
    run_ranks(2, dispatch_in_bf16)


def rank_without_tokens() -> None:
    ranks = start(Mesh(dp_replicate=2, ep=2))
    module = moe_layer("one-choice")
    with torch.no_grad():  # all tokens then choose experts 4 to 7
        module.gate.weight.copy_(torch.arange(8.0)[:, None].expand_as(module.gate.weight))
    apply_ep(Network(module, (), None), Plan(mesh=ranks.degrees), ranks)
    x = torch.ones(1, 2, HIDDEN, requires_grad=True)
    module(x)[0].sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    for parameter in module.experts.parameters():
        assert isinstance(parameter.grad, DTensor)
        assert local_part(parameter.grad).any().item() == (dist.get_rank() == 1)


def test_a_rank_without_tokens_has_zero_gradients() -> None:
    run_ranks(2, rank_without_tokens)


def spec_for(kind: str) -> ModelSpec:
    spec = PRESETS["tiny-moe"]
    block = replace(spec.block, experts=experts_of(kind))
    return replace(spec, layers=2, hidden=HIDDEN, heads=4, kv_heads=2, head_dim=4, vocab=64, block=block)


def summed(network: Network, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed loss of this rank's positions and the balance loss, for sequences `tokens`."""
    logits, balance = network.forward({"tokens": tokens})
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    labels = network.context.shard(tokens.roll(-1, 1))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), balance


Answer = tuple[float, dict[str, np.ndarray], dict[str, float]]


def one_step(kind: str, degrees: dict[str, int]) -> Answer:
    """Return loss, gradients and router statistics of the global batch under a plan."""
    mesh, spec = Mesh(**degrees), spec_for(kind)
    ranks = start(mesh)
    sharding = "parameters" if mesh.dp_shard > 1 else "none"
    with torch.device("meta"):
        network = decoder_network(spec)
    plan = Plan(mesh=mesh, sharding=sharding)
    for apply in (apply_tp, apply_ep, apply_cp, *sharding_steps(plan)):
        apply(network, plan, ranks)
    network.module.to_empty(device="cpu")
    initialise(network.module, seed=4, spec=spec)
    with torch.no_grad():  # routers with a preference
        for name, parameter in network.module.named_parameters():
            local_part(parameter).mul_(20 if ".gate." in name else 4 if ".experts." in name else 1)
    tokens = torch.randint(0, spec.vocab, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(6))
    mine = tokens.chunk(mesh.dp)[ranks.data_rank]
    total = torch.zeros(())
    for half in mine.chunk(2):  # two micro-batches
        loss, balance = summed(network, half)
        ((loss + balance) * (mesh.data / tokens.numel())).backward()
        total += loss.detach()
    dist.all_reduce(total.div_(tokens.numel() * mesh.tp))
    gradients = {}
    for name, parameter in network.module.named_parameters():
        assert parameter.grad is not None, name
        whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        gradients[name] = whole.numpy()  # a tensor cannot be sent after its rank ends
    return total.item(), gradients, router_metrics(network)


def router_metrics(network: Network) -> dict[str, float]:
    """Return the statistics of all ranks, which a step sums with its other numbers."""
    counts = routing_counts((network,), torch.device("cpu"))
    assert counts is not None
    dist.all_reduce(counts)
    return router_details(counts, (network,))()["router"]


def one_step_of_each(cases: list[tuple[str, dict[str, int]]]) -> list[Answer]:
    return [one_step(*each) for each in cases]


TWO_RANKS = [("ep-2", "dropless"), ("ep-2", "capacity"), ("cp-2", "dropless"), ("cp-ep", "capacity")]
FOUR_RANKS = [("ep-2-sharded", "uneven")]
OTHERS = [(name, kind) for name in PRODUCTS for kind in ("dropless", "capacity") if (name, kind) not in TWO_RANKS]


def of_size(world_size: int) -> list[tuple[str, str]]:
    return [each for each in OTHERS if Mesh(**PRODUCTS[each[0]]).world_size == world_size]


@pytest.mark.parametrize(
    "cases", [TWO_RANKS, FOUR_RANKS, slow(of_size(2)), slow(of_size(4))], ids=["2 ranks", "4 ranks", "slow 2", "slow 4"]
)
def test_expert_parallel_gradients_equal_those_of_one_process(cases: list[tuple[str, str]]) -> None:
    kinds = list(dict.fromkeys(kind for _, kind in cases))
    alone = dict(zip(kinds, run_ranks(1, one_step_of_each, [(kind, {}) for kind in kinds])[0], strict=True))
    world_size = Mesh(**PRODUCTS[cases[0][0]]).world_size
    for answers in run_ranks(world_size, one_step_of_each, [(kind, PRODUCTS[name]) for name, kind in cases]):
        for (name, kind), ours in zip(cases, answers, strict=True):
            loss, gradients, statistics = alone[kind]
            assert ours[0] == pytest.approx(loss, rel=1e-6), f"{name}, {kind}"
            assert list(ours[1]) == list(gradients)
            for parameter, wanted in gradients.items():
                difference = np.linalg.norm(ours[1][parameter] - wanted) / np.linalg.norm(wanted)
                assert difference <= 1e-5, f"{name}, {kind}: {parameter} is off by {difference:.2e}"
            assert ours[2] == pytest.approx(statistics, rel=1e-6, abs=1e-9), f"{name}, {kind}"
    for kind, (_, _, statistics) in alone.items():
        assert (statistics["dropped"] > 0.05) == (kind == "capacity")
        assert statistics["imbalance"] > 1.3


def stage_statistics() -> dict[str, float]:
    ranks, spec = start(Mesh(pp=2)), spec_for("dropless")
    network = decoder_network(spec, range(ranks.rank("pp"), ranks.rank("pp") + 1))
    (moe_layer,) = (layer.mlp for layer in network.blocks)
    assert isinstance(moe_layer, MoeLayer)
    even, one = [2.0] * 8, [16.0] + [0.0] * 7
    moe_layer.routing_stats[:] = torch.tensor([*(one if ranks.rank("pp") else even), 0, 16])
    return router_metrics(network)


def test_every_stage_knows_the_statistics_of_all_layers() -> None:
    wanted = {"imbalance": (1 + 8) / 2, "idle": 7 / 16, "dropped": 0.0, "z": 2.0, "entropy": 0.5}
    assert run_ranks(2, stage_statistics) == [pytest.approx(wanted)] * 2
