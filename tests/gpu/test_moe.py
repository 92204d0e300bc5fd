"""MoE layers on a GPU: capacity, token dispatch and statistics. A dispatch group of one rank is enough."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.models import PRESETS, ExpertSpec
from trimaran.nets import MoeLayer, decoder_network, initialise
from trimaran.parallel import TokenDispatcher
from trimaran.train import router_details, routing_counts

pytestmark = pytest.mark.gpu

SPEC = ExpertSpec(num_experts=8, top_k=2, ffn=64, capacity=0.7, z_loss=0.01)
HIDDEN = 64


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    assert not dist.is_initialized()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def moe_layer() -> MoeLayer:
    torch.manual_seed(3)
    module = MoeLayer(SPEC, HIDDEN)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return module


def stream(length: int = 32) -> Tensor:
    return torch.randn(4, length, HIDDEN, generator=torch.Generator().manual_seed(5))


def gradients(module: MoeLayer, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out, loss = module(x)
    (out.float().square().sum() + loss).backward()
    return [each.grad.cpu() for each in (x, *module.parameters()) if each.grad is not None]


def assert_close(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    assert len(ours) == len(theirs) == 5
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


def test_a_gpu_drops_the_same_tokens_as_a_cpu() -> None:
    on_cpu, x = moe_layer(), stream()
    on_gpu = copy.deepcopy(on_cpu).cuda()
    assert_close(gradients(on_gpu, x.cuda()), gradients(on_cpu, x), 1e-4)
    gpu_stats, cpu_stats = on_gpu.take_routing_stats().cpu(), on_cpu.take_routing_stats()
    assert torch.equal(gpu_stats[:-1], cpu_stats[:-1])
    assert gpu_stats[-2] > 0


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
def test_dispatched_rows_come_back_in_order(group: Any, precision: torch.dtype) -> None:
    local = moe_layer().cuda()
    dispatched, x = copy.deepcopy(local), stream().cuda()
    dispatched.dispatch = TokenDispatcher(group)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == torch.bfloat16):
        assert_close(gradients(dispatched, x), gradients(local, x), 1e-5 if precision == torch.float32 else 1e-2)


def test_a_rank_without_tokens_has_zero_gradients(group: Any) -> None:
    junk = torch.full((2**26,), torch.nan, device="cuda")  # an uninitialised gradient is then NaN
    del junk
    module = moe_layer().cuda()
    rows = torch.empty(0, HIDDEN, device="cuda", requires_grad=True)
    dispatcher = TokenDispatcher(group)
    sent = dispatcher.send(module.experts, rows, torch.zeros(8, dtype=torch.int32, device="cuda"))
    out = dispatcher.compute(module.experts, sent)
    assert out.shape == (0, HIDDEN)
    out.sum().backward()
    for parameter in module.experts.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "copies", "width"), [(100, 8, 2048), (33, 2, 5000), (7, 1, 3)])
def test_rows_are_copied_and_added_up_as_on_a_cpu(tokens: int, copies: int, width: int, precision: torch.dtype) -> None:
    torch.manual_seed(0)
    x, rows = (torch.randn(count, width).to(precision) for count in (tokens, tokens * copies))
    places, weights = torch.randperm(tokens * copies).view(tokens, copies), torch.randn(tokens, copies).to(precision)
    calls = {
        "scatter_rows": (x, places),
        "gather_rows": (rows, places, weights),
        "gather_rows_backward": (x, rows, places, weights),
    }
    for name, arguments in calls.items():
        operator = getattr(torch.ops.trimaran, name)
        wide = [each.double() if each.is_floating_point() else each for each in arguments]
        ours, exact = operator(*(each.cuda() for each in arguments)), operator(*wide)
        pairs = zip(ours, exact, strict=True) if isinstance(ours, tuple) else [(ours, exact)]
        for one, other in pairs:
            assert (one.cpu().double() - other).norm() <= (1e-6 if precision == torch.float32 else 4e-3) * other.norm()


def test_routing_never_synchronises_with_the_device() -> None:
    module, x = moe_layer().cuda(), stream().cuda()
    module(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out, loss = module(x)
        (out.float().sum() + loss).backward()
        module.take_routing_stats()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_router_statistics_can_be_read_later() -> None:
    spec = replace(PRESETS["tiny-moe"], layers=2)
    network = decoder_network(spec)
    initialise(network.module, seed=0, spec=spec)
    network.module.cuda()
    network.forward({"tokens": torch.arange(64, device="cuda").reshape(2, 32)})
    torch.cuda.set_sync_debug_mode("error")
    try:
        read = router_details(routing_counts((network,), torch.device("cuda")), (network,))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    numbers = read()["router"]
    assert 0.5 < numbers["entropy"] <= 1
    assert 1 <= numbers["imbalance"] <= 4
    assert numbers["dropped"] == 0
