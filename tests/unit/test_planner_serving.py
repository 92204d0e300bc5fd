"""`trimaran plan --serve`: the layout that is chosen, why, what is refused, and what is printed."""

import json
from typing import Any

import pytest

from trimaran.app import main
from trimaran.core import UserError
from trimaran.machine import parse_cluster
from trimaran.models import PRESETS, outline_of
from trimaran.serve import ServingQuestion, Traffic, plan_serving, tensor_degrees


def question(name: str, cluster: str, **fields: Any) -> ServingQuestion:
    fields.setdefault("traffic", Traffic())
    return ServingQuestion(outline=outline_of(PRESETS[name]), cluster=parse_cluster(cluster), **fields)


def test_tensor_degrees_divide_the_heads() -> None:
    assert tensor_degrees(outline_of(PRESETS["llama-3-8b"]), 16) == (1, 2, 4, 8)  # 8 KV heads
    assert tensor_degrees(outline_of(PRESETS["tiny"]), 8) == (1, 2)


def test_a_model_that_fits_on_one_device_is_served_by_replicas() -> None:
    answer = plan_serving(question("llama-3-8b", "8xH100"))
    best = answer.best
    assert (best.layout.tp, best.layout.pp, best.layout.weights, best.replicas) == (1, 1, "bf16", 8)
    assert best.tokens_per_second == 8 * best.most.tokens_per_second
    assert any("nothing is quantised" in each for each in answer.reasons)
    assert {each.weights for each, _ in answer.lost} == {"bf16"}
    assert any(each.startswith("--weights fp8") for each in answer.hints)


def test_the_least_latency_takes_more_devices_for_each_engine() -> None:
    fast = plan_serving(question("llama-3-8b", "8xL4", goal="latency")).best
    many = plan_serving(question("llama-3-8b", "8xL4")).best
    assert fast.layout.tp > many.layout.tp
    assert fast.loads[0].between_tokens < many.loads[0].between_tokens


def test_a_model_that_fits_on_no_device_is_split() -> None:
    answer = plan_serving(question("llama-3-70b", "8xH100"))
    assert answer.best.layout.devices > 1
    assert answer.best.layout.weights == "bf16"
    assert any("does not fit" in why for _, why in answer.lost)
    fewest = plan_serving(question("llama-3-70b", "8xH100", goal="fewest-gpus")).best
    assert fewest.layout.devices == min(each.layout.devices for each in answer.ranked)


def test_weights_are_quantised_only_if_nothing_else_fits() -> None:
    answer = plan_serving(question("llama-3-70b", "1xH100"))
    assert answer.best.layout.weights == "fp8"
    assert any("bf16 fit nowhere" in each for each in answer.reasons)
    assert plan_serving(question("llama-3-70b", "1xA100-80GB")).best.layout.weights == "int8"  # it has no fp8


def test_pins_stay() -> None:
    best = plan_serving(question("llama-3-8b", "8xH100", tp=2, pp=2, weights="int8")).best
    assert (best.layout.tp, best.layout.pp, best.layout.weights, best.replicas) == (2, 2, "int8", 2)


def test_what_fits_nowhere_is_refused_with_the_cluster_that_is_enough() -> None:
    with pytest.raises(UserError) as error:
        plan_serving(question("llama-3.1-405b", "1xH100"))
    assert error.value.code == "P097"
    assert "4xH100" in error.value.fix
    assert plan_serving(question("llama-3.1-405b", "4xH100")).best.layout.devices == 4


def test_one_sequence_must_fit_into_the_cache() -> None:
    traffic = Traffic(prompt_tokens=120_000, output_tokens=1000)
    with pytest.raises(UserError) as error:
        plan_serving(question("llama-3.1-8b", "1xL4", traffic=traffic, weights="bf16"))
    assert error.value.code == "P097"
    assert "one sequence has 121,000" in error.value.what


@pytest.mark.parametrize(
    ("fields", "where"),
    [({"tp": 3}, "--tp"), ({"tp": 16}, "--tp"), ({"pp": 9}, "--pp"), ({"traffic": Traffic(prompt_tokens=9000)}, "--p")],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(UserError) as error:
        plan_serving(question("llama-3-8b", "8xH100", **fields))
    assert error.value.code == "P096"
    assert error.value.where.startswith(where)


def test_a_device_without_fp8_is_not_asked_for_it() -> None:
    with pytest.raises(UserError, match="no fp8"):
        plan_serving(question("llama-3-8b", "1xA100-80GB", weights="fp8"))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan", "--serve", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_answers_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("llama-3-8b", "--cluster", "8xH100", "--prompt-tokens", "1024", "--output-tokens", "128", "--price", "2")
    code, out, _ = run(capsys, *words, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["traffic"]["prompt_tokens"] == 1024
    assert found["best"]["cache_bytes_per_token"] == 131_072
    assert found["best"]["memory"]["weights"] == 2 * found["model"]["parameters"]
    dollars_per_second = 8 * 2 / 3600
    assert found["price_per_million_tokens"] == pytest.approx(
        dollars_per_second / found["best"]["tokens_per_second"] * 1e6
    )
    assert len(found["best"]["loads"]) > 4


def test_the_command_prints_the_plan_and_a_table_by_load(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "llama-3-70b", "--cluster", "8xH100", "--tp", "8")
    assert code == 0
    assert "tp 8 x pp 1, bf16 weights" in out
    assert "first token" in out
    assert "trimaran serve RUN_OR_FOLDER --tp 8" in out


def test_a_recipe_with_an_adapter_is_served_merged(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "adapter.yaml"
    recipe.write_text("model: {preset: llama-3-8b, adapter: {kind: lora, rank: 8}}\ncluster: 1xH100\n")
    _, out, _ = run(capsys, str(recipe), "--json")
    assert json.loads(out)["model"]["parameters"] == 8_030_261_248


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("llama-3-8b", "--emit", "megatron"), "A013"),
        (("llama-3-8b", "--goal", "goodput"), "A013"),
        (("llama-3-8b", "--weights", "int3"), "A013"),
        (("llama-3-8b", "--prompt-tokens", "0"), "A013"),
        (("--set", "model={family: perception, preset: tiny}", "--set", "cluster=1xH100"), "P096"),
        (("llama-3-8b", "--cluster", "4xA100-80GB+4xL40S"), "C012"),
    ],
)
def test_a_mistake_is_answered_with_its_code(
    words: tuple[str, ...], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, *words)
    assert status == 2
    assert err.startswith(f"{code}: ")


def test_an_option_of_serving_needs_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3-8b", "--cluster", "8xH100", "--prompt-tokens", "12"]) == 2
    assert "add --serve" in capsys.readouterr().err
