"""Lines of `predict`: which ones are accepted, which get an error, and that no line stops the rest."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimaran.core import UserError
from trimaran.planner import MAX_LINE_BYTES, answer_line, example_text, predict_line

MODEL = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256, "seq_len": 4096}
CLUSTER = {"gpu": "H100", "gpus": 16, "gpus_per_node": 8}
PLAN: dict[str, Any] = {"mesh": {"tp": 2}, "sharding": "parameters", "micro_batch": 1, "global_batch": 64}
CONTRACT = {
    "id", "fits", "peak_bytes", "reserved_bytes", "step_seconds", "tokens_per_second_per_gpu", "mfu", "memory", "time",
}  # fmt: skip


def line(*, model: Any = (), cluster: Any = (), plan: Any = (), **rest: Any) -> dict[str, Any]:
    """Return a valid line with changes to its sections."""
    return {
        "id": 7,
        "model": MODEL | dict(model),
        "cluster": CLUSTER | dict(cluster),
        "plan": PLAN | dict(plan),
        **rest,
    }


def answer_to(text: str | bytes, number: int = 1) -> dict[str, Any]:
    answer = answer_line(text.encode() if isinstance(text, str) else text, number)
    return json.loads(json.dumps(answer, allow_nan=False))


def error_of(asked: dict[str, Any]) -> dict[str, str]:
    answer = answer_to(json.dumps(asked))
    assert answer.keys() == {"id", "error"}
    assert answer["id"] == 7
    assert answer["error"].keys() == {"code", "what", "where", "fix"}
    return answer["error"]


def test_the_answer_has_the_fields_of_the_contract_and_its_terms_add_up() -> None:
    answer = answer_to(json.dumps(line()))
    assert answer.keys() >= CONTRACT
    assert answer["id"] == 7
    assert answer["fits"] is True
    assert sum(answer["memory"].values()) == pytest.approx(answer["peak_bytes"])
    assert sum(answer["time"].values()) == pytest.approx(answer["step_seconds"])
    tokens = 64 * 4096 / answer["step_seconds"] / 16
    assert answer["tokens_per_second_per_gpu"] == pytest.approx(tokens)


@pytest.mark.parametrize(
    "same",
    [
        line(plan={"mesh": {"tp": 2.0, "dp_shard": 8, "pp": None}, "micro_batch": 1.0, "recompute": None}),
        line(plan={"mesh": {"tp": 2, "dp": 8}}),
        line(plan={"mesh": {"tp": 2, "dp_replicate": 8}}),  # ZeRO shards over all data ranks, whatever their name
        line(plan={"mesh": {"tp": 2, "dp_shard": 8}, "sharding": None}),
        line(plan={"grad_accum": 8, "global_batch": None}),
        line(plan={"grad_accum": 8, "micro_batch": None}),
        line(plan={"precision": "bf16"}, model={"experts": 0, "top_k": 0, "head_dim": 128, "name": "llama"}),
        line(stack=None, measured={"anything": [1, 2]}),
    ],
)
def test_equivalent_lines_get_the_same_answer(same: dict[str, Any]) -> None:
    assert predict_line(same) == predict_line(line())


PRESET_LINE = {"id": 7, "model": "llama-3.1-8b", "cluster": "2x8xH100", "plan": PLAN}


def test_a_preset_and_a_cluster_may_be_named() -> None:
    """The preset has the shape of MODEL; without a length it is 4,096."""
    assert predict_line(PRESET_LINE) == predict_line(line())
    shaped = PRESET_LINE | {"model": {"preset": "llama-3.1-8b", "seq_len": 4096}, "cluster": CLUSTER}
    assert predict_line(shaped) == predict_line(line())
    assert predict_line(PRESET_LINE | {"model": "tinyllama-1.1b"})["time"]  # it has 2,048 positions


@pytest.mark.parametrize(
    ("changes", "where", "what"),
    [
        ({"model": "llama-3.1-8"}, "model", "did you mean 'llama-3.1-8b'?"),
        ({"model": {"preset": "llama-3.1-8b", "layers": 3}}, "model.layers", "no field 'layers'"),
        ({"model": {"preset": "llama-3.1-8b", "adapter": {"rnk": 3}}}, "model.adapter.rnk", "did you mean 'rank'?"),
        ({"model": {"preset": "llama-3.1-8b", "adapter": "lora"}}, "model.adapter", "Input should be an object"),
        ({"model": {"preset": "llama-3.1-8b", "adapter": {"towers": ["vision"]}}}, "model.adapter", "no towers"),
        ({"cluster": "8xH1000"}, "cluster", "did you mean 'H100'?"),
        ({"cluster": 8}, "cluster", "no object 'cluster'"),
    ],
)
def test_a_wrong_name_gets_an_error(changes: dict[str, Any], where: str, what: str) -> None:
    error = error_of(PRESET_LINE | changes)
    assert error["where"] == where
    assert what in error["what"]


def test_an_adapter_needs_the_bytes_of_frozen_weights_and_of_its_own_states() -> None:
    plan = {"micro_batch": 1, "global_batch": 1, "recompute": "full"}
    asked = {"model": {"preset": "llama-3.1-8b", "adapter": {"rank": 16}}, "cluster": "1xH100", "plan": plan}
    memory = predict_line(asked)["memory"]
    assert memory["weights"] + memory["masters"] == 2 * 8_030_261_248 + 4 * 41_943_040
    assert memory["optimizer"] == 8 * 41_943_040
    shape = {key: value for key, value in MODEL.items() if key != "seq_len"} | {
        "seq_len": 4096,
        "adapter": {"rank": 16},
    }
    assert predict_line(asked | {"model": shape})["memory"] == memory


def test_the_sample_that_ships_is_answered() -> None:
    answers = [answer_to(text, number) for number, text in enumerate(example_text().splitlines(), 1)]
    assert all("error" not in each for each in answers)
    assert [each["fits"] for each in answers] == [True, True, True, False, True, True]


def test_without_shards_the_data_ranks_are_replicas() -> None:
    plain = predict_line(line(plan={"sharding": "none", "mesh": {"tp": 2, "dp_shard": 8}}))
    assert plain == predict_line(line(plan={"sharding": "none", "mesh": {"tp": 2, "dp_replicate": 8}}))
    assert plain["peak_bytes"] > predict_line(line())["peak_bytes"]


def test_nodes_are_the_largest_that_the_gpus_fill() -> None:
    assert predict_line(line(cluster={"gpus": 12}, plan={"mesh": {"tp": 2}, "global_batch": 48}))["fits"]
    assert predict_line(line(cluster={"gpus": 4}))["step_seconds"] > 0


@pytest.mark.parametrize(
    ("asked", "where", "expected"),
    [
        (line(model={"heads": 33, "kv_heads": None}), "model.heads", "33 heads do not divide hidden 4096"),
        (line(model={"kv_heads": 5}), "model.kv_heads", "5 kv_heads do not divide 32 heads"),
        (line(model={"layers": -3}), "model.layers", "greater than or equal to 1"),
        (line(model={"layers": "32"}), "model.layers", "valid integer"),
        (line(model={"layers": True}), "model.layers", "valid integer"),
        (line(model={"hidden": 10**400}), "model.hidden", "less than or equal"),
        (line(model={"vocab": 3.5}), "model.vocab", "valid integer"),
        (line(model={"ffn": None}), "model.ffn", "ffn is missing"),
        (line(model={"hiden": 3}), "model.hiden", "did you mean 'hidden'?"),
        (line(model={"experts": 4, "top_k": 8}), "model.top_k", "8 of 4 experts"),
        (line(model={"top_k": 2}), "model.top_k", "the model has no experts"),
        (line(plan={"mesh": {"dp": 8, "dp_shard": 16}}), "plan.mesh.dp", "dp 8 counts all data ranks"),
        (line(plan={"mesh": {"dp": 16, "dp_replicate": 2, "dp_shard": 4}}), "plan.mesh.dp", "its parts are 2 x 4"),
        (line(plan={"recompte": "full"}), "plan.recompte", "did you mean 'recompute'?"),
        (line(plan={"recompute": "some"}), "plan.recompute", "'some'"),
        (line(plan={"mesh": {"dp_shards": 2}}), "plan.mesh.dp_shards", "did you mean 'dp_shard'?"),
        (line(plan={"mesh": {"tp": 0}}), "plan.mesh.tp", "greater than or equal to 1"),
        (line(plan={"mesh": [2]}), "plan.mesh", "object"),
        (line(plan={"mesh": {"tp": 3}}), "plan.mesh", "15 ranks, the cluster 16 GPUs"),
        (line(plan={"mesh": {"tp": 2, "dp": 16}}), "plan.mesh", "32 ranks, the cluster 16 GPUs"),
        (line(plan={"global_batch": "64"}), "plan.global_batch", "'64'"),
        (line(plan={"micro_batch": 10**30}), "plan.micro_batch", "not a number"),
        (line(plan={"prediction": {}}), "plan.prediction", "must not contain a prediction"),
        (line(cluster={"gpu": "H1000"}), "cluster", "there is no device 'H1000'"),
        (line(cluster={"gpus": 0}), "cluster.gpus", "greater than or equal to 1"),
        (line(stack="megatrom"), "stack", "did you mean 'megatron'?"),
        (line(stack=3), "stack", "a name"),
        ({"id": 7, "model": MODEL, "plan": PLAN}, "cluster", "no object 'cluster'"),
        ({"id": 7, "model": "llama", "cluster": CLUSTER, "plan": PLAN}, "model", "no preset 'llama'"),
    ],
)
def test_an_error_names_the_field(asked: dict[str, Any], where: str, expected: str) -> None:
    error = error_of(asked)
    assert error["where"] == where
    assert expected in error["what"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not JSON"),
        ("[1]", "not an object"),
        (" \n", "the line is blank"),
        ('{"id": NaN}', "NaN is not a JSON number"),
        ('{"id": ' + "1" * 5000 + "}", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"id": 1, "model": ' + '{"a":' * 5000 + "1" + "}" * 5001, "nested too deeply"),
        ('{"id": "' + "x" * MAX_LINE_BYTES + '"}', "longer than 1 MiB"),
    ],
)
def test_a_line_that_is_not_a_request_gets_an_error_object(text: str | bytes, expected: str) -> None:
    answer = answer_to(text, number=3)
    assert expected in answer["error"]["what"]
    assert answer["error"]["code"] == "P051"


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (line(model={"layers": 4}, plan={"mesh": {"pp": 8}}), "8 stages are more than 4 layers"),
        (line(plan={"mesh": {"pp": 2}, "pipeline": {"stages": [3, 4]}}), "2 listed stages do not split 32"),
        (
            line(model={"heads": 12, "head_dim": 128, "kv_heads": 4}, plan={"mesh": {"tp": 8}}),
            "tp 8 does not divide 12",
        ),
        (line(plan={"mesh": {"tp": 2, "ep": 4}}), "ep 4 does not divide 1"),
        (line(plan={"global_batch": 60}), "do not make a global batch of 60"),
        (line(plan={"global_batch": 64, "grad_accum": 3}), "do not make a global batch of 64"),
        (line(plan={"micro_batch": 64, "global_batch": 4096}), "GiB over"),
    ],
)
def test_a_plan_that_cannot_run_does_not_fit_and_says_why(asked: dict[str, Any], why: str) -> None:
    answer = answer_to(json.dumps(asked))
    assert answer["fits"] is False
    assert why in answer["why"]
    assert answer["peak_bytes"] > 0
    assert answer["step_seconds"] > 0


def test_equal_hashes_do_not_mix_up_two_lines() -> None:
    """True equals 1 and has the same hash, so a cache must not confuse the two."""
    good = line(model={"layers": 1})
    assert answer_to(json.dumps(good))["fits"]
    assert error_of(line(model={"layers": True}))["where"] == "model.layers"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
sizes = st.integers(-2, 70000) | st.sampled_from([1, 2, 4, 8, 16, 64, 128, 4096, 0.0, 8.0, 1e300, None, True, "8"])
meshes = st.dictionaries(st.sampled_from(["dp", "dp_replicate", "dp_shard", "tp", "pp", "cp", "ep"]), sizes, max_size=4)
plans = st.fixed_dictionaries(
    {},
    optional={
        "mesh": meshes | json_values,
        "sharding": st.sampled_from(["none", "optimizer", "gradients", "parameters", "most", 3]),
        "micro_batch": sizes,
        "grad_accum": sizes,
        "global_batch": sizes,
        "recompute": st.sampled_from(["none", "selective", "full", 2, 0, [], "x"]),
        "offload": st.sampled_from(["none", "optimizer", "parameters", "activations", "all"]),
        "precision": st.sampled_from(["fp32", "bf16", "fp16", "fp8", "int8"]),
        "pipeline": st.fixed_dictionaries(
            {},
            optional={
                "schedule": st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble", "z"]),
                "stages": st.lists(st.integers(-2, 40), max_size=8),
            },
        ),
        "compile": st.booleans(),
        "towers": json_values,
    },
)
models = st.fixed_dictionaries(
    dict.fromkeys(("layers", "hidden", "heads", "ffn", "vocab", "seq_len"), sizes),
    optional=dict.fromkeys(("kv_heads", "head_dim", "experts", "top_k", "expert_ffn", "shared_ffn", "gated"), sizes),
)
clusters = st.fixed_dictionaries(
    {
        "gpu": st.sampled_from(["H100", "A100-40GB", "v100", "MI300X", "cpu", "x"]),
        "gpus": st.integers(0, 70000) | sizes,
    },
    optional={"gpus_per_node": sizes},
)
stacks = st.sampled_from(["trimaran", "megatron", "nanotron", "torchtitan", "llm-foundry", "deepspeed", "hf", "x", 3])


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    st.fixed_dictionaries(
        {"model": models | st.just(MODEL), "cluster": clusters | st.just(CLUSTER), "plan": plans, "stack": stacks}
    )
)
def test_any_request_is_answered_or_refused(asked: dict[str, Any]) -> None:
    answer = answer_to(json.dumps({"id": 1} | asked))
    assert answer["id"] == 1
    assert answer.keys() >= CONTRACT or answer["error"].keys() == {"code", "what", "where", "fix"}


@settings(max_examples=80, deadline=None)
@given(json_values | st.fixed_dictionaries({"model": json_values, "cluster": json_values, "plan": json_values}))
def test_any_json_is_answered_or_refused(value: Any) -> None:
    assert "error" in answer_to(json.dumps(value))


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_are_refused(text: bytes) -> None:
    assert "error" in answer_to(text)


def test_predict_line_raises_what_a_caller_can_show() -> None:
    with pytest.raises(UserError, match="P051"):
        predict_line({})


@pytest.mark.parametrize(
    ("plan", "stack", "where"),
    [
        ({"sequence_parallel": "no"}, "megatron", "plan.sequence_parallel"),
        ({"gradient_dtype": "fp8"}, "megatron", "plan.gradient_dtype"),
        ({"sequence_parallel": False}, "trimaran", "plan.sequence_parallel"),
        ({"gradient_dtype": "bf16"}, None, "plan.gradient_dtype"),
        ({"recompute": "elementwise"}, "megatron", "plan.recompute"),
    ],
)
def test_an_option_that_a_stack_does_not_have_is_an_error(plan: dict[str, Any], stack: str | None, where: str) -> None:
    error = error_of(line(plan=plan, stack=stack))
    assert (error["code"], error["where"]) == ("P051", where)
    assert "sequence_parallel" in error_of(line(plan={"sequence_paralel": True}))["what"]


def test_the_defaults_of_an_option_may_be_spelled_out_for_every_stack() -> None:
    plain = answer_to(json.dumps(line()))
    assert answer_to(json.dumps(line(plan={"sequence_parallel": True, "gradient_dtype": "fp32"}))) == plain
