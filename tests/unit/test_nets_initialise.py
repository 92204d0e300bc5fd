import math
import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trimaran.models import PRESETS
from trimaran.nets import Decoder, hf_tensors, initialise, load_hf_weights

SPEC = replace(PRESETS["tiny-moe"], layers=2, vocab=321)  # 321 rows do not split evenly


def reference() -> dict[str, torch.Tensor]:
    module = Decoder(SPEC)
    initialise(module, seed=5, spec=SPEC)
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def test_initial_weights_have_the_documented_distribution() -> None:
    weights = reference()
    for name, value in weights.items():
        if value.ndim == 1:
            assert torch.equal(value, torch.ones_like(value)), name
        else:
            std = 0.02 / math.sqrt(4) if "o_proj" in name or "down_proj" in name else 0.02
            assert abs(value.mean()) < 5 * std / math.sqrt(value.numel()), name
            assert value.std() == pytest.approx(std, rel=5 / math.sqrt(value.numel())), name
    assert not torch.equal(weights["layers.0.self_attn.q_proj.weight"], weights["layers.1.self_attn.q_proj.weight"])


def test_biases_are_zero_and_weights_depend_on_the_seed() -> None:
    spec = PRESETS["tiny"]
    spec = replace(spec, layers=1, block=replace(spec.block, qkv_bias=True))
    one, other = Decoder(spec), Decoder(spec)
    initialise(one, seed=1, spec=spec)
    initialise(other, seed=2, spec=spec)
    assert one.embed_tokens is not None
    assert other.embed_tokens is not None
    assert not torch.equal(one.embed_tokens.weight, other.embed_tokens.weight)
    assert not one.get_parameter("layers.0.self_attn.q_proj.bias").any()


def test_values_depend_on_the_name_and_not_on_the_order() -> None:
    class Pair(nn.Module):
        def __init__(self, names: tuple[str, ...]) -> None:
            super().__init__()
            for name in names:
                self.register_parameter(name, nn.Parameter(torch.empty(3, 5)))

    one, other = Pair(("a", "b")), Pair(("b", "a"))
    for module in (one, other):
        initialise(module, seed=0, spec=SPEC)
    assert torch.equal(one.get_parameter("a"), other.get_parameter("a"))
    assert torch.equal(one.get_parameter("b"), other.get_parameter("b"))
    assert not torch.equal(one.get_parameter("a"), one.get_parameter("b"))


def on_two_ranks(program: Callable[[int, Path], None], folder: Path) -> None:
    """Run `program` in two forked processes of one gloo group."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_rank, args=(program, rank, folder)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(60)
    failures = [file.read_text() for file in sorted(folder.glob("failure-*"))]
    assert not failures, failures[0]
    assert [each.exitcode for each in ranks] == [0, 0]


def _rank(program: Callable[[int, Path], None], rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        program(rank, folder)
    except BaseException:
        (folder / f"failure-{rank}").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()


def sharded() -> Decoder:
    """Return a decoder that FSDP2 sharded on the meta device, allocated but not initialised."""
    mesh = init_device_mesh("cpu", (2,))
    with torch.device("meta"):
        module = Decoder(SPEC)
    for layer in module.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    module.to_empty(device="cpu")
    return module


def fill_shards(rank: int, folder: Path) -> None:
    wanted = reference()
    module = sharded()
    initialise(module, seed=5, spec=SPEC)
    assert module.lm_head is not None
    assert module.embed_tokens is not None
    assert module.lm_head.weight is module.embed_tokens.weight
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), wanted[name]), name
    module(tokens=torch.zeros(1, 4, dtype=torch.long))[0].sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def fill_other_placements(rank: int, folder: Path) -> None:
    wanted = reference()
    mesh = init_device_mesh("cpu", (2,))
    module = Decoder(SPEC)
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter.ndim > 1:
                shard = distribute_tensor(torch.empty_like(parameter), mesh, [Shard(parameter.ndim - 1)])
                setattr(owner, name, nn.Parameter(shard))
    assert module.lm_head is not None
    assert module.embed_tokens is not None
    module.lm_head.weight = module.embed_tokens.weight
    initialise(module, seed=5, spec=SPEC)
    for name, parameter in module.named_parameters():
        value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert torch.equal(value, wanted[name]), name


def read_and_write_shards(rank: int, folder: Path) -> None:
    unsharded = Decoder(SPEC)
    initialise(unsharded, seed=5, spec=SPEC)
    wanted = dict(hf_tensors(unsharded, SPEC))
    if rank == 0:
        save_file(wanted, folder / "model.safetensors")
    dist.barrier()
    module = sharded()
    load_hf_weights(module, folder)
    written = dict(hf_tensors(module, SPEC))
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("program", [fill_shards, fill_other_placements, read_and_write_shards])
def test_values_do_not_depend_on_the_sharding(program: Callable[[int, Path], None], tmp_path: Path) -> None:
    on_two_ranks(program, tmp_path)
