"""The tables of optional parts: who wants a feature, and that each can be imported."""

from importlib import import_module
from typing import Any

import pytest

from trimaran.core import Plan, Recipe
from trimaran.train import ENGINES, FEATURES, Feature, Trainer, UpdatePart, features_of

LOCAL = {"mesh": {"dp_replicate": 2}, "comm": {"local_steps": 4}}


def names(plan: dict[str, Any], **recipe: Any) -> list[str]:
    """Return the names of the features that a plan and a recipe ask for."""
    found = Plan.model_validate(plan), Recipe.model_validate(recipe)
    return [each.name for each in FEATURES if each.wants(*found)]


def test_a_plain_plan_has_no_features() -> None:
    assert features_of(Plan(), Recipe()) == ()
    assert names({"mesh": {"dp_replicate": 2, "dp_shard": 2}, "sharding": "parameters"}) == []


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (LOCAL, "local steps"),
        ({"mesh": {"dp_replicate": 2}, "comm": {"compression": "int8"}}, "compression"),
        ({"mesh": {"dp_replicate": 2}, "micro_batches": "measured"}, "measured rows"),
        ({"mesh": {"dp_replicate": 2}, "engine": "async"}, "asynchronous SGD"),
    ],
)
def test_a_plan_with_a_setting_has_its_feature(plan: dict[str, Any], name: str) -> None:
    assert names(plan) == [name]


def test_a_feature_that_another_replaces_is_left_out() -> None:
    plan = Plan.model_validate(LOCAL)
    assert len(features_of(plan, Recipe())) == 1
    assert features_of(plan, Recipe(), without=["local steps"]) == ()


def test_each_row_of_the_tables_can_be_imported() -> None:
    for each in FEATURES:
        assert isinstance(import_module(f"trimaran.train.features.{each.module}").FEATURE, Feature)
    for module in ENGINES.values():
        assert callable(import_module(module).build_stepper)


def test_a_feature_changes_nothing_where_it_does_not_plug_in() -> None:
    feature, part = Feature(), UpdatePart()
    load: Any = object()
    place: Any = object()
    assert feature.wrap_load(load, place) is load
    assert feature.wrap_trainer(Trainer) is Trainer
    assert feature.update_parts(place) == ()
    assert part.wrap_totals(load) is load
    assert (part.keys, tuple(part.state), dict(part.counters)) == (None, (), {})
