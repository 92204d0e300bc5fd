"""Split weights: which weights are split, how they are read and written, and their gradients."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.resume import bits
from trimaran.checkpoint import Copier, CopyMetadata, MemorySource, RankMemory, encode_items, fill_shards
from trimaran.core import Mesh, Plan
from trimaran.models import PRESETS, VLM_PRESETS, ModelSpec
from trimaran.nets import DecoderLayer, FeedForward, Network, initialise, network_of
from trimaran.parallel import (
    SplitWeight,
    TensorShard,
    apply_joint_projections,
    autocast,
    build_share,
    copy_to_memory,
    item_view,
    meta_of,
    override_precision,
    split_fp32,
    split_weights,
    tensor_shards,
)

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48}
DENSE = replace(PRESETS["tiny"], **SMALL, tied=False)
PLAN = Plan(precision="bf16")


def filled(spec: ModelSpec = DENSE, seed: int = 1) -> Network:
    network = network_of(spec)
    initialise(network.module, seed=seed, spec=spec)
    return network


def split_names(network: Network, plan: Plan = PLAN) -> set[str]:
    split = split_weights((network,), plan)
    names = {name for name, each in network.module.named_parameters() if split.weight(each) is not None}
    for name, each in network.module.named_parameters():
        assert each.dtype == (torch.bfloat16 if name in names else torch.float32), name
        assert not vars(each), "nothing is hung on a parameter"
    return names


def matrices_of(network: Network) -> set[str]:
    return {name for name, each in network.module.named_parameters() if each.ndim >= 2}


def test_every_matrix_of_a_matmul_is_split() -> None:
    network = filled()
    expected = matrices_of(network) - {"embed_tokens.weight"}
    assert len(expected) == 1 + 7 * 2
    assert split_names(network) == expected


def test_a_tied_head_is_not_split() -> None:
    network = filled(replace(DENSE, tied=True))
    expected = matrices_of(network) - {"embed_tokens.weight"}
    assert split_names(network) == expected
    assert "lm_head.weight" not in expected


def test_experts_are_split_and_their_router_is_not() -> None:
    network = filled(replace(PRESETS["tiny-moe"], **SMALL))
    names = split_names(network)
    assert "layers.0.mlp.experts.gate_proj" in names
    assert not [name for name in names if name.endswith("mlp.gate.weight")]


def test_a_stem_that_sums_its_weights_first_is_not_split() -> None:
    spec = VLM_PRESETS["tiny"]
    network = network_of(spec)
    initialise(network.module, seed=1, spec=spec)
    not_split = matrices_of(network) - split_names(network)
    assert not_split == {"vision.stem.patch_embed.weight", "language.embed_tokens.weight"}


def test_a_parameter_with_new_memory_keeps_its_lower_half() -> None:
    network = filled()
    split = split_weights((network,), PLAN)
    weight = network.module.get_parameter("lm_head.weight")
    before = split.full_tensor(weight)
    weight.data = weight.data.clone()
    assert torch.equal(split.full_tensor(weight), before)
    weight.data.zero_()
    assert not torch.equal(split.full_tensor(weight), before)


def test_modules_with_their_own_dtype_and_frozen_modules_are_not_split() -> None:
    network = filled()
    override_precision(network, {"layers.0.mlp": "fp32"}, CPU)
    network.module.get_submodule("layers.1").requires_grad_(False)
    names = split_names(network)
    assert "layers.0.self_attn.q_proj.weight" in names
    assert not [name for name in names if name.startswith(("layers.0.mlp", "layers.1"))]


@pytest.mark.parametrize(
    "fields",
    [{"precision": "fp32"}, {"precision": "fp16"}, {"mesh": Mesh(dp_replicate=2)}, {"offload": "optimizer"}],
    ids=str,
)
def test_other_plans_do_not_split_weights(fields: dict[str, Any]) -> None:
    plan_fields: dict[str, Any] = {"precision": "bf16"} | fields
    assert split_names(filled(), Plan(**plan_fields)) == set()


def test_a_split_weight_is_exported_in_fp32_without_losing_a_bit() -> None:
    plain, network = filled(), filled()
    split = split_weights((network,), PLAN)
    theirs = dict(plain.disk_tensors())
    ours = dict(network.disk_tensors(split.full_tensor))
    assert ours.keys() == theirs.keys()
    for name, each in ours.items():
        assert torch.equal(bits(each), bits(theirs[name])), name


@pytest.fixture(params=[7, 40, 2**24])
def chunk_sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with small and with large chunks."""
    monkeypatch.setattr(tensor_shards, "CHUNK_VALUES", request.param)


def odd_values(*shape: int) -> Tensor:
    """Return values of all kinds: large, small, denormal, negative, zeros of both signs, half way between two bf16."""
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, shape, generator=draw, dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    values = torch.where(values.isfinite(), values, 0.1)
    values.view(-1)[:4] = torch.tensor([0.0, -0.0, 1 + 2**-8, -1 - 2**-8])
    return values


@pytest.mark.usefixtures("chunk_sizes")
@pytest.mark.parametrize("turned", [False, True])
def test_values_are_read_as_they_were_written(turned: bool) -> None:
    values = odd_values(13, 10)
    upper, lower = (each.clone() for each in split_fp32(torch.zeros(10, 13).t() if turned else torch.zeros(13, 10)))
    assert upper.is_contiguous() is not turned
    held = SplitWeight(upper, lower)
    held.copy_(values)
    assert torch.equal(bits(held.joined()), bits(values))
    assert torch.equal(bits(held[3:9, 2:5].joined()), bits(values[3:9, 2:5]))
    held[3:9, 2:5].copy_(torch.ones(6, 3))
    assert held.joined().sum() != values.sum()
    assert torch.equal(held.joined()[3:9, 2:5], torch.ones(6, 3))


