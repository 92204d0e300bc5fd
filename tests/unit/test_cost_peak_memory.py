"""Memory, worked by hand for a tiny decoder, counted on the real layer, and compared with measurements."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.saved_storages import saved_storages
from trimaran.core import GIB, Bytes, Comm, Flops, Mesh, Plan
from trimaran.cost import (
    CONTEXT_BYTES,
    GRAPH_BYTES,
    PROCESS_BYTES,
    STATE_BYTES,
    Job,
    LayerBytes,
    Memory,
    MemoryInputs,
    States,
    find_stack,
    layer_bytes,
    memory_inputs_of,
    parts_of,
    peak_memory_of,
    saved_layer_bytes,
    saved_on_rank,
    states_of,
    without_sequence_parallelism,
)
from trimaran.machine import Cluster, find_device
from trimaran.models import PRESETS, ExpertSpec, ModelSpec, Opaque, Outline, OutlineLayer, Tower, outline_of
from trimaran.nets import Attention, FeedForward, rotation_at
from trimaran.nets import DecoderLayer as RealLayer

# A layer: attention 4 * (4 + 2 + 2 + 4) = 48, feed-forward 3 * 4 * 8 = 96, norms 8. Ends: 2 * 10 * 4, final norm 4.
PAGE = ModelSpec(name="page", layers=2, hidden=4, heads=2, kv_heads=1, head_dim=2, ffn=8, vocab=10, max_seq_len=64)
H200 = Cluster(device=find_device("H200"))
ONE_B = outline_of(PRESETS["llama-3.2-1b"])


def plan_of(**fields: Any) -> Plan:
    return Plan.model_validate(fields)


def inputs_of(plan: Plan, spec: ModelSpec = PAGE, stack: str = "trimaran") -> MemoryInputs:
    return memory_inputs_of(Job(outline=outline_of(spec), seq_len=64, stack=find_stack(stack)), H200, plan)


def states(plan: Plan, spec: ModelSpec = PAGE, stack: str = "trimaran") -> States:
    """Return the states of the first rank of the pipeline."""
    return states_of(inputs_of(plan, spec, stack), parts_of(outline_of(spec), plan, seq_len=64)[0])


def layer(plan: Plan, spec: ModelSpec = PAGE, stack: str = "trimaran", *, cpu: bool = False) -> LayerBytes:
    inputs = inputs_of(plan, spec, stack)
    block = outline_of(spec).main.runs[0][0]
    assert isinstance(block, OutlineLayer)
    parts = plan.mesh.cp if plan.comm.context == "gather" else 1
    return layer_bytes(block, inputs.saved, inputs.element_bytes, inputs.tp, parts, cpu)


def memory(plan: Plan, outline: Outline, *, seq_len: int, gpu: str = "H200", stack: str = "trimaran") -> Memory:
    return peak_memory_of(
        Job(outline=outline, seq_len=seq_len, stack=find_stack(stack)), Cluster(device=find_device(gpu)), plan
    )


def test_a_replica_holds_16_bytes_per_parameter() -> None:
    held = states(plan_of())
    assert (held.weights, held.gradients, held.optimizer, held.masters) == (4 * 388, 4 * 388, 8 * 388, 0)


@pytest.mark.parametrize(
    ("sharding", "grad_accum", "expected"),
    [
        ("optimizer", 1, (388, 388, 776)),  # each layer's gradients are reduced at once
        ("optimizer", 2, (388, 1552, 776)),
        ("gradients", 2, (388, 388, 776)),
        ("parameters", 2, (388, 388, 776)),
    ],
)
def test_zero_1_accumulates_unsharded_gradients(sharding: str, grad_accum: int, expected: tuple[int, int, int]) -> None:
    held = states(plan_of(sharding=sharding, mesh={"dp_shard": 4}, grad_accum=grad_accum))
    assert (held.weights, held.gradients, held.optimizer) == expected


@pytest.mark.parametrize(
    ("sharding", "weights", "gradients"), [("optimizer", 2, 4), ("gradients", 2, 1), ("parameters", 0.5, 1)]
)
def test_a_distributed_optimizer_shards_masters_and_moments_first(
    sharding: str, weights: float, gradients: float
) -> None:
    held = states(plan_of(sharding=sharding, mesh={"dp_shard": 4}, precision="bf16"), stack="megatron")
    assert (held.weights, held.gradients) == (weights * 388, gradients * 388)
    assert (held.masters, held.optimizer) == (4 * 97, 8 * 97)


def test_deepspeed_has_16_bit_weights_and_sharded_masters() -> None:
    plan = plan_of(sharding="optimizer", mesh={"dp_shard": 4}, precision="bf16", engine="deepspeed")
    held = states(plan)
    assert (held.weights, held.masters, held.optimizer, held.gradients) == (2 * 388, 388, 776, 4 * 388)
    assert states(plan.model_copy(update={"engine": "torch"})).masters == 0


def test_context_parallel_ranks_hold_shards() -> None:
    assert states(Plan(mesh=Mesh(dp_shard=2, cp=2), sharding="parameters")).weights == 388


def test_a_pipeline_accumulates_unsharded_gradients() -> None:
    held = states(Plan(mesh=Mesh(dp_shard=2, pp=2), sharding="parameters", grad_accum=2))
    assert (held.weights, held.gradients, held.optimizer) == (4 * 96, 4 * 192, 8 * 96)


def test_a_sharded_rank_gathers_its_root_at_the_loss_and_its_layers_in_backward() -> None:
    held = states(Plan(mesh=Mesh(dp_shard=4), sharding="parameters", precision="bf16"))
    root, one = 80, (388 - 80) / 2
    assert held.gathered_at_loss == 2 * root
    # Both layers are small and share a unit, so no other one is being reduced. The head has its gradient.
    assert held.gathered_in_backward == 2 * root + 2 * 2 * one + 2 * root / 2
    # Then its gradients are copied to fp32. Its weights are freed, but not those gathered ahead: the same ones.
    assert held.gathered_in_reduction == 2 * root + 2 * 2 * one + (2 + 4) * 2 * one + 2 * root / 2
    assert states(Plan(precision="bf16")).gathered_at_loss == 0


def test_the_root_and_the_units_that_are_prefetched_are_not_reduced_in_backward() -> None:
    spec = replace(PAGE, layers=8, hidden=1024, heads=8, kv_heads=8, head_dim=128, ffn=4096, vocab=10_000)
    count = outline_of(spec).num_parameters
    root = 2 * 10_000 * 1024
    held = states(plan_of(mesh={"dp_shard": 4}, sharding="parameters", comm={"prefetch": 1}), spec)
    assert held.unreduced / held.gradients == pytest.approx((root + 2 * (count - root) / 8) / count, rel=1e-3)


@pytest.mark.parametrize(
    ("sharding", "comm", "layers"),
    [
        ("optimizer", {}, 8),
        ("gradients", {}, 8),
        ("gradients", {"reshard": "always"}, 0),
        ("parameters", {"reshard": "never"}, 8),
        ("parameters", {"prefetch": 3}, 0),
        ("parameters", {"reshard": 2}, 4),
    ],
)
def test_weights_stay_gathered_as_long_as_the_plan_says(sharding: str, comm: dict[str, Any], layers: int) -> None:
    held = states(plan_of(mesh={"dp_shard": 4}, sharding=sharding, comm=comm), replace(PAGE, layers=8))
    assert held.gathered_at_loss == pytest.approx(
        4 * (80 + layers * (152 + 0.5)), abs=20
    )  # the last norm belongs to no layer


def test_autocast_keeps_a_16_bit_copy_of_every_matrix() -> None:
    for precision in ("bf16", "fp16"):
        plan = plan_of(precision=precision, micro_batch=8, mesh={"dp_replicate": 2})
        assert memory(plan, outline_of(PAGE), seq_len=64).terms["casts"] == 2 * (2 * (48 + 96) + 40)
    assert "casts" not in memory(plan_of(micro_batch=8), outline_of(PAGE), seq_len=64).terms


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (Plan(), 32 + 32 + (4 * 16 + 8) + 4 * 32),
        (Plan(precision="fp16"), 16 + 16 + (2 * 12 + 8) + 2 * 32),
        (Plan(precision="fp16", compile=True), 16 + 16 + (2 * 12 + 8) + 2 * 24),
        (Plan(precision="bf16", compile=True), 16 + 16 + (2 * 12 + 8) + 2 * 16),
    ],
)
def test_a_layer_saves_what_its_operators_save(plan: Plan, expected: int) -> None:
    assert layer(plan).none == expected
    is_eager_16_bit = plan.precision != "fp32" and not plan.compile  # its norms cast their input to fp32
    assert layer(plan, cpu=True).none == expected + (12 if is_eager_16_bit else 8) * 4  # norms are not fused on a CPU


def test_experts_save_the_tokens_that_they_receive() -> None:
    routed = replace(PAGE, block=replace(PAGE.block, experts=ExpertSpec(num_experts=4, top_k=2, ffn=6, shared_ffn=3)))
    dense = layer(Plan()).none - 4 * 4 * 8
    assert layer(Plan(), routed).none == dense + 4 * (2 * (4 * 6 + 2 * 4) + 4 * 3)


def test_queries_and_keys_are_saved_before_and_after_their_norm() -> None:
    normed = replace(PAGE, block=replace(PAGE.block, qk_norm=True))
    assert layer(Plan(precision="bf16"), normed).none - layer(Plan(precision="bf16")).none == 2 * (4 + 2)


def test_tp_splits_all_but_the_gathered_input_of_the_projections() -> None:
    assert layer(Plan(mesh=Mesh(tp=2))).none == 32 + (32 + (4 * 16 + 8) + 4 * 32) / 2


def test_sequence_parallelism_splits_norms_and_the_inputs_of_matmuls() -> None:
    split, whole = plan_of(mesh={"tp": 2}, precision="bf16"), plan_of(precision="bf16")
    for stack in ("megatron", "nanotron"):
        assert layer(split, stack=stack).none == layer(whole, stack=stack).none / 2
    job = Job(outline=outline_of(PAGE), seq_len=64, stack=without_sequence_parallelism(find_stack("megatron")))
    saved = memory_inputs_of(job, Cluster(device=find_device("H200")), split).saved
    block = outline_of(PAGE).main.runs[0][0]
    assert isinstance(block, OutlineLayer)
    without = layer_bytes(block, saved, 2, 2, 1, False).none
    assert without == 8 * 4 + (layer(whole, stack="megatron").none - 8 * 4) / 2


def test_cp_splits_tokens_but_gathers_all_keys() -> None:
    gather = Plan(mesh=Mesh(cp=2), precision="bf16")
    exchange = gather.model_copy(update={"comm": Comm(context="exchange")})
    alone = layer(Plan(precision="bf16", mesh=Mesh(dp_replicate=2))).none
    assert layer(exchange).none == alone
    assert layer(gather).none == alone + 2 * (2 * 4 * 2 - 2 * 2)


@pytest.mark.parametrize(
    ("recompute", "expected"),
    [
        ("none", 4 * 264),
        ("full", 4 * 16),
        (1, 4 * 16),
        (2, 2 * 264 + 2 * 16),
        (3, 2 * 264 + 2 * 16),  # the first and the fourth
        ("selective", 4 * (16 + 4 * (4 + 2 + 4 + 8) + 8)),
        ("elementwise", 4 * (16 + 4 * (4 + 2 + 2 + 4 + 4 + 8 + 8 + 4) + 8)),
    ],
)
def test_a_recomputed_layer_saves_its_input(recompute: str | int, expected: int) -> None:
    assert saved_layer_bytes(layer(Plan()), recompute, 4) == expected


def test_selective_recompute_in_torchtitan_saves_the_first_matmul_and_in_megatron_all() -> None:
    bf16 = plan_of(precision="bf16", recompute="selective")
    assert layer(bf16, stack="torchtitan").selective == 2 * (4 + 4 + 2 + 4 + 8 + 4) + 8
    assert layer(bf16, stack="megatron").selective == layer(bf16, stack="megatron").none


def test_activations_and_logits_grow_with_the_tokens_of_a_micro_batch() -> None:
    terms = memory(Plan(micro_batch=800, grad_accum=7), outline_of(PAGE), seq_len=5).terms
    assert terms["activations"] == 4000 * (2 * 264 + 32)
    assert terms["logits"] == 12 * 4000 * 10


def test_a_recomputed_layer_is_in_memory_during_its_backward() -> None:
    small_loss = replace(PAGE, vocab=1)
    terms = memory(Plan(micro_batch=8, recompute="full"), outline_of(small_loss), seq_len=64).terms
    assert terms["activations"] == 512 * (2 * 16 + 264 + 4 * (3 * 8 + 2 * 4))  # and its gradients: 8 and 4 features
    assert "logits" not in terms


def test_one_device_stores_split_weights_and_16_bit_gradients() -> None:
    alone, sums = (states(plan_of(precision="bf16", grad_accum=num)) for num in (1, 4))
    assert (alone.weights, alone.masters, alone.optimizer) == (2 * 388, 2 * 388, 8 * 388)
    assert (alone.gradients, alone.gradients_at_loss, alone.duplicate_gradients) == (2 * 388, 0, 0)
    assert (sums.gradients, sums.gradients_at_loss, sums.duplicate_gradients) == (
        4 * 388,
        4 * 388,
        2 * 40,
    )  # one 16-bit gradient at a time
    assert "casts" not in memory(plan_of(precision="bf16", micro_batch=8), outline_of(PAGE), seq_len=64).terms
    for whole in (plan_of(), plan_of(precision="fp16"), plan_of(precision="bf16", offload="optimizer")):
        assert (states(whole).weights, states(whole).masters) == (4 * 388, 0)
    assert states(plan_of(precision="bf16"), stack="torchtitan").weights == 4 * 388


def test_tied_and_frozen_weights_stay_in_fp32_beside_split_weights() -> None:
    tied = states(plan_of(precision="bf16"), replace(PAGE, tied=True))
    assert (tied.weights, tied.masters) == (2 * 308 + 4 * 40, 2 * 308)
    assert (tied.gradients, tied.duplicate_gradients) == (2 * 308 + 4 * 40, 4 * 40)
    outline = outline_of(PAGE)
    frozen = replace(outline, towers=(replace(outline.main, frozen=True),))
    inputs = memory_inputs_of(Job(outline=frozen, seq_len=64), H200, plan_of(precision="bf16"))
    held = states_of(inputs, parts_of(frozen, inputs.plan, seq_len=64)[0])
    assert (held.weights, held.masters, held.gradients) == (4 * 388, 0, 0)


def test_the_peak_is_the_loss_for_long_batches_and_the_last_gradient_for_short_ones() -> None:
    long = memory(Plan(micro_batch=8), outline_of(PAGE), seq_len=64).terms
    short = memory(Plan(), ONE_B, seq_len=16).terms
    assert long.keys() == {"weights", "optimizer", "activations", "logits", "workspace"}
    assert short.keys() == {"weights", "optimizer", "gradients", "workspace"}
    assert short["gradients"] == 4 * (1_235_814_400 + 128_256 * 2048)  # the tied embedding has two gradients


def test_replicas_hold_gradient_buckets_during_the_loss() -> None:
    terms = memory(Plan(micro_batch=8, mesh=Mesh(dp_replicate=2)), outline_of(PAGE), seq_len=64).terms
    assert terms["gradients"] == 1552


def test_offloaded_tensors_are_on_the_host() -> None:
    def predicted(gpu: str, **fields: Any) -> Memory:
        return memory(plan_of(micro_batch=8, **fields), outline_of(PAGE), seq_len=64, gpu=gpu)

    assert "optimizer" not in predicted("H200", offload="optimizer").terms
    assert predicted("H200", offload="optimizer").host == 8 * 388
    up = predicted("H200", offload="parameters", sharding="parameters")
    assert not up.terms.keys() & {"weights", "optimizer", "gradients"}
    assert up.terms["gathered"] == (4 + 4) * 80  # fp32 copies before the cast
    assert up.host == int(8 * 388 + 1.33 * 8 * 388)
    assert predicted("H200", offload="activations").terms["activations"] == 512 * (264 + 32)
    assert predicted("cpu", offload="optimizer").terms == predicted("cpu").terms  # a CPU has no other memory


def test_a_frozen_first_tower_holds_only_its_weights() -> None:
    layer = OutlineLayer(hidden=4, heads=2, kv_heads=2, head_dim=2, ffn=8, gated=False, causal=False)
    vision = Tower(name="vision", runs=((layer, 3),), hidden=4, positions=16)
    language = outline_of(PAGE).main

    def predicted(*towers: Tower) -> dict[str, int]:
        return dict(memory(Plan(micro_batch=8), Outline(name="vlm", towers=towers), seq_len=64).terms)

    alone, frozen, trained = (
        predicted(language),
        predicted(replace(vision, frozen=True), language),
        predicted(vision, language),
    )
    assert frozen["activations"] == alone["activations"] < trained["activations"]
    assert frozen["weights"] == alone["weights"] + 4 * 3 * layer.parameters == trained["weights"]
    assert frozen["optimizer"] == alone["optimizer"]
    assert predicted(language, replace(vision, frozen=True, outputs=1))["activations"] > alone["activations"]


def test_each_tower_is_sharded_and_recomputed_by_its_own_settings() -> None:
    layer = OutlineLayer(hidden=4, heads=2, kv_heads=2, head_dim=2, ffn=8, gated=False, causal=False)
    vlm = Outline(
        name="vlm",
        towers=(Tower(name="vision", runs=((layer, 3),), hidden=4, positions=64), outline_of(PAGE).main),
    )
    job, whole = Job(outline=vlm, seq_len=64), {"mesh": {"dp_shard": 4}, "sharding": "parameters"}

    def held(**towers: Any) -> tuple[float, float]:
        inputs = memory_inputs_of(job, H200, plan_of(**whole, towers=towers))
        (part,) = parts_of(vlm, inputs.plan, seq_len=64)
        return states_of(inputs, part).weights, saved_on_rank(inputs, part, gathered=0).layers

    weights, kept = held()
    assert held(vision={"sharding": "none"})[0] - weights == 3 * 3 * layer.parameters
    assert held(vision={"recompute": "full"})[1] < kept


def test_all_towers_of_a_rank_share_fixed_size_buckets() -> None:
    layer = OutlineLayer(hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256)
    vision, language = (
        Tower(name=name, runs=((layer, 2),), hidden=64, vocab=64, outputs=64) for name in ("vision", "language")
    )
    plan = Plan.model_validate({"mesh": {"dp_shard": 8}, "sharding": "gradients", "precision": "bf16"})
    one, two = (
        peak_memory_of(
            Job(outline=Outline(name="n", towers=towers), seq_len=64, stack=find_stack("deepspeed")), H200, plan
        ).peak
        for towers in ((language,), (vision, language))
    )
    assert 2 * 10**9 < one <= two < 1.01 * one


def test_an_opaque_block_counts_by_its_totals() -> None:
    block = Opaque(
        name="head", parameters=5, sample_flops=Flops(1), saved_bytes=Bytes(1000), moved_bytes=Bytes(1),
        output_bytes=Bytes(10),
    )  # fmt: skip
    outline = Outline(name="net", towers=(Tower(name="net", runs=((block, 3),), hidden=4),))
    assert memory(Plan(micro_batch=9), outline, seq_len=1).terms["activations"] == 9 * 3 * 1000
    again = memory(Plan(micro_batch=9, recompute="full"), outline, seq_len=1).terms
    assert again["activations"] == 9 * (3 * 10 + 1000)


@pytest.mark.parametrize(("precision", "joint"), [("fp32", False), ("bf16", False), ("bf16", True)])
def test_the_model_agrees_with_what_the_real_layer_saves(precision: str, joint: bool) -> None:
    spec = replace(PRESETS["tiny"], hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=160)
    real, (rows, length) = RealLayer(spec), (4, 128)
    if joint:
        join(real)
    rotation = rotation_at(torch.arange(length)[None], spec.block.rope, spec.head_dim)
    known = {each.untyped_storage().data_ptr() for each in (*real.parameters(), *rotation)}
    with saved_storages() as saved, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        stream = torch.randn(rows, length, spec.hidden, requires_grad=True)
        real(stream.bfloat16() if precision == "bf16" else stream, rotation, None)
    weight_casts = {2 * each.numel() for each in real.parameters()} if precision == "bf16" else set()
    sizes = [each.untyped_storage().nbytes() for where, each in saved.items() if where not in known]
    per_token = sum(size for size in sizes if size not in weight_casts) / (rows * length)
    mesh = {} if joint else {"dp_replicate": 2}  # split weights or fp32 weights
    predicted = layer(plan_of(precision=precision, mesh=mesh), spec, cpu=not joint)
    assert per_token == pytest.approx(predicted.none, rel=0.02)


def join(real: RealLayer) -> None:
    """Convert the layer as on a single device: 16-bit weights with joint projections."""
    for linear in (each for each in real.modules() if isinstance(each, torch.nn.Linear)):
        linear.weight.data = linear.weight.data.bfloat16()
    assert isinstance(real.self_attn, Attention)
    assert isinstance(real.mlp, FeedForward)
    for part in (real.self_attn, real.mlp):
        part.join_projections()
    real.joint = True


def test_on_a_cpu_the_process_and_heap_fragmentation_count() -> None:
    found = memory(Plan(micro_batch=8), outline_of(PAGE), seq_len=64, gpu="cpu")
    assert found.terms["process"] == PROCESS_BYTES
    assert found.terms["heap"] == int(0.6 * (found.terms["activations"] + found.terms["logits"]))
    assert found.device == found.reserved


def test_a_device_needs_memory_for_its_context_and_communicators() -> None:
    alone = memory(Plan(micro_batch=8), outline_of(PAGE), seq_len=64)
    many = memory(Plan(micro_batch=8, mesh=Mesh(dp_replicate=8)), outline_of(PAGE), seq_len=64)
    assert alone.device == alone.reserved + CONTEXT_BYTES + GRAPH_BYTES
    assert alone.peak < alone.reserved
    assert many.device - many.reserved > CONTEXT_BYTES


def test_nanotron_logs_its_first_rank_and_megatron_its_last() -> None:
    plan = plan_of(mesh={"pp": 2}, grad_accum=4, precision="bf16", micro_batch=8)
    assert "logits" not in memory(plan, outline_of(PAGE), seq_len=64, stack="nanotron").terms
    assert "logits" in memory(plan, outline_of(PAGE), seq_len=64, stack="megatron").terms


@pytest.mark.parametrize(
    ("preset", "states", "fields", "measured"),
    [
        ("llama-3.2-1b", "fp32", {}, 35.93),
        ("llama-3.2-1b", "fp32", {"loss": "chunked"}, 32.94),
        ("llama-3.2-1b", "fp32", {"loss": "logits"}, 54.95),
        ("llama-3.2-1b", "fp32", {"recompute": "selective"}, 28.68),
        ("llama-3.2-1b", "bf16", {}, 30.35),
        ("llama-3.2-1b", "8bit", {}, 27.61),
        ("llama-3.2-3b", "fp32", {}, 76.85),
        ("llama-3.2-3b", "fp32", {"precision": "fp8"}, 71.61),
        ("llama-3.1-8b", "fp32", {"micro_batch": 2}, 119.97),
    ],
)
def test_predictions_match_measurements_on_one_h200(
    preset: str, states: str, fields: dict[str, Any], measured: float
) -> None:
    plan = plan_of(**{"micro_batch": 4, "precision": "bf16", "compile": True, "loss": "fused", **fields})
    outline = outline_of(replace(PRESETS[preset], tied=False))
    job = Job(outline=outline, seq_len=4096, stack=find_stack("trimaran"), state_bytes=STATE_BYTES[states])
    assert peak_memory_of(job, H200, plan).peak / GIB == pytest.approx(measured, rel=0.002)


@pytest.mark.parametrize(
    ("shards", "micro_batch", "traced"), [(8, 1, 39.15), (8, 2, 66.68), (128, 2, 56.16)]
)  # fmt: skip
def test_predictions_match_torchtitan_traces(shards: int, micro_batch: int, traced: float) -> None:
    plan = plan_of(
        mesh={"dp_shard": shards}, sharding="parameters", micro_batch=micro_batch, precision="bf16",
        recompute="selective",
    )  # fmt: skip
    found = memory(plan, outline_of(PRESETS["llama-3.1-8b"]), seq_len=8192, stack="torchtitan")
    assert found.peak / GIB == pytest.approx(traced, rel=0.025)


@pytest.mark.parametrize(
    ("comm", "per_parameter"),
    [
        ({"compression": "topk"}, 4),
        ({"compression": {"kind": "topk", "momentum": 0.9}}, 8),
        ({"compression": "int8"}, 0),
        ({"local_steps": 8}, 0),
        ({"local_steps": {"steps": 8, "outer": {"optimizer": "nesterov"}}}, 8),
        ({"local_steps": {"steps": 8, "compression": "sparse", "outer": {"optimizer": "sgd"}}}, 8),
        ({"local_steps": {"steps": 8, "outer": {"optimizer": "nesterov", "offload": True}}}, 0),
    ],
)
def test_what_replicas_keep_to_send_less_counts(comm: dict[str, Any], per_parameter: int) -> None:
    mesh = {"dp_replicate": 2}
    plain, found = (states(plan_of(mesh=mesh, comm=each)).optimizer for each in ({}, comm))
    assert found - plain == per_parameter * 388
