"""Weights in two halves: which ones, what is read and written of them, and the gradients that they get."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.resume import bits
from trimaran.checkpoint.copier import Copier
from trimaran.checkpoint.load_state import fill
from trimaran.checkpoint.memory_copies import Label, MemorySource, RankMemory, pack_items
from trimaran.checkpoint.rank_share import copy_in, lay_out, view_of, whole_of
from trimaran.checkpoint.tensor_shards import TensorShard
from trimaran.core import Mesh, Plan
from trimaran.models import PRESETS, VLM_PRESETS, ModelSpec
from trimaran.nets import Network, initialise, network_of
from trimaran.nets.hf_weights import whole
from trimaran.optim import split_weights as split_weights_module
from trimaran.optim.split_bf16 import split
from trimaran.optim.split_weights import SplitWeights, split_weights, split_weights_of
from trimaran.parallel import override_precision
from trimaran.parallel.precision import autocast

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48}
DENSE = replace(PRESETS["tiny"], **SMALL, tied=False)
PLAN = Plan(precision="bf16")


def filled(spec: ModelSpec = DENSE, seed: int = 1) -> Network:
    network = network_of(spec)
    initialise(network.module, seed=seed, spec=spec)
    return network


def names_in_halves(network: Network, plan: Plan = PLAN) -> set[str]:
    lows = split_weights((network,), plan)
    names = {name for name, each in network.module.named_parameters() if split_weights_of(each) is not None}
    for name, each in network.module.named_parameters():
        assert each.dtype == (torch.bfloat16 if name in names else torch.float32), name
        assert (each in lows) == (name in names), name
    return names


def matrices_of(network: Network) -> set[str]:
    return {name for name, each in network.module.named_parameters() if each.ndim >= 2}


def test_every_matrix_of_a_product_is_split() -> None:
    network = filled()
    wanted = matrices_of(network) - {"embed_tokens.weight"}
    assert len(wanted) == 1 + 7 * 2
    assert names_in_halves(network) == wanted


def test_a_tied_head_stays_whole() -> None:
    network = filled(replace(DENSE, tied=True))
    wanted = matrices_of(network) - {"embed_tokens.weight"}
    assert names_in_halves(network) == wanted
    assert "lm_head.weight" not in wanted


def test_experts_are_split_and_their_router_is_not() -> None:
    network = filled(replace(PRESETS["tiny-moe"], **SMALL))
    names = names_in_halves(network)
    assert "layers.0.mlp.experts.gate_proj" in names
    assert not [name for name in names if name.endswith("mlp.gate.weight")]


def test_a_stem_that_sums_its_weights_first_keeps_them_whole() -> None:
    spec = VLM_PRESETS["tiny"]
    network = network_of(spec)
    initialise(network.module, seed=1, spec=spec)
    whole_ones = matrices_of(network) - names_in_halves(network)
    assert whole_ones == {"vision.stem.patch_embed.weight", "language.embed_tokens.weight"}


def test_a_parameter_whose_memory_moves_takes_its_lower_half_along() -> None:
    network = filled()
    split_weights((network,), PLAN)
    weight = network.module.get_parameter("lm_head.weight")
    before = whole(weight)
    weight.data = weight.data.clone()
    assert torch.equal(whole(weight), before)
    weight.data.zero_()
    assert not torch.equal(whole(weight), before)


def test_what_computes_in_its_own_way_or_is_not_trained_stays_whole() -> None:
    network = filled()
    override_precision(network, {"layers.0.mlp": "fp32"}, CPU)
    network.module.get_submodule("layers.1").requires_grad_(False)
    names = names_in_halves(network)
    assert "layers.0.self_attn.q_proj.weight" in names
    assert not [name for name in names if name.startswith(("layers.0.mlp", "layers.1"))]


@pytest.mark.parametrize(
    "fields",
    [{"precision": "fp32"}, {"precision": "fp16"}, {"mesh": Mesh(dp_replicate=2)}, {"offload": "optimizer"}],
    ids=str,
)
def test_other_plans_keep_weights_whole(fields: dict[str, Any]) -> None:
    assert names_in_halves(filled(), Plan(**{"precision": "bf16"} | fields)) == set()


def test_a_weight_in_halves_is_read_whole_bit_by_bit() -> None:
    plain, network = filled(), filled()
    split_weights((network,), PLAN)
    theirs = dict(plain.disk_tensors())
    ours = dict(network.disk_tensors())
    assert ours.keys() == theirs.keys()
    for name, each in ours.items():
        assert torch.equal(bits(each), bits(theirs[name])), name


@pytest.fixture(params=[7, 40, 2**24])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few values are joined at once, or many."""
    monkeypatch.setattr(split_weights_module, "AT_ONCE", request.param)


