"""A state saved under one plan resumes under any other, bit for bit (principles 2 and 3, docs/principles.md)."""

import math
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from tests.cases import quick_or_slow, slow
from tests.hf_models import save_model
from tests.parity import TOLERANCE, plan_for
from tests.resume import SEGMENT_STEPS, SavedState, TrainedSegment, bits, recipe_for, train_segment
from trimaran.core import Plan, Recipe
from trimaran.parallel import BlockLayout, BlockReshard, LossScale, codebook, dequantize, quantize


def pipeline(schedule: str) -> dict[str, Any]:
    return {"pp": 2, "pipeline": {"schedule": schedule}, "grad_accum": 4 if schedule == "zero-bubble" else 2}


ALONE: dict[str, Any] = {}
SMALL = {"layers": 1, "vocab": 96}  # for 16 bits, in which a CPU is slow
UNTIED: tuple[dict[str, Any], ...] = (
    {"dp_shard": 3, "sharding": "optimizer"},
    {"dp_shard": 2, "tp": 2, "grad_accum": 2, "offload": "parameters"},
    pipeline("interleaved"),
    {"cp": 2, "offload": "optimizer"},
    ALONE,
)
TIED: tuple[dict[str, Any], ...] = (
    pipeline("gpipe"),
    pipeline("zero-bubble"),  # both copies of the embedding are on one rank
    {"dp_shard": 2, "sharding": "parameters"},
)
MIXTURE: tuple[dict[str, Any], ...] = (
    {"dp_replicate": 2, "ep": 2},
    {"dp_shard": 2},
)
CORRECTED = {"scoring": "sigmoid", "correction": True, "correction_rate": 0.02}  # the biases are part of the state
CHAINS = {
    "untied": (recipe_for(shape={"tied": False}), UNTIED),
    "tied": (recipe_for(shape={"tied": True}), TIED),
    "mixture": (recipe_for("tiny-moe", shape={"layers": 2, "experts": {"router": CORRECTED}}), MIXTURE),
    "bf16-states": (
        recipe_for(optimizer={"states": "bf16"}),
        (pipeline("1f1b"), {"dp_shard": 3, "offload": "optimizer"}),
    ),
    "8bit-states": (recipe_for(shape={"layers": 2}, optimizer={"states": "8bit"}), (pipeline("1f1b"), {"dp_shard": 3})),
}


def plans_of(recipe: Recipe, chain: tuple[dict[str, Any], ...]) -> list[Plan]:
    return [plan_for(recipe, **{"grad_accum": 1} | fields) for fields in chain]


@lru_cache
def uninterrupted(name: str) -> list[float]:
    recipe, chain = CHAINS[name]
    return train_segment(recipe, plan_for(recipe, grad_accum=1), steps=SEGMENT_STEPS * len(chain)).losses


@pytest.mark.parametrize("name", quick_or_slow(CHAINS, lambda name: name in ("tied", "mixture")))
def test_a_run_that_changes_its_plan_several_times_has_the_same_losses(name: str) -> None:
    recipe, chain = CHAINS[name]
    losses: list[float] = []
    saved: SavedState | None = None
    for plan in plans_of(recipe, chain):
        segment = train_segment(recipe, plan, steps=SEGMENT_STEPS, after=saved)
        if saved is not None:
            segment.assert_loaded(saved)
        losses, saved = losses + segment.losses, segment.saved
    assert losses == pytest.approx(uninterrupted(name), rel=TOLERANCE)


