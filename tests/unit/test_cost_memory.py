"""Bytes, worked by hand for a decoder that fits on a page, and counted on the real one."""

from dataclasses import replace

import pytest
import torch

from trimaran.core import Mesh, Plan
from trimaran.cost import memory
from trimaran.models import PRESETS, Experts, ModelSpec
from trimaran.nets.attention import rotation_at
from trimaran.nets.decoder import Layer

# A layer: attention 4 * (4 + 2 + 2 + 4) = 48, feed-forward 3 * 4 * 8 = 96, norms 8. Ends: 2 * 10 * 4, final norm 4.
PAGE = ModelSpec(
    name="page", layers=2, hidden=4, heads=2, kv_heads=1, head_dim=2, ffn=8, vocab=10, max_seq_len=64
)  # fmt: skip
NUM_PARAMETERS = 2 * (48 + 96 + 8) + 80 + 4


def states(plan: Plan) -> tuple[int, int, int]:
    return memory.weights(PAGE, plan), memory.gradients(PAGE, plan), memory.optimizer_states(PAGE, plan)


def test_a_replica_holds_sixteen_bytes_a_parameter() -> None:
    assert PAGE.num_parameters == NUM_PARAMETERS == 388
    assert states(Plan()) == (4 * 388, 4 * 388, 8 * 388)


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [("optimizer", (1552, 1552, 776)), ("gradients", (1552, 388, 776)), ("parameters", (388, 388, 776))],
)
def test_each_stage_shards_one_more_state(sharding: str, expected: tuple[int, int, int]) -> None:
    assert states(Plan.model_validate({"sharding": sharding, "mesh": {"dp_shard": 4}})) == expected


def test_gradients_that_accumulate_stay_whole() -> None:
    assert memory.gradients(PAGE, Plan(mesh=Mesh(dp_shard=4), sharding="parameters", grad_accum=2)) == 1552


def test_a_sharded_rank_gathers_the_root_and_two_layers() -> None:
    plan = Plan(mesh=Mesh(dp_shard=4), sharding="parameters", precision="bf16")
    assert memory.gathered(PAGE, plan) == 2 * (2 * 84 + 2 * 152)
    assert memory.gathered(PAGE, Plan(precision="bf16")) == 0


def test_autocast_keeps_a_bf16_copy_of_every_matrix_that_multiplies() -> None:
    assert memory.casts(PAGE, Plan(precision="bf16")) == 2 * (2 * (48 + 96) + 40)
    assert memory.casts(PAGE, Plan()) == 0


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
    assert memory.activations(PAGE, plan, kind="cuda", seq_len=5) == 15 * (2 * 264 + 32)
    assert memory.logits(PAGE, plan, seq_len=5) == 12 * 15 * 10


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
