"""`trimaran.plan`: plans a live nn.Module for any cluster."""

import pytest
import torch
from torch import nn

import trimaran
from trimaran.core import Mesh, Plan, UserError


def net() -> nn.Module:
    return nn.Sequential(nn.Embedding(100, 64), *[nn.Linear(64, 64) for _ in range(4)], nn.Linear(64, 100))


def test_a_module_is_planned_and_not_changed() -> None:
    module = net()
    before = {name: each.clone() for name, each in module.state_dict().items()}
    answer = trimaran.plan(module, torch.zeros(2, 16, dtype=torch.long), cluster="4xH100", global_batch=64)
    best = answer.ranked[0]
    assert best.mesh.world_size == 4
    assert best.global_batch == 64
    assert best.prediction is not None
    assert best.prediction.fits
    assert answer.question.recipe.data.seq_len == 16
    assert answer.question.outline is not None
    assert answer.question.outline.num_parameters == sum(each.numel() for each in module.parameters())
    assert all(torch.equal(each, before[name]) for name, each in module.state_dict().items())


def test_pins_are_kept_and_invalid_arguments_are_errors() -> None:
    tokens = torch.zeros(1, 16, dtype=torch.long)
    pinned = trimaran.plan(net(), tokens, cluster="4xH100", pins=Plan(mesh=Mesh(dp_shard=4), sharding="parameters"))
    assert pinned.ranked[0].sharding == "parameters"
    with pytest.raises(UserError, match="C001"):
        trimaran.plan(net(), tokens, cluster="4xH1000")
    with pytest.raises(UserError, match="R013"):
        trimaran.plan(net(), tokens, cluster="4xH100", global_batch=-1)


@pytest.mark.parametrize("batch", [0, -1])
def test_a_batch_of_zero_is_not_the_default_batch(batch: int) -> None:
    with pytest.raises(UserError, match="R013"):
        trimaran.plan(net(), torch.zeros(1, 16, dtype=torch.long), cluster="4xH100", global_batch=batch)


def test_an_argument_that_cannot_be_trained_is_an_error_that_names_the_call() -> None:
    for code, arguments in (
        ("M032", (nn.ReLU(), torch.zeros(1, 16))),
        ("M032", (nn.Embedding(8, 8), torch.zeros(1, 16, dtype=torch.long))),
        ("M033", ("llama-3-8b",)),
        ("M031", (net(),)),
    ):
        with pytest.raises(UserError, match=code) as caught:
            trimaran.plan(*arguments, cluster="4xH100")  # type: ignore[arg-type]
        assert "trimaran.plan(" in caught.value.fix
    with pytest.raises(UserError, match="M033") as caught:
        trimaran.plan("llama-3-8b", cluster="4xH100")  # type: ignore[arg-type]
    assert "`trimaran plan llama-3-8b`" in caught.value.fix
