"""Local steps in a recipe, the steps at which fragments are synchronised, and the bytes of an exchange."""

import math

import pytest

from trimaran.core import (
    LocalSteps,
    Plan,
    Recipe,
    dump_recipe,
    exposed_outer_seconds,
    parse_recipe,
    synchronisation_bytes,
)


def test_a_number_and_a_mapping_survive_files_settings_and_json() -> None:
    number = parse_recipe("plan: {comm: {local_steps: 8}}", name="r.yaml")
    assert number.plan != "auto"
    assert (number.plan.comm.local_steps, number.plan.comm.local, number.plan.comm.sync_every) == (
        8,
        LocalSteps(steps=8),
        8,
    )
    setting = "plan.comm.local_steps={steps: 50, outer: {optimizer: nesterov}, fragments: 4}"
    mapped = parse_recipe("", name="r.yaml", overrides=[setting, "plan.comm.local_steps.overlap_steps=2"])
    wanted = LocalSteps(steps=50, outer={"optimizer": "nesterov"}, fragments=4, overlap_steps=2)
    for recipe in (mapped, parse_recipe(dump_recipe(mapped), name="again")):
        assert recipe.plan != "auto"
        assert recipe.plan.comm.local == wanted
        assert Plan.model_validate_json(recipe.plan.model_dump_json()).comm == recipe.plan.comm
    assert wanted.outer.resolved_lr == 0.7
    assert wanted.outer.resolved_momentum == 0.9
    forms = Recipe.model_json_schema()["$defs"]["Comm"]["properties"]["local_steps"]
    assert {"integer", None} == {each.get("type") for each in forms.get("oneOf", forms.get("anyOf", []))}


def test_only_a_plain_average_after_every_step_is_off() -> None:
    assert not LocalSteps().is_on
    assert LocalSteps(steps=2).is_on
    assert LocalSteps(outer={"optimizer": "nesterov"}).is_on
    assert LocalSteps(compression="int8").is_on


@pytest.mark.parametrize(("steps", "fragments"), [(1, 1), (6, 1), (6, 3), (7, 3), (10, 4), (5, 5)])
def test_every_fragment_is_due_once_in_a_round_and_the_last_at_its_end(steps: int, fragments: int) -> None:
    local = LocalSteps(steps=steps, fragments=fragments)
    assert local.fragments_due(0) == []
    for start in (0, 3 * steps):
        due = [number for step in range(start + 1, start + steps + 1) for number in local.fragments_due(step)]
        assert due == list(range(fragments))
        assert fragments - 1 in local.fragments_due(start + steps)


def test_bytes_of_an_exchange() -> None:
    values = 1 << 24
    sent = {each: synchronisation_bytes(LocalSteps(compression=each), values, 2) for each in ("none", "bf16", "int8")}
    assert sent["none"] == 4 * values
    assert (sent["none"] / sent["bf16"], sent["none"] / sent["int8"]) == (2, pytest.approx(4, rel=0.02))
    sparse = synchronisation_bytes(LocalSteps(compression="sparse"), values, 2)
    assert 97 < sent["none"] / sparse < 140, "a dense exchange has 97 times more bytes, as the paper has it, or more"
    assert synchronisation_bytes(LocalSteps(compression="sparse"), values, 8) == 7 * sparse
    assert synchronisation_bytes(LocalSteps(steps=50), values, 4) == pytest.approx(1.5 * 4 * values)
    assert synchronisation_bytes(LocalSteps(), values, 1) == 0


def test_an_exchange_hides_behind_steps() -> None:
    local = LocalSteps(steps=50, fragments=5, overlap_steps=4)
    assert exposed_outer_seconds(local, 10.0, 0.5) == 0
    assert exposed_outer_seconds(local, 20.0, 0.5) == pytest.approx(5 * 2.0 / 50)
    assert math.isclose(exposed_outer_seconds(LocalSteps(steps=50), 10.0, 0.5), 0.2)
