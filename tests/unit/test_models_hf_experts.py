"""Unknown names of the fields of experts never block training: the prediction guesses, and a warning says so."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from trimaran.core import ModelSection, UserError
from trimaran.models import ExpertSpec, OutlineLayer, outline_from_hf, outline_if_known, spec_of

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 96}
QWEN = SIZES | {"model_type": "qwen3_moe", "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
                "max_position_embeddings": 64, "head_dim": 8}  # fmt: skip


def experts_in(where: str, **fields: Any) -> ExpertSpec | None:
    layer = outline_from_hf(SIZES | {"model_type": "unheard"} | fields, where=where, name="x").main.runs[0][0]
    assert isinstance(layer, OutlineLayer)
    return layer.experts


@pytest.mark.parametrize(
    ("fields", "count", "top_k", "warning"),
    [
        ({"num_experts": 8, "num_experts_per_token": 3}, 8, 3, ""),
        ({"num_experts": 8, "moe_topk": 3}, 8, 3, ""),
        ({"num_experts": [8, 8], "moe_topk": [3, 3]}, 8, 3, ""),
        ({"num_experts": 8, "moe_topk": [1, 3]}, 8, 3, "moe_topk differs between layers"),
        ({"num_experts": 8, "router_topk": 3}, 8, 3, "router_topk is read as the experts of a token"),
        ({"num_experts": 8, "active_experts": 3}, 8, 3, "active_experts is read as the experts of a token"),
        ({"num_experts": 8}, 8, 2, "the time is predicted for 2 of 8"),
        ({"n_experts": 8, "experts_per_tok": 3}, 8, 3, "n_experts is read as the number of experts"),
    ],
)
def test_experts_are_read_under_unknown_names(
    fields: dict[str, Any], count: int, top_k: int, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="trimaran"):
        experts = experts_in(f"config of {fields}", **fields)
        again = experts_in(f"config of {fields}", **fields)
    assert experts is not None
    assert experts == again
    assert (experts.num_experts, experts.top_k) == (count, top_k)
    assert sum(warning in each for each in caplog.messages) == 1 if warning else not caplog.messages


@pytest.mark.parametrize(
    ("fields", "warns"),
    [
        ({}, False),
        ({"n_routed_experts": None, "experts_per_tok": 2}, False),  # a known name that is null: a dense model
        ({"num_experts": 0, "n_experts": 8}, False),
        ({"expert_layer_period": 2, "expert_hidden_dim": 64}, False),
        ({"n_experts": 8, "expert_count": 4}, True),
    ],
)
def test_what_may_not_be_experts_is_predicted_as_dense(
    fields: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="trimaran"):
        assert experts_in(f"dense config of {fields}", **fields) is None
    assert len(caplog.messages) == warns


def test_an_impossible_number_is_still_refused() -> None:
    with pytest.raises(UserError, match="M007"):
        experts_in("config", num_experts=8, num_experts_per_tok=9)
    with pytest.raises(UserError, match="M007"):  # transformers would fail in the first step
        experts_in("config", model_type="deepseek_v2", n_routed_experts=8, moe_routed_topk=2)


def test_defaults_of_transformers_do_not_block_the_family_hf(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"num_experts": 4, "moe_topk": 2}))
    section = ModelSection(family="hf", path=str(tmp_path))
    assert spec_of(section) is None
    outline = outline_if_known(section)
    assert outline is not None
    layer = outline.main.runs[0][0]
    assert isinstance(layer, OutlineLayer)
    assert layer.experts is not None
    assert (layer.experts.num_experts, layer.experts.ffn) == (4, 768)
    with pytest.raises(UserError, match="M007"):
        spec_of(ModelSection(family="decoder", path=str(tmp_path)))
