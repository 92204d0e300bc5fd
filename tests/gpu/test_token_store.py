"""NCCL can use the store on the run's channel."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from trimaran.launch import Channel
from trimaran.train import TIMEOUT, TokenStore

pytestmark = pytest.mark.gpu


def reduce_on_the_gpu() -> list[float]:
    channel = Channel("127.0.0.1", "the token")
    torch.cuda.set_device(0)
    store = TokenStore(channel.address, "the token", attempt=0, timeout=timedelta(seconds=30))
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, timeout=TIMEOUT)
    del store  # only torch refers to it from here on
    number = torch.ones(4, device="cuda")
    mesh = dist.init_device_mesh("cuda", (1, 1), mesh_dim_names=("dp", "tp"))
    for group in (None, dist.new_group([0]), mesh["tp"].get_group()):
        dist.all_reduce(number, group=group)
    dist.barrier()
    torch.cuda.synchronize()
    time.sleep(2.5)  # NCCL's monitor thread reads the store
    dist.destroy_process_group()
    channel.close()
    return number.tolist()


def test_nccl_initialises_with_the_token_store() -> None:
    assert reduce_on_the_gpu() == [1.0] * 4