def assert_exact_resume(recipe: Recipe, plan: Plan, full: TrainedSegment) -> None:
    """Fail unless a resume from the midway state ends as the uninterrupted run, bit for bit."""
    again = train_segment(recipe, plan, steps=SEGMENT_STEPS, after=full.midway)
    again.assert_loaded(full.midway)
    again.assert_same_end(replace(full, losses=full.losses[SEGMENT_STEPS:]))


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        slow(
            (
                {"dp_shard": 2, "precision": "bf16", "grad_accum": 2},
                {"shape": SMALL, "optimizer": {"states": "bf16"}},
            )
        ),
        (pipeline("zero-bubble"), {}),
        ({"dp_replicate": 2, "precision": "fp16"}, {"shape": SMALL}),
        slow(({"dp_replicate": 4}, {})),  # from three ranks on, the order of a sum matters
    ],
    ids=["fsdp-bf16", "pipeline", "ddp-fp16", "ddp-four"],
)
def test_a_resume_under_the_same_plan_is_exact(fields: dict[str, Any], settings: dict[str, Any]) -> None:
    recipe = recipe_for(**settings)
    (plan,) = plans_of(recipe, (fields,))
    assert_exact_resume(recipe, plan, train_segment(recipe, plan, steps=2 * SEGMENT_STEPS))


