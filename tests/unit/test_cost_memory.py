"""Bytes, worked by hand for a decoder that fits on a page, and counted on the real one."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from trimaran.core import Comm, Mesh, Plan
from trimaran.cost import memory
from trimaran.cost.pipeline import Part, parts_of
from trimaran.models import PRESETS, Experts, ModelSpec
from trimaran.nets.attention import rotation_at
from trimaran.nets.decoder import Layer

# A layer: attention 4 * (4 + 2 + 2 + 4) = 48, feed-forward 3 * 4 * 8 = 96, norms 8. Ends: 2 * 10 * 4, final norm 4.
PAGE = ModelSpec(
    name="page", layers=2, hidden=4, heads=2, kv_heads=1, head_dim=2, ffn=8, vocab=10, max_seq_len=64
)  # fmt: skip
NUM_PARAMETERS = 2 * (48 + 96 + 8) + 80 + 4


def part(plan: Plan, spec: ModelSpec = PAGE) -> Part:
    """Return what the first rank of the pipeline has."""
    return parts_of(spec, plan, seq_len=64)[0]


def states(plan: Plan) -> tuple[int, int, int]:
    mine = part(plan)
    return memory.weights(plan, mine), memory.gradients(plan, mine), memory.optimizer_states(plan, mine)


def test_a_replica_holds_sixteen_bytes_a_parameter() -> None:
    assert PAGE.num_parameters == NUM_PARAMETERS == 388
    assert states(Plan()) == (4 * 388, 4 * 388, 8 * 388)


@pytest.mark.parametrize(
    ("sharding", "grad_accum", "expected"),
    [
        ("optimizer", 1, (388, 388, 776)),  # each layer's gradients are reduced as soon as they are there
        ("optimizer", 2, (388, 1552, 776)),
        ("gradients", 2, (388, 388, 776)),
        ("parameters", 2, (388, 388, 776)),
    ],
)
def test_a_shard_keeps_its_share_and_zero_1_whole_gradients_while_they_accumulate(
    sharding: str, grad_accum: int, expected: tuple[int, int, int]
) -> None:
    plan = Plan.model_validate({"sharding": sharding, "mesh": {"dp_shard": 4}, "grad_accum": grad_accum})
    assert states(plan) == expected


def test_shards_lie_on_the_parts_of_a_sequence_too() -> None:
    assert states(Plan(mesh=Mesh(dp_shard=2, cp=2), sharding="parameters")) == (388, 388, 776)


def test_a_pipeline_accumulates_whole_gradients_whatever_is_sharded() -> None:
    plan = Plan(mesh=Mesh(dp_shard=2, pp=2), sharding="parameters", grad_accum=2)
    assert part(plan).parameters == 152 + 40
    assert states(plan) == (4 * 96, 4 * 192, 8 * 96)


def test_a_sharded_rank_gathers_the_root_and_two_layers() -> None:
    plan = Plan(mesh=Mesh(dp_shard=4), sharding="parameters", precision="bf16")
    assert memory.gathered(plan, part(plan)) == 2 * (2 * 84 + 2 * 152)
    assert memory.gathered(Plan(precision="bf16"), part(Plan())) == 0


@pytest.mark.parametrize(
    ("sharding", "comm", "layers"),
    [
        ("optimizer", {}, 8),
        ("gradients", {}, 8),
        ("gradients", {"reshard": "always"}, 2),
        ("parameters", {"reshard": "never"}, 8),
        ("parameters", {"prefetch": 3}, 4),
        ("parameters", {"reshard": 2}, 2 + 4),
    ],
)
def test_weights_are_whole_for_as_long_as_the_plan_keeps_them(sharding: str, comm: dict[str, Any], layers: int) -> None:
    plan = Plan.model_validate({"mesh": {"dp_shard": 4}, "sharding": sharding, "comm": comm})
    deep = replace(PAGE, layers=8)
    assert memory.gathered(plan, part(plan, deep)) == 4 * (2 * 84 + layers * 152)


def test_autocast_keeps_a_bf16_copy_of_every_matrix_that_multiplies() -> None:
    for precision in ("bf16", "fp16", "fp8"):
        plan = Plan.model_validate({"precision": precision})
        assert memory.casts(PAGE, plan, part(plan)) == 2 * (2 * (48 + 96) + 40)
    assert memory.casts(PAGE, Plan(), part(Plan())) == 0


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (Plan(), 32 + 32 + (4 * 16 + 8) + 4 * 32),
        (Plan(precision="bf16"), 32 + 40 + (2 * 12 + 8) + 2 * 32),
        (Plan(precision="bf16", compile=True), 32 + 8 + (2 * 12 + 8) + 2 * 24),
    ],
)
def test_a_layer_keeps_what_its_operators_save(plan: Plan, expected: int) -> None:
    assert memory.layer_activations(PAGE, plan, kind="cuda") == expected
    assert memory.layer_activations(PAGE, plan, kind="cpu") == expected + 8 * 4  # norms are not fused there


def test_experts_keep_the_rows_of_the_tokens_they_were_sent() -> None:
    routed = replace(PAGE, block=replace(PAGE.block, experts=Experts(num_experts=4, top_k=2, ffn=6, shared_ffn=3)))
    dense = memory.layer_activations(PAGE, Plan(), kind="cuda") - 4 * 4 * 8
    assert memory.layer_activations(routed, Plan(), kind="cuda") == dense + 4 * (2 * (4 * 6 + 2 * 4) + 4 * 3)


def test_activations_and_logits_grow_with_the_tokens_of_a_micro_batch() -> None:
    plan = Plan(micro_batch=3, grad_accum=7)
    assert memory.activations(PAGE, plan, part(plan), kind="cuda", seq_len=5) == 15 * (2 * 264 + 32)
    assert memory.logits(PAGE, plan, part(plan), seq_len=5) == 12 * 15 * 10


def test_slices_split_all_but_the_gathered_input_of_the_projections() -> None:
    plan = Plan(mesh=Mesh(tp=2))
    assert memory.layer_activations(PAGE, plan, kind="cuda") == 32 + (32 + (4 * 16 + 8) + 4 * 32) // 2
    assert memory.logits(PAGE, plan, part(plan), seq_len=5) == 12 * 5 * 10 // 2
    assert part(plan).parameters == 2 * ((48 + 96) // 2 + 8) + 80 // 2 + 4


def test_the_parts_of_a_sequence_split_its_tokens_but_gathered_keys_are_all_there() -> None:
    gather = Plan(mesh=Mesh(cp=2), precision="bf16")
    exchange = gather.model_copy(update={"comm": Comm(context="exchange")})
    alone = memory.layer_activations(PAGE, Plan(precision="bf16"), kind="cuda")
    assert memory.layer_activations(PAGE, exchange, kind="cuda") == alone
    assert memory.layer_activations(PAGE, gather, kind="cuda") == alone + 2 * (2 * 4 * 2 - 2 * 2)
    assert memory.local_tokens(Plan(mesh=Mesh(cp=2), micro_batch=3), 8) == 12


@pytest.mark.parametrize(
    ("recompute", "expected"),
    [
        ("none", 4 * 264),
        ("full", 4 * 16),
        (1, 4 * 16),
        (2, 2 * 264 + 2 * 16),
        (3, 2 * 264 + 2 * 16),  # the first and the fourth
        ("selective", 4 * (16 + 4 * (4 + 2 + 4 + 8) + 8)),
    ],
)
def test_a_layer_that_is_computed_again_keeps_its_input(recompute: str | int, expected: int) -> None:
    plan = Plan.model_validate({"recompute": recompute})
    deep = replace(PAGE, layers=4)
    assert memory.saved_by_layers(deep, plan, part(plan, deep), kind="cuda") == expected


def test_the_layer_at_work_is_there_when_backward_computes_it_again() -> None:
    plan = Plan(micro_batch=8, recompute="full")
    terms = memory.peak_terms(PAGE, plan, kind="cuda", seq_len=64)
    assert terms["activations"] == 512 * (2 * 16 + 32 + 264)
    assert "logits" not in terms
    assert terms["gradients"] == 1552


def test_what_is_offloaded_is_not_on_the_device() -> None:
    def told(kind: str, **fields: Any) -> dict[str, int]:
        plan = Plan.model_validate({"micro_batch": 8, "mesh": {"dp_shard": 2}, "sharding": "parameters"} | fields)
        return memory.peak_terms(PAGE, plan, kind=kind, seq_len=64)

    assert "optimizer" not in told("cuda", offload="optimizer")
    assert not told("cuda", offload="parameters").keys() & {"weights", "optimizer", "gradients"}
    assert told("cuda", offload="activations")["activations"] == 512 * (2 * 264 + 32)
    assert told("cpu", offload="parameters") == told("cpu")  # there is nowhere else


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_operator_list_is_what_the_reference_layer_saves(precision: str) -> None:
    spec = replace(PRESETS["tiny"], hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=160)
    layer, (rows, length) = Layer(spec), (4, 128)
    rotation = rotation_at(torch.arange(length)[None], spec.block.rope, spec.head_dim)
    known = {each.untyped_storage().data_ptr() for each in (*layer.parameters(), *rotation)}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor  # holding it keeps its address from being used again
        return tensor

    watched = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with watched, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        layer(torch.randn(rows, length, spec.hidden, requires_grad=True), rotation, None)
    weight_casts = {2 * each.numel() for each in layer.parameters()} if precision == "bf16" else set()
    sizes = [each.untyped_storage().nbytes() for where, each in saved.items() if where not in known]
    per_token = sum(size for size in sizes if size not in weight_casts) / (rows * length)
    expected = memory.layer_activations(spec, Plan.model_validate({"precision": precision}), kind="cpu")
    assert per_token == pytest.approx(expected, rel=0.02)


def test_the_peak_is_the_loss_for_long_batches_and_the_update_for_short_ones() -> None:
    long = memory.peak_terms(PAGE, Plan(micro_batch=8), kind="cuda", seq_len=64)
    short = memory.peak_terms(PRESETS["llama-3.2-1b"], Plan(), kind="cuda", seq_len=16)
    assert long.keys() == {"weights", "optimizer", "activations", "logits", "workspace"}
    assert short.keys() == {"weights", "optimizer", "gradients", "workspace"}


def test_replicas_keep_their_gradient_buckets_through_the_loss() -> None:
    terms = memory.peak_terms(PAGE, Plan(micro_batch=8, mesh=Mesh(dp_replicate=2)), kind="cuda", seq_len=64)
    assert terms["gradients"] == 1552


def test_on_a_cpu_the_process_and_the_holes_in_its_heap_count() -> None:
    terms = memory.peak_terms(PAGE, Plan(micro_batch=8), kind="cpu", seq_len=64)
    assert terms["process"] == memory.PROCESS_BYTES
    assert terms["heap"] == int(0.6 * (terms["activations"] + terms["logits"]))


def test_a_device_must_hold_more_than_its_tensors() -> None:
    alone, many = Plan(), Plan(mesh=Mesh(dp_replicate=8))
    assert memory.reserved_bytes(1000, alone, kind="cuda") == 1100
    assert memory.needed_bytes(1100, many, kind="cuda") > memory.needed_bytes(1100, alone, kind="cuda") > 1100
    assert memory.needed_bytes(memory.reserved_bytes(1000, alone, kind="cpu"), alone, kind="cpu") == 1000
