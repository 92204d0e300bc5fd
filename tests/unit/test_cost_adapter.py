"""Bytes, FLOPs and seconds of adapters, worked by hand and counted on the real layer."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.saved_storages import saved_storages
from trimaran.core import AdapterSection, Mesh, ModelSection, Plan, Prediction
from trimaran.cost import (
    Job,
    States,
    layer_bytes,
    memory_inputs_of,
    parts_of,
    peak_memory_of,
    predict,
    rates_of,
    saved_on_rank,
    stage_inputs_of,
    stage_times_of,
    states_of,
)
from trimaran.machine import Cluster, find_device
from trimaran.models import PRESETS, ModelSpec, Outline, OutlineLayer, outline_for, outline_of, with_adapter
from trimaran.nets import DecoderLayer as RealLayer
from trimaran.nets import add_adapter, rotation_at

# A layer: attention 4 * (4 + 2 + 2 + 4) = 48, feed-forward 3 * 4 * 8 = 96, norms 8. Ends: 2 * 10 * 4, final norm 4.
# Adapters of rank 3: inputs and outputs of q 8, k and v 6 each, o 8, gate, up and down 12 each are 64, times 3 is 192.
PAGE = ModelSpec(name="page", layers=2, hidden=4, heads=2, kv_heads=1, head_dim=2, ffn=8, vocab=10, max_seq_len=64)
ALL, FROZEN, TRAINED = "all-linear", 388, 2 * 192
# The same with rows of whole blocks of 64, so that its linear layers can be packed: 128 * (64 + 32 + 32 + 64) and
# 3 * 128 * 192 in a layer, 256 for its norms.
WIDE = replace(PAGE, hidden=128, heads=2, kv_heads=1, head_dim=32, ffn=192)
LINEAR, LAYER = 128 * 64 * 2 + 128 * 32 * 2 + 3 * 128 * 192, 256
H200 = Cluster(device=find_device("H200"))
PAIR = replace(H200, devices_per_node=2)


def outline(spec: ModelSpec = PAGE, **fields: Any) -> Outline:
    return with_adapter(outline_of(spec), AdapterSection.model_validate({"rank": 3} | fields))


def states(plan: Plan, model: Outline, rank: int = 0) -> States:
    inputs = memory_inputs_of(Job(outline=model, seq_len=64), H200, plan)
    return states_of(inputs, parts_of(model, plan, seq_len=64)[rank])


def plan_of(**fields: Any) -> Plan:
    return Plan.model_validate({"precision": "bf16"} | fields)


def prediction(model: Outline, plan: Plan, cluster: Cluster = H200, seq_len: int = 2048) -> Prediction:
    return predict(Job(outline=model, seq_len=seq_len), cluster, plan)


def test_a_rank_holds_2_bytes_per_frozen_parameter_and_16_per_trained_one() -> None:
    held = states(plan_of(mesh={"dp_replicate": 2}), outline())
    assert held.weights == 2 * FROZEN + 4 * TRAINED
    assert (held.gradients, held.optimizer, held.masters) == (4 * TRAINED, 8 * TRAINED, 0)
    in_fp32 = states(plan_of(mesh={"dp_replicate": 2}, precision="fp32"), outline())
    assert in_fp32.weights == 4 * FROZEN + 4 * TRAINED


def test_one_device_splits_the_adapters_and_has_16_bit_gradients() -> None:
    held = states(plan_of(), outline())
    assert (held.weights, held.masters) == (2 * FROZEN + 2 * TRAINED, 2 * TRAINED)
    assert (held.gradients, held.optimizer) == (2 * TRAINED, 8 * TRAINED)
    magnitudes = 2 * (4 + 2 + 2 + 4 + 8 + 8 + 4)
    dora = states(plan_of(), outline(kind="dora"))
    assert (dora.masters, dora.gradients) == (2 * TRAINED, 2 * TRAINED + 4 * magnitudes)


def test_zero_3_shards_frozen_and_trained_weights_and_gathers_in_16_bits() -> None:
    plan = plan_of(sharding="parameters", mesh={"dp_shard": 4})
    held = states(plan, outline())
    assert (held.weights, held.gradients) == ((2 * FROZEN + 4 * TRAINED) / 4, 4 * TRAINED / 4)
    assert held.gathered_at_loss == 2 * 80  # embedding and head
    # Two layers of 152 frozen weights, half of the last norm and 192 trained weights; the fp32 gradients of the layer
    # that is being reduced. While they are copied, one layer is gathered, and all of its 16-bit gradients exist.
    waiting = held.gathered_in_backward - 2 * 80 - 2 * 2 * (152 + 2 + 192)
    assert waiting == 4 * 192 + 2 * 40
    assert held.gathered_in_reduction == 2 * 80 + 2 * (152 + 2 + 192) + (2 + 4) * 192 + 2 * 40


def test_4_bit_weights_take_9_sixteenths_of_a_byte_and_are_whole_on_every_rank() -> None:
    trained = 2 * 3 * sum(each.inputs + each.outputs for each in layer_of(outline(WIDE)).adapted_linears)
    rest = 2 * LAYER + 2 * 10 * 128 + 128
    packed = outline(WIDE, base="4bit")
    assert packed.trained_parameters == trained
    assert states(plan_of(), packed).weights == 0.5625 * 2 * LINEAR + 2 * rest + 2 * trained
    sharded = states(plan_of(sharding="parameters", mesh={"dp_shard": 4}), packed)
    assert sharded.weights == 0.5625 * 2 * LINEAR + (2 * rest + 4 * trained) / 4
    assert sharded.gathered_in_backward < 2 * LINEAR
    # Rows of PAGE's layers are no whole blocks.
    assert states(plan_of(), outline(base="4bit")) == states(plan_of(), outline())


def test_one_unpacked_weight_at_a_time_is_in_memory() -> None:
    plan, model = plan_of(micro_batch=64, recompute="full"), outline(WIDE, base="4bit")
    found = peak_memory_of(Job(outline=model, seq_len=64), H200, plan).terms
    plain = peak_memory_of(Job(outline=outline(WIDE), seq_len=64), H200, plan).terms
    assert found["casts"] - plain.get("casts", 0) == 2 * 128 * 192


def test_tp_splits_one_of_the_two_matrices_of_an_adapter() -> None:
    """Of q, k, v, gate and up the outputs are split, so `lora_B` is; of o and down the inputs, so `lora_A` is."""
    split = 3 * ((4 + 2) + 2 * (4 + 1) + (2 + 4) + 2 * (4 + 4) + (4 + 4))
    held = states(plan_of(mesh={"tp": 2}), outline())
    assert held.optimizer == 8 * 2 * split
    dora = states(plan_of(mesh={"tp": 2}), outline(kind="dora"))
    assert dora.optimizer == 8 * 2 * (split + 2 + 1 + 1 + 4 + 4 + 4 + 4)


def test_pipeline_stages_hold_the_adapters_of_their_layers() -> None:
    first, last = (states(plan_of(mesh={"pp": 2}, grad_accum=4), outline(), rank) for rank in (0, 1))
    assert first.optimizer == last.optimizer == 8 * 192
    assert (first.weights, last.weights) == (2 * (152 + 40) + 4 * 192, 2 * (152 + 44) + 4 * 192)


def test_modules_that_are_trained_in_full_have_gradients_and_moments() -> None:
    held = states(plan_of(mesh={"dp_replicate": 2}), outline(train=["lm_head"]))
    assert held.optimizer == 8 * (TRAINED + 40)
    assert held.weights == 2 * (FROZEN - 40) + 4 * (TRAINED + 40)
    assert outline(train=["lm_head", "embed_tokens"]).trained_parameters == TRAINED + 80
    tied = replace(PAGE, tied=True)
    assert outline(tied, train=["lm_head"]).trained_parameters == TRAINED + 40
    assert states(plan_of(mesh={"dp_replicate": 2}), outline(tied, train=["lm_head"])).optimizer == 8 * (TRAINED + 40)


def test_targets_are_named_as_in_the_model() -> None:
    assert outline(targets=["q_proj", "v_proj"]).trained_parameters == 2 * 3 * (8 + 6)
    assert outline(targets=["layers.*.self_attn.*_proj"]).trained_parameters == outline().trained_parameters
    assert outline(targets=["query_key_value"]).trained_parameters == 2 * 3 * (8 + 6 + 6)
    assert outline(kind="dora", targets=["q_proj"]).trained_parameters == 2 * (3 * 8 + 4)
    head = outline(targets=["lm_head"])
    assert (head.trained_parameters, head.main.bare_head) == (3 * (4 + 10), False)
    assert states(plan_of(mesh={"dp_replicate": 2}), head).optimizer == 8 * 3 * (4 + 10)
    # PEFT's own count for Llama-3.1-8B with rank 16 on every linear layer.
    eight = outline(PRESETS["llama-3.1-8b"], rank=16)
    assert (eight.trained_parameters, eight.num_parameters) == (41_943_040, 8_030_261_248)


def test_only_the_language_tower_of_a_vlm_gets_an_adapter_unless_towers_are_named() -> None:
    section = ModelSection.model_validate({"family": "vlm", "preset": "tiny", "adapter": {"rank": 2}})
    vision, projector, language = outline_for(section).towers
    assert (vision.is_trained, projector.is_trained, language.is_trained) == (False, False, True)
    changed = section.model_copy(update={"adapter": AdapterSection(rank=2, towers=("vision",), train=("projector",))})
    vision, projector, language = outline_for(changed).towers
    assert (vision.adapter is not None, projector.frozen, language.is_trained) == (True, False, False)
    assert projector.trained_parameters == projector.parameters
    assert language.trained_parameters == 0


def test_frozen_weights_cost_4_flops_per_token_and_trained_ones_6() -> None:
    model, plain = outline(), outline_of(PAGE)
    matrices, head, attention = 2 * 144, 40, 2 * 2 * 2 * (2 + 2) * 32
    assert plain.training_flops(64) == 64 * (6 * (matrices + head) + 3 * attention)
    assert model.training_flops(64) == 64 * (4 * (matrices + head) + 6 * TRAINED + 3 * attention)
    head_trained = outline(train=["lm_head"]).training_flops(64)
    assert head_trained == model.training_flops(64) + 64 * 2 * head


def test_a_checkpoint_holds_only_what_is_trained() -> None:
    assert (outline().saved_parameters, outline_of(PAGE).saved_parameters) == (TRAINED, FROZEN)


def layer_of(model: Outline) -> OutlineLayer:
    layer = model.main.runs[0][0]
    assert isinstance(layer, OutlineLayer)
    return layer


@pytest.mark.parametrize("compiled", [False, True])
def test_frozen_layers_save_no_input_unless_their_adapter_needs_it(compiled: bool) -> None:
    def saved(model: Outline) -> float:
        plan = plan_of(mesh={"dp_replicate": 2}, compile=compiled)
        inputs = memory_inputs_of(Job(outline=model, seq_len=64), H200, plan)
        return saved_on_rank(inputs, parts_of(model, plan, seq_len=64)[0], gathered=0).layers / (64 * 2)

    everything = saved(outline_of(PAGE))
    assert saved(outline()) == everything + 2 * 3 * 7  # the low-rank values of seven adapters
    assert saved(outline(targets=["q_proj", "v_proj"])) == everything - 2 * 4 - 2 * 8 + 2 * 3 * 2
    assert saved(outline(targets=["down_proj"])) == everything - 2 * 2 * 4 + 2 * 3
    # Each of seven adapters saves a dropped copy of its input and a mask, and neither shared inputs nor down's own.
    dropped = 3 * (3 * 4 + 4 + 2 * 4 + 8)
    assert saved(outline(dropout=0.1)) == everything - 2 * 2 * 4 - 2 * 8 + dropped + 2 * 3 * 7


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"targets": ["q_proj", "v_proj"]},
        {"targets": ["o_proj", "down_proj"]},
        {"dropout": 0.1},
        {"kind": "dora"},
    ],
    ids=str,
)
def test_the_model_agrees_with_what_the_real_layer_saves(fields: dict[str, Any]) -> None:
    spec = replace(PRESETS["tiny"], hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=160)
    section = AdapterSection.model_validate({"rank": 8} | fields)
    real, (rows, length) = RealLayer(spec).requires_grad_(False).bfloat16(), (4, 128)
    for name, linear in list(real.named_modules()):
        if isinstance(linear, torch.nn.Linear) and (section.targets == ALL or name.split(".")[-1] in section.targets):
            add_adapter(linear, section)
    for parameter in (each for each in real.parameters() if each.requires_grad):
        torch.nn.init.ones_(parameter)
    rotation = rotation_at(torch.arange(length)[None], spec.block.rope, spec.head_dim)
    known = {each.untyped_storage().data_ptr() for each in (*real.parameters(), *rotation)}
    with saved_storages() as saved, torch.autocast("cpu", torch.bfloat16):
        stream = torch.randn(rows, length, spec.hidden, requires_grad=True)
        real(stream.bfloat16(), rotation, None)
    sizes = [each.untyped_storage().nbytes() for where, each in saved.items() if where not in known]
    casts = {2 * each.numel() for each in real.parameters() if each.requires_grad}
    counted = sum(size for size in sizes if size not in casts) / (rows * length)
    inputs = memory_inputs_of(Job(outline=outline_of(spec), seq_len=64), H200, plan_of(mesh={"dp_replicate": 2}))
    predicted = layer_bytes(layer_of(with_adapter(outline_of(spec), section)), inputs.saved, 2, 1, 1, True)
    assert counted == pytest.approx(predicted.none, rel=0.02)


def test_a_frozen_layer_has_no_weight_gradients_and_its_adapters_cost_little() -> None:
    plan, spec = plan_of(micro_batch=4, compile=True), PRESETS["llama-3.1-8b"]
    whole, adapted = prediction(outline_of(spec), plan).time, prediction(outline(spec, rank=16), plan).time
    # Two of three matmuls are left, and attention is as before.
    assert 0.64 < (adapted["forward"] + adapted["backward"]) / (whole["forward"] + whole["backward"]) < 0.85
    assert adapted["optimizer"] < 0.01 * whole["optimizer"]
    wide = prediction(outline(spec, rank=256), plan).time
    assert wide["forward"] + wide["backward"] > adapted["forward"] + adapted["backward"]
    packed = prediction(outline(spec, rank=16, base="4bit"), plan).time
    # 6.98e9 weights are unpacked once in forward and once in backward: 0.5625 bytes are read and 2 written.
    linear = 32 * (4096 * (4096 + 1024) * 2 + 3 * 4096 * 14336)
    seconds = 2.5625 * linear / H200.device.stream_bandwidth
    assert packed["forward"] - adapted["forward"] == pytest.approx(seconds, rel=0.01)
    assert packed["backward"] - adapted["backward"] == pytest.approx(seconds, rel=0.01)


def test_only_gradients_of_adapters_are_sent_and_frozen_weights_are_gathered_in_16_bits() -> None:
    spec = PRESETS["llama-3.1-8b"]
    for sharding, mesh in (("none", Mesh(dp_replicate=2)), ("parameters", Mesh(dp_shard=2))):
        plan = plan_of(sharding=sharding, mesh=mesh, micro_batch=1)
        stages = [
            stage_times_of(stage_inputs_of(job, rates_of(PAIR.device, "bf16"), PAIR.levels, plan))
            for job in (Job(outline=model, seq_len=2048) for model in (outline_of(spec), outline(spec, rank=16)))
        ]
        whole, adapted = (stage.heaviest.units for stage in stages)
        assert sum(unit.count * unit.trained_dense for unit in adapted) == 41_943_040
        gathered = sum(unit.count * unit.dense for unit in adapted) - sum(unit.count * unit.dense for unit in whole)
        assert gathered == 41_943_040
        exposed = [prediction(model, plan, PAIR).exposed for model in (outline_of(spec), outline(spec, rank=16))]
        key = f"gradients on {PAIR.levels[0].name}"
        assert exposed[1][key] < 0.02 * exposed[0][key]


def test_recompute_and_offload_need_less_memory_as_ever() -> None:
    model = outline(PRESETS["llama-3.1-8b"], rank=16)
    plain = prediction(model, plan_of(micro_batch=4, compile=True))
    full = prediction(model, plan_of(micro_batch=4, compile=True, recompute="full"))
    assert full.memory["activations"] < 0.2 * plain.memory["activations"]
    assert full.repeated_flops > 0
    moved = prediction(model, plan_of(micro_batch=4, sharding="parameters", offload="parameters", recompute="full"))
    assert moved.host_bytes > 2 * 8e9
    assert moved.time["offload"] > 0