def test_a_resume_with_dropout_is_exact(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.3, embd_pdrop=0.3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    recipe = Recipe.model_validate(recipe_for().model_dump() | {"model": {"family": "hf", "path": str(tmp_path)}})
    (plan,) = plans_of(recipe, ({"dp_replicate": 2},))
    assert_exact_resume(recipe, plan, train_segment(recipe, plan, steps=2 * SEGMENT_STEPS))


HF_CHAINS: list[tuple[str, tuple[dict[str, Any], ...]]] = [
    ("llama-odd", ({"tp": 2}, pipeline("1f1b"))),
    ("llama-odd", (pipeline("1f1b"), {"dp_shard": 3}, pipeline("gpipe") | {"dp_shard": 2})),
    ("gpt2", (pipeline("1f1b"), {"tp": 2}, pipeline("1f1b") | {"dp_shard": 2})),
    ("qwen3-moe", ({"dp_shard": 2, "ep": 2}, pipeline("1f1b") | {"dp_shard": 2, "ep": 2}, {"tp": 2})),
    ("qwen3-moe", ({"dp_replicate": 2, "tp": 2, "ep": 2}, {"dp_shard": 2, "tp": 2, "ep": 2}, pipeline("1f1b"))),
]


@pytest.mark.parametrize(("name", "chain"), quick_or_slow(HF_CHAINS, lambda case: case is HF_CHAINS[0]), ids=str)
def test_a_hugging_face_model_changes_its_plan(name: str, chain: tuple[dict[str, Any], ...], tmp_path: Path) -> None:
    save_model(name, tmp_path)
    recipe = Recipe.model_validate(recipe_for().model_dump() | {"model": {"family": "hf", "path": str(tmp_path)}})
    reference = train_segment(recipe, plan_for(recipe, grad_accum=1), steps=2 * len(chain) * SEGMENT_STEPS)
    losses, saved = reference.losses[: len(chain) * SEGMENT_STEPS], reference.midway
    for plan in plans_of(recipe, chain):
        segment = train_segment(recipe, plan, steps=SEGMENT_STEPS, after=saved)
        segment.assert_loaded(saved)
        losses, saved = losses + segment.losses, segment.saved
    assert losses == pytest.approx(reference.losses, rel=TOLERANCE)


# Two ranks split the 600 columns of a projection in the middle of a block of 256.
WIDE = recipe_for(shape={"layers": 2, "ffn": 600}, optimizer={"states": "8bit"})


@lru_cache
def wide(tp: int) -> TrainedSegment:
    return train_segment(WIDE, plan_for(WIDE, grad_accum=1, tp=tp), steps=2 * SEGMENT_STEPS)


def test_a_resume_of_eight_bit_states_under_the_same_plan_is_exact() -> None:
    assert any("_scale@300/" in key for key in wide(2).saved.index)
    assert_exact_resume(WIDE, plan_for(WIDE, grad_accum=1, tp=2), wide(2))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_eight_bit_states_whose_blocks_do_not_align_are_requantized(before: int, after: int) -> None:
    first = wide(before)
    second = train_segment(WIDE, plan_for(WIDE, grad_accum=1, tp=after), steps=SEGMENT_STEPS, after=first.midway)
    assert second.losses == pytest.approx(first.losses[SEGMENT_STEPS:], rel=2e-4)
    loaded = SavedState(SEGMENT_STEPS, second.loaded[:1], {})  # rank 0, which has at least half of the columns
    for moment, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        was, now = (moments(saved, moment, signed=signed) for saved in (first.midway, loaded))
        error = (was[:, : now.shape[1]] - now).abs().max() / was.abs().max()
        assert 0 < error < 0.01


def moments(saved: SavedState, moment: str, *, signed: bool) -> torch.Tensor:
    """Return the dequantized moments of the first down projection."""
    name = "layers.0.mlp.down_proj.weight"
    (key,) = [key for key in saved.index if key.startswith(f"optimizer/{moment}_scale") and key.endswith(name)]
    held = {each: saved.index[each].regions for each in (key, f"optimizer/{moment}/{name}")}
    scales, codes = (torch.cat([saved.read(each, region) for region in regions], 1) for each, regions in held.items())
    book = codebook(torch.device("cpu"), signed=signed)
    width = codes.shape[1] // len(held[key]) if "@" in key else codes.shape[1]
    cuts = zip(codes.split(width, 1), scales.split(-(-width // 256), 1), strict=True)
    return torch.cat([dequantize(*cut, book) for cut in cuts], 1)


def test_moments_in_another_format_are_refused() -> None:
    (plan,) = plans_of(WIDE, (ALONE,))
    with pytest.raises(AssertionError, match=r"K030: the checkpoint has the optimizer's moments in 8bit, .* in bf16"):
        train_segment(
            recipe_for(shape={"layers": 2, "ffn": 600}, optimizer={"states": "bf16"}),
            plan,
            steps=1,
            after=wide(1).saved,
        )


def test_a_state_that_lacks_a_tensor_is_refused() -> None:
    recipe = recipe_for()
    (plan,) = plans_of(recipe, (ALONE,))
    saved = train_segment(recipe, plan, steps=1).saved
    del saved.index["optimizer/exp_avg/layers.1.mlp.down_proj.weight"]
    with pytest.raises(AssertionError, match=r"K001: .* does not have optimizer/exp_avg/layers.1.mlp.down_proj.weight"):
        train_segment(recipe, plan, steps=1, after=saved)


def test_a_restored_loss_scale_continues_its_count() -> None:
    before, after = LossScale(initial=8.0, growth_interval=3), LossScale(initial=8.0, growth_interval=3)
    for norm in (1.0, math.inf, 1.0, 1.0):
        before.accepts(torch.tensor(norm))
    after.restore(before.state())
    assert (after.value, after.accepts(torch.tensor(1.0)), after.value) == (4.0, True, 8.0)


def test_states_that_are_requantized_keep_their_values() -> None:
    values = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    values[:, 253] = 9.0  # in the second shard, and in the first block of the unsharded tensor
    book, cut = codebook(torch.device("cpu"), signed=True), BlockLayout(500, 250)
    parts = [quantize(part, book) for part in values.split(250, 1)]
    codes, saved = torch.cat([part[0] for part in parts], 1), torch.cat([part[1] for part in parts], 1)
    was = torch.cat([dequantize(*part, book) for part in parts], 1)
    scales = torch.empty(3, 2)
    BlockReshard(
        codes=codes, scales=scales, saved_scales=saved, saved_layout=cut, columns=range(500), signed=True
    ).requantize()
    assert (cut.suffix, cut.num_blocks, BlockLayout(500, 256).suffix, BlockLayout(500, 500).num_blocks) == (
        "@250",
        2,
        "",
        2,
    )
    assert (dequantize(codes, scales, book) - was).abs().max() < 0.02 * was.abs().max()
    assert not torch.equal(bits(scales), bits(saved))