@pytest.mark.usefixtures("chunk_sizes")
def test_a_split_weight_is_copied_to_memory_as_fp32() -> None:
    values = odd_values(13, 10)
    split = TensorShard(key="model/w", tensor=SplitWeight(*split_fp32(values)), shape=(20, 10), start=(3, 0))
    plain = replace(split, tensor=values)
    assert meta_of(split) == meta_of(plain)
    for shard in (split, plain):
        share = build_share([shard], [(2, 9)])
        memory = torch.zeros(share.num_bytes, dtype=torch.uint8)
        copy_to_memory(share, [shard], memory)
        assert share.items[0].start == (5, 0)
        assert torch.equal(bits(item_view(memory, share.items[0])), bits(values[2:9]))


@pytest.mark.usefixtures("chunk_sizes")
def test_a_copy_in_memory_is_restored_to_split_weights() -> None:
    values = odd_values(13, 10)
    held, empty = (
        TensorShard(key="model/w", tensor=SplitWeight(*split_fp32(each)), shape=(13, 10), start=(0, 0))
        for each in (values, torch.zeros(13, 10))
    )
    beside = TensorShard(key="model/v", tensor=torch.arange(5.0), shape=(5,), start=(0,))
    share = build_share([beside, held], [(0, 5), (0, 13)])
    fd = os.memfd_create("test")
    rank_memory = RankMemory(fd)
    rank_memory.create_slots(1, num_bytes=share.num_bytes, items_bytes=len(encode_items(share.items)))
    copier = Copier(share)
    for step in (1, 2):  # the second copy uses what the first one cached
        copier.copy(
            rank_memory.slots[0], CopyMetadata(step=step, incarnation=(0, 0), rank=0, world_size=1), [beside, held]
        )
    ((_, kept),) = RankMemory(fd).valid_slots()
    fill_shards([empty], MemorySource({0: kept}))
    assert isinstance(empty.tensor, SplitWeight)
    assert torch.equal(bits(empty.tensor.joined()), bits(values))
    os.close(fd)


def gradients(network: Network, plan: Plan, micro_batches: int) -> dict[str, Tensor]:
    """Return the fp32 gradients of some micro-batches, as the optimizer sees them."""
    for number in range(micro_batches):
        tokens = torch.randint(200, (2, 24), generator=torch.Generator().manual_seed(number))
        with autocast(plan, CPU):
            logits, _ = network.forward({"tokens": tokens})
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
    found = {}
    for name, each in network.module.named_parameters():
        assert each.grad is not None
        found[name] = each.grad.float()
    return found


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_equal_those_of_fp32_weights_under_autocast(micro_batches: int) -> None:
    plan = Plan(precision="bf16", grad_accum=micro_batches)
    plain, network = filled(), filled()
    for each in (each for pair in (plain, network) for each in pair.module.parameters()):
        # No value is exactly half way between two bf16: a cast rounds it to even, `split_fp32` away from zero.
        each.data.view(torch.int32).bitwise_or_(1)
    split = split_weights((network,), plan)
    ours, theirs = (gradients(each, plan, micro_batches) for each in (network, plain))
    assert ours.keys() == theirs.keys()
    for name, each in ours.items():
        assert torch.equal(each, theirs[name]), name
    dtypes = {each.grad.dtype for each in split.lower_halves if each.grad is not None}
    assert dtypes == {torch.float32 if micro_batches > 1 else torch.bfloat16}


def test_fp32_projections_on_a_cpu_are_slices_of_one_tensor() -> None:
    plain, network = filled(), filled()
    apply_joint_projections((network,), Plan())
    assert list(dict(network.module.named_parameters())) == list(dict(plain.module.named_parameters()))
    layer = network.blocks[0]
    assert isinstance(layer, DecoderLayer)
    assert layer.fused
    assert isinstance(layer.mlp, FeedForward)
    for projections in (layer.self_attn.projections, layer.mlp.projections):
        assert len({each.weight.untyped_storage().data_ptr() for each in projections}) == 1
    ours, theirs = (gradients(each, Plan(), 1) for each in (network, plain))
    for name, each in ours.items():
        assert torch.allclose(each, theirs[name], rtol=1e-4, atol=1e-6), name
    for name, each in network.module.named_parameters():
        assert torch.equal(each, plain.module.get_parameter(name)), name


def test_a_module_with_a_hook_is_still_called() -> None:
    network, called = filled(), []
    hooked = network.module.get_submodule("layers.1.mlp.down_proj")
    hooked.register_forward_hook(lambda *_: called.append(1))
    apply_joint_projections((network,), Plan())
    gradients(network, Plan(), 1)
    assert called
    first, second = (each for each in network.blocks if isinstance(each, DecoderLayer))
    assert first.fused
    assert second.self_attn.joint
    assert not second.fused


@pytest.mark.parametrize(
    "plan",
    [
        Plan(compile=True),
        Plan(recompute="selective"),
        Plan(mesh=Mesh(dp_shard=2), sharding="parameters"),
        Plan(mesh=Mesh(tp=2)),
        Plan(mesh=Mesh(pp=2)),
        Plan(precision="fp16"),
    ],
)
def test_other_plans_do_not_join_projections(plan: Plan) -> None:
    assert Plan(mesh=Mesh(dp_replicate=2)).joins_projections_on_cpu
    assert not plan.joins_projections_on_cpu
    assert not Plan().joins_projections, "only on a CPU"