def odd_values(*shape: int) -> Tensor:
    """Return values of all kinds: large, small, denormal, negative, zeros of both signs and halfway between two."""
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, shape, generator=draw, dtype=torch.int64).to(torch.int32)
    values = words.view(torch.float32)
    values = torch.where(values.isfinite(), values, 0.1)
    values.view(-1)[:4] = torch.tensor([0.0, -0.0, 1 + 2**-8, -1 - 2**-8])
    return values


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("turned", [False, True])
def test_values_come_out_as_they_went_in(turned: bool) -> None:
    values = odd_values(13, 10)
    upper, lower = (each.clone() for each in split(torch.zeros(10, 13).t() if turned else torch.zeros(13, 10)))
    assert upper.is_contiguous() is not turned
    held = SplitWeights(upper, lower)
    held.copy_(values)
    assert torch.equal(bits(held.whole()), bits(values))
    assert torch.equal(bits(held[3:9, 2:5].whole()), bits(values[3:9, 2:5]))
    held[3:9, 2:5].copy_(torch.ones(6, 3))
    assert held.whole().sum() != values.sum()
    assert torch.equal(held.whole()[3:9, 2:5], torch.ones(6, 3))


@pytest.mark.usefixtures("at_once")
def test_a_share_has_fp32_whatever_the_form_in_memory() -> None:
    values = odd_values(13, 10)
    composed = TensorShard(key="model/w", tensor=SplitWeights(*split(values)), shape=(20, 10), start=(3, 0))
    plain = replace(composed, tensor=values)
    assert whole_of(composed) == whole_of(plain)
    for piece in (composed, plain):
        share = lay_out([piece], [(2, 9)])
        memory = torch.zeros(share.num_bytes, dtype=torch.uint8)
        copy_in(share, [piece], memory)
        assert share.items[0].start == (5, 0)
        assert torch.equal(bits(view_of(memory, share.items[0])), bits(values[2:9]))


@pytest.mark.usefixtures("at_once")
def test_a_copy_in_memory_is_taken_back_into_halves() -> None:
    values = odd_values(13, 10)
    held, empty = (
        TensorShard(key="model/w", tensor=SplitWeights(*split(each)), shape=(13, 10), start=(0, 0))
        for each in (values, torch.zeros(13, 10))
    )
    beside = TensorShard(key="model/v", tensor=torch.arange(5.0), shape=(5,), start=(0,))
    share = lay_out([beside, held], [(0, 5), (0, 13)])
    fd = os.memfd_create("test")
    rank_memory = RankMemory(fd)
    rank_memory.lay_out(1, num_bytes=share.num_bytes, items_bytes=len(pack_items(share.items)))
    copier = Copier(share)
    for step in (1, 2):  # the second time over what the first has found out
        copier.copy(rank_memory.slots[0], Label(step=step, incarnation=(0, 0), rank=0, world_size=1), [beside, held])
    ((_, kept),) = RankMemory(fd).kept()
    fill([empty], MemorySource({0: kept}))
    assert isinstance(empty.tensor, SplitWeights)
    assert torch.equal(bits(empty.tensor.whole()), bits(values))
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
        sums = getattr(each, "main_grad", None)
        assert (sums is None) == (each.grad is not None), "one or the other"
        gradient = each.grad if sums is None else sums
        assert gradient is not None
        found[name] = gradient.float()
    return found


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_are_those_of_fp32_weights_under_autocast(
    micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Joint products add up in another order; tests of `nets.joint` look at that.
    monkeypatch.setattr(split_weights_module, "join_projections", lambda *_: {})
    # Selective recompute leaves every projection a product of its own: a joint one rounds its sums once, not thrice.
    plan = Plan(precision="bf16", grad_accum=micro_batches, recompute="selective")
    plain, network = filled(), filled()
    for each in (each for pair in (plain, network) for each in pair.module.parameters()):
        # A value in the very middle of two bf16 is rounded up here, and to the even one by a cast: there are none.
        each.data.view(torch.int32).bitwise_or_(1)
    assert split_weights((network,), plan)
    ours, theirs = (gradients(each, plan, micro_batches) for each in (network, plain))
    assert ours.keys() == theirs.keys()
    for name, each in ours.items():
        assert torch.equal(each, theirs[name]), name
    summed = [each for each in network.module.parameters() if hasattr(each, "main_grad")]
    assert len(summed) == (len(matrices_of(network)) - 1 if micro_batches > 1 else 0)
    assert all(each.main_grad.dtype == torch.float32 for each in summed)
