"""Properties of a plan."""

from typing import Any, get_args

import pytest

from trimaran.core import Plan
from trimaran.core.traits import ENGINE_TRAITS
from trimaran.train import ENGINES


def test_every_engine_has_traits_and_a_module_that_runs_it() -> None:
    engines = get_args(Plan.model_fields["engine"].annotation)
    assert {*engines} == ENGINE_TRAITS.keys() == ENGINES.keys()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"precision": "bf16", "compile": True},
        {"recompute": "full", "compile": True},
        {"grad_accum": 8},
        {"mesh": {"dp_replicate": 2}, "comm": {"overlap": False}},
    ],
    ids=str,
)
def test_steps_without_communication_may_be_captured(fields: dict[str, Any]) -> None:
    assert Plan(**fields).captures_steps


@pytest.mark.parametrize(
    "fields",
    [
        {"cuda_graphs": False},
        {"mesh": {"dp_replicate": 2}},
        {"mesh": {"dp_shard": 2}, "comm": {"overlap": False}},
        {"sharding": "parameters"},
        {"precision": "fp16"},
        {"offload": "activations"},
        {"recompute": "selective"},
        {"engine": "deepspeed"},
    ],
    ids=str,
)
def test_steps_that_wait_for_the_host_or_other_ranks_are_not_captured(fields: dict[str, Any]) -> None:
    assert not Plan(**fields).captures_steps
