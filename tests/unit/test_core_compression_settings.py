"""`plan.comm.compression` is a word or a mapping, and both mean the same where they say the same."""

from typing import Any

import pytest

from trimaran.core import KIND_FIELDS, Compression, Plan, UserError, compressed_bytes, dump_recipe, parse_recipe


def plan(compression: Any) -> Plan:
    return Plan.model_validate({"comm": {"compression": compression}})


@pytest.mark.parametrize("kind", KIND_FIELDS)
def test_a_word_and_a_mapping_of_defaults_are_the_same_plan(kind: str) -> None:
    assert plan(kind) == plan({"kind": kind}) == plan({"kind": kind} | KIND_FIELDS[kind])  # type: ignore[index]
    assert plan(kind).comm.compression == kind
    assert plan({"kind": kind}).model_dump(mode="json")["comm"]["compression"] == kind
    assert plan(kind).comm.compression_settings == Compression.model_validate({"kind": kind})


def test_settings_survive_json_yaml_and_set() -> None:
    given = {"kind": "topk", "ratio": 0.05, "layers": ["mlp", "head"]}
    wanted = plan(given)
    assert wanted != plan("topk")
    assert hash(wanted.comm) != hash(plan("topk").comm)
    assert Plan.model_validate_json(wanted.model_dump_json()) == wanted
    recipe = parse_recipe("", name="x", overrides=["plan.comm.compression={kind: topk, ratio: 0.05}"])
    assert recipe.plan != "auto"
    assert recipe.plan.comm.compression_settings.ratio == 0.05
    assert parse_recipe(dump_recipe(recipe), name="again").plan == recipe.plan
    assert parse_recipe("plan: {comm: {compression: 1bit}}", name="word").plan != "auto"


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("{kind: topk, rank: 4}", "R013", "topk has no rank; its fields are ratio, warmup_steps"),
        ("{kind: int8, ratio: 0.1, rank: 2}", "R013", "int8 has no ratio and no rank"),
        ("{kind: topk, ratio: 2}", "R013", "less than or equal to 1"),
        ("{kind: int8, blocks: 64}", "R011", "there is no field 'blocks'"),
        ("{ratio: 0.1}", "R013", "Field required"),
        ("topc", "R013", "'topk'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(text: str, code: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_recipe("", name="x", overrides=[f"plan.comm.compression={text}"])
    assert caught.value.code == code
    assert says in caught.value.what


def test_bytes_on_the_wire() -> None:
    """By hand, for a million values; int8 and 1bit have a scale of four bytes for each block of 256."""
    wanted = {"none": 4e6, "fp16": 2e6, "bf16": 2e6, "int8": 1e6 + 4e6 / 256, "1bit": 125_000 + 4e6 / 256, "topk": 8e4}
    assert {kind: compressed_bytes(kind, 1e6) for kind in wanted} == pytest.approx(wanted)  # type: ignore[arg-type]
    assert compressed_bytes("powersgd", 4096**2) == pytest.approx(2 * 4096 * 4 * 4)
    assert compressed_bytes(Compression(kind="topk", ratio=1.0), 10) == 40  # no more than uncompressed
