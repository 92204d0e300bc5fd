"""Recipes: defaults are valid, mistakes are clear errors, overrides reach every field."""

import json
import time
from contextlib import suppress

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from trimaran.core import Mesh, Plan, Recipe, UserError, all_fields, dump_recipe, parse_recipe


def test_an_empty_recipe_is_the_default_recipe() -> None:
    assert parse_recipe("", name="-") == Recipe()


def test_the_documented_default_recipe_parses_to_the_defaults() -> None:
    text = """
name: stdlib-tiny
model: {family: decoder, preset: tiny}
data: {source: python-stdlib, seq_len: 256}
train: {steps: 100, global_batch: 32, lr: 1.0e-3, seed: 0}
cluster: auto
plan: auto
"""
    recipe = parse_recipe(text, name="-")
    assert recipe.model_copy(update={"model": Recipe().model}) == Recipe()


@pytest.mark.parametrize(
    ("text", "code", "where", "says"),
    [
        ("train: {stepz: 3}", "R011", "train.stepz (r.yaml, line 1)", "did you mean 'steps'"),
        ("data:\n  sequence: 3", "R011", "line 2", "seq_len"),
        ("plan: {mesh: {dp: 2}}", "R011", "plan.mesh.dp", "dp_replicate, dp_shard"),
        ("train:\n  steps: many", "R012", "train.steps (r.yaml, line 2)", "integer"),
        ("train: 3", "R012", "train", "TrainSection"),
        ("data: {seq_len: 0}", "R013", "data.seq_len", "at least 2"),
        ("train: {lr: -1}", "R013", "train.lr", "more than 0"),
        ("train: {steps: 0}", "R013", "train.steps", "at least 1"),
        ("faults: {ranks: [2, 1]}", "R013", "faults.ranks", "the fewest ranks come first"),
        ("train: {lr: .nan}", "R013", "train.lr", "finite"),
        ("model: {family: gpt}", "R013", "model.family", "'decoder'"),
        ("plan: {precision: int3}", "R013", "plan.precision", "bf16"),
        ("plan: autopilot", "R013", "plan", "'auto'"),
        ("name: ../../etc", "R013", "name", "lower-case"),
        ("name: 'a;rm -rf'", "R013", "name", "lower-case"),
        ("a: [1", "R001", "line 1", "YAML"),
        ("- 1", "R001", "r.yaml", "mapping"),
        ("a: &x {b: 1}\nc: *x", "R003", "line", "alias"),
        ("train: {steps: 1}\ntrain: {steps: 2}", "R004", "line 2", "twice"),
        ("x: !!python/object/apply:os.system [ls]", "R001", "line 1", "YAML"),
    ],
)
def test_every_mistake_is_one_clear_error(text: str, code: str, where: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_recipe(text, name="r.yaml")
    error = caught.value
    assert error.code == code
    assert where in error.where
    assert says in f"{error.what} {error.fix}"
    assert error.fix


@pytest.mark.parametrize("pair", ["train.steps", "=3", "train..steps=3", "train.steps.deep=3", "name.x=1"])
def test_a_bad_override_is_an_error_that_names_set(pair: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_recipe("train: {steps: 5}", name="r.yaml", overrides=[pair])
    assert caught.value.code.startswith("R01")


def test_overrides_reach_any_field_and_the_last_one_wins() -> None:
    pairs = [
        "train.steps=7",
        "plan.mesh.dp_shard=2",
        "train.schedule.kind=wsd",
        "train.steps=8",
        "model.shape={layers: 2}",
    ]
    recipe = parse_recipe("", name="-", overrides=pairs)
    assert recipe.train.steps == 8
    assert isinstance(recipe.plan, Plan)
    assert recipe.plan.model_fields_set == {"mesh"}
    assert recipe.plan.mesh.model_fields_set == {"dp_shard"}
    assert recipe.train.schedule.kind == "wsd"
    assert recipe.model.shape == {"layers": 2}


@pytest.mark.parametrize("value", ["off", "'off'", "false", "no"])
def test_checkpoints_are_switched_off_by_a_word_that_is_a_boolean_in_yaml(value: str) -> None:
    recipe = parse_recipe(f"checkpoint: {{every: {value}}}", name="-")
    assert recipe.checkpoint.every == "off"
    assert recipe.checkpoint.is_off
    assert parse_recipe("", name="-", overrides=[f"checkpoint.every={value}"]) == recipe
    assert parse_recipe(dump_recipe(recipe), name="-") == recipe


def test_a_huge_recipe_and_an_alias_bomb_are_refused_at_once() -> None:
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9)
    )
    began = time.process_time()
    for text in (bomb, "x" * (2 << 20)):
        with pytest.raises(UserError):
            parse_recipe(text, name="-")
    assert time.process_time() - began < 1


def test_a_dumped_recipe_parses_to_itself() -> None:
    for pairs in ([], ["plan.mesh.dp_shard=2", "train.lr=0.01"], ["model.family=hf", "model.path=/x"]):
        recipe = parse_recipe("", name="-", overrides=pairs)
        assert parse_recipe(dump_recipe(recipe), name="-") == recipe


@settings(max_examples=30, deadline=None)
@given(st.recursive(st.none() | st.integers() | st.text("ab1:-#{[\n ", max_size=8), lambda deeper: st.dictionaries(
    st.sampled_from(["train", "data", "plan", "mesh", "steps", "x"]), deeper, max_size=3), max_leaves=8))  # fmt: skip
def test_any_yaml_gives_a_recipe_or_a_user_error(tree: object) -> None:
    with suppress(UserError):
        parse_recipe(yaml.safe_dump(tree), name="-")


def test_nulls_in_a_list_or_a_mapping_of_any_field_are_one_clear_error() -> None:
    wrong = {}
    for path in (*all_fields(), "train.optimizer.towers.vision", "plan.towers.vision"):
        for value in ("[null]", "[[null], {}]", "{a: null}", "[{a: [null]}]", "{a: {b: null}}"):
            try:
                parse_recipe("", name="test", overrides=[f"{path}={value}"])
            except UserError as error:
                wrong[path, value] = error.where
    assert wrong["plan.micro_batches", "[null]"] == "plan.micro_batches.0 (--set)"
    assert wrong["train.optimizer.towers", "{a: {b: null}}"] == "train.optimizer.towers.a.b (--set)"
    assert [path for (path, _), where in wrong.items() if path.partition(".")[0] not in where] == []


def test_the_schema_has_every_section_and_forbids_others() -> None:
    schema = Recipe.model_json_schema()
    assert set(schema["properties"]) == set(Recipe.model_fields)
    assert schema["additionalProperties"] is False
    json.dumps(schema)


def test_values_are_frozen() -> None:
    for noun, field in ((Recipe(), "name"), (Plan(), "micro_batch"), (Mesh(), "tp")):
        with pytest.raises(ValidationError):
            setattr(noun, field, 3)


def test_world_size_and_global_batch_of_a_plan() -> None:
    plan = Plan(mesh=Mesh(dp_replicate=2, dp_shard=4, tp=2, ep=4), micro_batch=3, grad_accum=5)
    assert plan.mesh.world_size == 16
    assert plan.global_batch == 8 * 3 * 5
    assert str(Plan().mesh) == "one device"
