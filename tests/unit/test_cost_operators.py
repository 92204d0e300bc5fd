"""Costs of layers whose operators are not those of our decoder: eager attention, vision towers, norms over groups."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from trimaran.core import AdapterSection, Mesh, Plan
from trimaran.cost import (
    EAGER,
    TIME_PROFILES,
    BlockKind,
    BlockSplit,
    Job,
    context_copy_seconds,
    layer_passes,
    opaque_passes,
    predict,
    rates_of,
)
from trimaran.machine import DEVICES, parse_cluster
from trimaran.models import (
    EAGER_ATTENTION,
    PERCEPTION_PRESETS,
    PRESETS,
    Opaque,
    OutlineLayer,
    outline_from_hf,
    outline_of,
    perception_outline,
    with_adapter,
)

H200, PROFILE = rates_of(DEVICES["H200"], "bf16"), TIME_PROFILES["trimaran"]
LAYER = OutlineLayer(hidden=1280, heads=16, kv_heads=16, head_dim=80, ffn=3424)
GPTJ = {
    "model_type": "gptj", "vocab_size": 50400, "n_positions": 2048, "n_embd": 1024, "n_layer": 28, "n_head": 16,
    "rotary_dim": 64,
}  # fmt: skip


def activations(config: Mapping[str, object], seq_len: int, **plan: object) -> int:
    job = Job(outline=outline_from_hf(config, where="config.json", name="small"), seq_len=seq_len)
    chosen = Plan.model_validate({"precision": "bf16", "compile": False, "micro_batch": 4, **plan})
    return predict(job, parse_cluster("1xH200"), chosen).memory["activations"]


def test_eager_attention_keeps_a_value_for_each_pair_of_positions_and_head() -> None:
    per_layer = 4 * 16 * 1024**2 * (4 + 2)  # of 4 samples: in fp32, and the 16-bit copy
    more = activations(GPTJ, 1024) - activations(GPTJ | {"model_type": "phi"}, 1024)
    assert 28 * per_layer <= more < 31 * per_layer  # with the gradients of one layer
    recomputed = activations(GPTJ, 1024, recompute="full")
    assert recomputed - activations(GPTJ | {"model_type": "phi"}, 1024, recompute="full") < 4 * per_layer


def test_an_adapter_keeps_the_operators_of_its_layer() -> None:
    for config, operators in ((GPTJ, EAGER_ATTENTION), (GPTJ | {"model_type": "phi"}, None)):
        outline = with_adapter(outline_from_hf(config, where="config.json", name="small"), AdapterSection(rank=8))
        block, _ = outline.main.runs[0]
        assert isinstance(block, OutlineLayer)
        assert block.adapter is not None
        assert block.operators == operators


def test_a_width_that_is_no_multiple_of_8_takes_ampere_kernels_on_hopper() -> None:
    split = BlockSplit(16384, 1024, 1, 1)
    aligned, odd = (layer_passes(replace(LAYER, ffn=ffn), split, H200, PROFILE, kind=EAGER) for ffn in (3424, 3420))
    assert odd.forward > 1.5 * aligned.forward
    a100 = rates_of(DEVICES["A100-80GB"], "bf16")
    aligned, odd = (layer_passes(replace(LAYER, ffn=ffn), split, a100, PROFILE, kind=EAGER) for ffn in (3424, 3420))
    assert odd.forward == pytest.approx(aligned.forward, rel=0.05)


def test_joint_projections_move_less_than_separate_ones() -> None:
    split, layer = BlockSplit(16384, 4096, 1, 1), outline_of(PRESETS["llama-3.2-1b"]).main.runs[0][0]
    assert isinstance(layer, OutlineLayer)
    joint, plain = (
        layer_passes(layer, split, H200, PROFILE, kind=BlockKind(compiled=False, joint=each)) for each in (True, False)
    )
    assert joint.input_grad < plain.input_grad


def test_context_parallelism_copies_more_with_gathers_than_with_exchanges() -> None:
    gather, exchange = (
        sum(context_copy_seconds(LAYER, 8192, H200, cp=4, tp=1, context=each)) for each in ("gather", "exchange")
    )
    assert gather > exchange > 0
    assert context_copy_seconds(LAYER, 8192, H200, cp=1, tp=1, context="gather") == (0.0, 0.0)


def test_norms_over_groups_take_as_long_for_one_scene_as_for_two() -> None:
    (lidar,) = [
        block for tower in perception_outline(PERCEPTION_PRESETS["base"]).towers for block, _ in tower.runs
        if isinstance(block, Opaque) and block.name == "lidar layer"
    ]  # fmt: skip
    one, two = (opaque_passes(lidar, samples, H200).forward for samples in (1, 2))
    assert one < two < 1.9 * one


def test_the_gradients_of_the_root_and_of_the_last_units_are_not_reduced_at_the_peak() -> None:
    """The peak of a sharded rank with recompute is a layer's backward, when FSDP still prefetches weights."""
    spec = replace(PRESETS["llama-3.1-70b"], layers=8)
    plan = Plan(mesh=Mesh(dp_shard=8, tp=4), sharding="parameters", precision="bf16", recompute="full")
    found = predict(Job(outline=outline_of(spec), seq_len=4096), parse_cluster("4x8xH200"), plan)
    shards = 4 * outline_of(spec).num_parameters / 32
    assert 0.4 * shards < found.memory["gradients"] < 0.7 * shards
