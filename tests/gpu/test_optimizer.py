"""Optimizer states on a GPU and on its host: their size, and that offloading changes no result."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tests.unit.test_train_optimizer import ManyShapes, section, state_bytes, train
from trimaran.core import Plan
from trimaran.parallel import NUM_STAGING_BUFFERS, build_optimizer
from trimaran.parallel.optimizer import adamw

pytestmark = pytest.mark.gpu

FORMATS = ["fp32", "bf16", "8bit"]
WIDTH, LAYERS = 4096, 16
NUM_PARAMETERS = LAYERS * WIDTH * WIDTH


def build(module: nn.Module, states: str, **plan: Any) -> Optimizer:
    return build_optimizer([module], section(states), Plan(**plan))


def trained(states: str, *, steps: int = 10, **plan: Any) -> nn.Module:
    module = ManyShapes().cuda()
    train(module, build(module, states, **plan), range(steps))
    return module


def large() -> nn.Module:
    with torch.device("cuda"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def fill_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)


@pytest.mark.parametrize("states", FORMATS)
def test_states_on_the_host_give_bitwise_equal_weights(states: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "CHUNK_VALUES", 16 * 300)  # so that parameters have several chunks
    on_device, on_host = (trained(states, offload=each) for each in ("none", "optimizer"))
    for (name, one), other in zip(on_device.named_parameters(), on_host.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(("states", "num_bytes"), [("fp32", 8), ("bf16", 4), ("8bit", 2 + 8 / 256)])
def test_states_take_the_bytes_of_their_format(states: str, num_bytes: float) -> None:
    module = large()
    gc.collect()
    before = torch.cuda.memory_allocated()
    optimizer = build(module, states)
    fill_gradients(module)
    optimizer.step()
    optimizer.zero_grad()
    assert state_bytes(optimizer) == num_bytes * NUM_PARAMETERS
    assert torch.cuda.memory_allocated() - before == pytest.approx(num_bytes * NUM_PARAMETERS, rel=0.01)


@pytest.mark.parametrize("states", FORMATS)
def test_offloading_frees_the_device_memory_of_the_states(states: str) -> None:
    peaks = {}
    for offload in ("none", "optimizer"):
        gc.collect()
        before = torch.cuda.memory_allocated()
        module = large()
        optimizer = build(module, states, offload=offload)
        fill_gradients(module)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            optimizer.step()
        peaks[offload], num_bytes = torch.cuda.max_memory_allocated() - before, state_bytes(optimizer)
        if offload == "optimizer":
            values = [value for each in optimizer.state.values() for key, value in each.items() if key != "step"]
            assert all(value.is_pinned() for value in values)
        del module, optimizer
    in_flight = NUM_STAGING_BUFFERS * adamw.CHUNK_VALUES * num_bytes / NUM_PARAMETERS
    assert peaks["none"] - peaks["optimizer"] == pytest.approx(num_bytes - in_flight, rel=0.03)


@pytest.mark.parametrize("offload", ["none", "optimizer"])
@pytest.mark.parametrize("states", FORMATS)
def test_an_update_never_waits_for_the_device(states: str, offload: str) -> None:
    module = ManyShapes().cuda()
    optimizer = build(module, states, offload=offload)
    train(module, optimizer, range(2))  # creates caches and compiles kernels
    fill_gradients(module)
    optimizer.found_inf, optimizer.factor = torch.zeros((), device="cuda"), torch.ones((), device="cuda")  # pyrefly: ignore[missing-attribute]
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_copies_to_the_device_overlap_with_copies_to_the_host() -> None:
    module = large()
    optimizer = build(module, "fp32", offload="optimizer")
    fill_gradients(module)
    optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        optimizer.step()
        torch.cuda.synchronize()
    events = profile.events()
    assert events is not None
    ranges = [(each.name, each.time_range) for each in events]
    copies = {
        direction: [(span.start, span.end) for name, span in ranges if f"Memcpy {direction}" in name]
        for direction in ("HtoD", "DtoH")
    }
    if not copies["HtoD"]:
        pytest.skip("the profiler cannot see this GPU")
    overlaps = [
        min(one[1], other[1]) - max(one[0], other[0])
        for one in copies["HtoD"]
        for other in copies["DtoH"]
        if one[0] < other[1] and other[0] < one[1]
    ]
    assert sum(overlaps) > 0.3 * sum(end - start for start, end in copies["HtoD"])


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("states", FORMATS)
def test_parameters_on_the_host_are_updated_there(states: str) -> None:
    """FSDP2's own offload: parameters, gradients and states are on the CPU, and a GPU computes."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    plain = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    plain.load_state_dict(module.state_dict())
    fully_shard(module, mesh=init_device_mesh("cuda", (1,)), offload_policy=CPUOffloadPolicy())
    optimizers = build(module, states, offload="parameters"), build(plain.cuda(), states)
    values = torch.randn(8, 256, device="cuda")
    for _ in range(3):
        for each, optimizer in zip((module, plain), optimizers, strict=True):
            each(values).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, one), other in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert one.device.type == "cpu"
        assert isinstance(one, DTensor)
        weight = one.to_local().detach()
        assert (weight - other.detach().cpu()).norm() <= 1e-4 * weight.norm(), name
    assert all(value.device.type == "cpu" for each in optimizers[0].state.values() for value in each.values())
