"""What one plan kept, any other goes on from: the same bits, and the same course (laws 2 and 3)."""

import math
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from tests.hf_models import SMALL
from tests.parity import TOLERANCE, plan_for
from tests.resume import LEG, Kept, Leg, bits, recipe_for, sail_leg
from trimaran.core import Plan, Recipe
from trimaran.optim.loss_scale import LossScale
from trimaran.optim.block_quantization import codebook, quantised, restored
from trimaran.optim.block_layout import BlockLayout, BlockReshard
from trimaran.train.checkpointing.training_state import forgotten


def pipeline(schedule: str) -> dict[str, Any]:
    return {"pp": 2, "pipeline": {"schedule": schedule}, "grad_accum": 4 if schedule == "zero-bubble" else 2}


ALONE: dict[str, Any] = {}
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
    {"dp_shard": 3},
)
CHAINS = {
    "untied": (recipe_for(shape={"tied": False}), UNTIED),
    "tied": (recipe_for(shape={"tied": True}), TIED),
    "mixture": (recipe_for("tiny-moe"), MIXTURE),
    "bf16-states": (
        recipe_for(optimizer={"states": "bf16"}),
        (pipeline("1f1b"), {"dp_shard": 3, "offload": "optimizer"}),
    ),
    "8bit-states": (recipe_for(optimizer={"states": "8bit"}), (pipeline("1f1b"), {"dp_shard": 3})),
}


def plans_of(recipe: Recipe, chain: tuple[dict[str, Any], ...]) -> list[Plan]:
    return [plan_for(recipe, **{"grad_accum": 1} | fields) for fields in chain]


@lru_cache
def unbroken(name: str) -> list[float]:
    recipe, chain = CHAINS[name]
    return sail_leg(recipe, plan_for(recipe, grad_accum=1), steps=LEG * len(chain)).losses


@pytest.mark.parametrize("name", CHAINS)
def test_a_run_that_changes_its_plan_again_and_again_stays_on_course(name: str) -> None:
    recipe, chain = CHAINS[name]
    losses: list[float] = []
    kept: Kept | None = None
    for plan in plans_of(recipe, chain):
        leg = sail_leg(recipe, plan, steps=LEG, after=kept)
        if kept is not None:
            leg.assert_loaded(kept)
        losses, kept = losses + leg.losses, leg.kept
    assert losses == pytest.approx(unbroken(name), rel=TOLERANCE)


def assert_no_trace(recipe: Recipe, plan: Plan, whole: Leg) -> None:
    """Fail unless ranks that go on from what was kept midway end, bit by bit, as those that kept it."""
    again = sail_leg(recipe, plan, steps=LEG, after=whole.midway)
    again.assert_loaded(whole.midway)
    again.assert_same_end(replace(whole, losses=whole.losses[LEG:]))


@pytest.mark.parametrize(
    ("fields", "train"),
    [
        ({"dp_shard": 2, "precision": "bf16", "grad_accum": 2}, {"optimizer": {"states": "bf16"}}),
        (pipeline("zero-bubble"), {}),
        ({"dp_replicate": 2, "precision": "fp16"}, {}),
        ({"dp_replicate": 4}, {}),  # from three on, the order of a sum shows
    ],
    ids=["fsdp-bf16", "pipeline", "ddp-fp16", "ddp-four"],
)
def test_under_the_same_plan_a_break_leaves_no_trace(fields: dict[str, Any], train: dict[str, Any]) -> None:
    recipe = recipe_for(**train)
    (plan,) = plans_of(recipe, (fields,))
    assert_no_trace(recipe, plan, sail_leg(recipe, plan, steps=2 * LEG))


def test_dropout_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.3, embd_pdrop=0.3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    recipe = Recipe.model_validate(recipe_for().model_dump() | {"model": {"family": "hf", "path": str(tmp_path)}})
    (plan,) = plans_of(recipe, ({"dp_replicate": 2},))
    assert_no_trace(recipe, plan, sail_leg(recipe, plan, steps=2 * LEG))


def test_a_hugging_face_model_changes_its_plan(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL | {"vocab_size": 97}, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    recipe = Recipe.model_validate(recipe_for().model_dump() | {"model": {"family": "hf", "path": str(tmp_path)}})
    tensor, sharded, alone = plans_of(recipe, ({"tp": 2}, {"dp_shard": 3}, ALONE))
    reference = sail_leg(recipe, alone, steps=4 * LEG)
    losses, kept = reference.losses[: 2 * LEG], reference.midway
    for plan in (tensor, sharded):
        leg = sail_leg(recipe, plan, steps=LEG, after=kept)
        leg.assert_loaded(kept)
        losses, kept = losses + leg.losses, leg.kept
    assert losses == pytest.approx(reference.losses, rel=TOLERANCE)


# Two ranks cut the 600 columns of a projection in the middle of a block of 256.
WIDE = recipe_for(shape={"layers": 2, "ffn": 600}, optimizer={"states": "8bit"})


@lru_cache
def wide(tp: int) -> Leg:
    return sail_leg(WIDE, plan_for(WIDE, grad_accum=1, tp=tp), steps=2 * LEG)


def test_eight_bit_states_in_blocks_of_their_own_go_on_exactly_under_their_plan() -> None:
    assert any("_scale@300/" in key for key in wide(2).kept.index)
    assert_no_trace(WIDE, plan_for(WIDE, grad_accum=1, tp=2), wide(2))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_eight_bit_states_whose_blocks_do_not_line_up_are_rounded_once_more(before: int, after: int) -> None:
    first = wide(before)
    second = sail_leg(WIDE, plan_for(WIDE, grad_accum=1, tp=after), steps=LEG, after=first.midway)
    assert second.losses == pytest.approx(first.losses[LEG:], rel=2e-4)
    loaded = Kept(LEG, second.loaded[:1], {})  # rank 0, which has at least half of the columns
    for moment, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        was, now = (moments(kept, moment, signed=signed) for kept in (first.midway, loaded))
        error = (was[:, : now.shape[1]] - now).abs().max() / was.abs().max()
        assert 0 < error < 0.01


def moments(kept: Kept, moment: str, *, signed: bool) -> torch.Tensor:
    """Return what the codes and scales of the first projection back to the stream stand for."""
    name = "layers.0.mlp.down_proj.weight"
    (key,) = [key for key in kept.index if key.startswith(f"optimizer/{moment}_scale") and key.endswith(name)]
    held = {each: kept.index[each].parts for each in (key, f"optimizer/{moment}/{name}")}
    scales, codes = (torch.cat([kept.read(each, part) for part in parts], 1) for each, parts in held.items())
    book = codebook(torch.device("cpu"), signed=signed)
    width = codes.shape[1] // len(held[key]) if "@" in key else codes.shape[1]
    cuts = zip(codes.split(width, 1), scales.split(-(-width // 256), 1), strict=True)
    return torch.cat([restored(*cut, book) for cut in cuts], 1)


def test_states_of_another_format_are_refused_with_the_way_out() -> None:
    (plan,) = plans_of(WIDE, (ALONE,))
    with pytest.raises(AssertionError, match=r"K030: the checkpoint has the optimizer's moments in 8bit, .* in bf16"):
        sail_leg(
            recipe_for(shape={"layers": 2, "ffn": 600}, optimizer={"states": "bf16"}), plan, steps=1, after=wide(1).kept
        )


def test_a_state_that_lacks_a_tensor_is_refused() -> None:
    recipe = recipe_for()
    (plan,) = plans_of(recipe, (ALONE,))
    kept = sail_leg(recipe, plan, steps=1).kept
    del kept.index["optimizer/exp_avg/layers.1.mlp.down_proj.weight"]
    with pytest.raises(AssertionError, match=r"K001: .* does not have optimizer/exp_avg/layers.1.mlp.down_proj.weight"):
        sail_leg(recipe, plan, steps=1, after=kept)


def test_what_is_not_kept_is_known() -> None:
    compressed = {"comm": {"compression": "topk", "local_steps": 4}}
    assert forgotten(Plan()) == []
    assert [each.split()[0] for each in forgotten(Plan.model_validate(compressed))] == ["what", "what"]


def test_a_loss_scale_goes_on_counting() -> None:
    before, after = LossScale(start=8.0, grow_after=3), LossScale(start=8.0, grow_after=3)
    for norm in (1.0, math.inf, 1.0, 1.0):
        before.accepts(torch.tensor(norm))
    after.restore(before.state())
    assert (after.value, after.accepts(torch.tensor(1.0)), after.value) == (4.0, True, 8.0)


def test_states_that_only_change_their_blocks_keep_their_values() -> None:
    values = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    values[:, 253] = 9.0  # of the second cut, and of the first block of the uncut table
    book, cut = codebook(torch.device("cpu"), signed=True), BlockLayout(500, 250)
    parts = [quantised(part, book) for part in values.split(250, 1)]
    codes, kept = torch.cat([part[0] for part in parts], 1), torch.cat([part[1] for part in parts], 1)
    was = torch.cat([restored(*part, book) for part in parts], 1)
    scales = torch.empty(3, 2)
    BlockReshard(codes=codes, scales=scales, kept=kept, grid=cut, columns=range(500), signed=True).settle()
    assert (cut.name, cut.num_blocks, BlockLayout(500, 256).name, BlockLayout(500, 500).num_blocks) == ("@250", 2, "", 2)
    assert (restored(codes, scales, book) - was).abs().max() < 0.02 * was.abs().max()
    assert not torch.equal(bits(scales), bits(kept))
