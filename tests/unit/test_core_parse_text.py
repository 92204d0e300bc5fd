"""YAML and JSON that people write: whatever is wrong with it is one TextError with its line."""

import pytest

from trimaran.core import TextError, UserError, load_json, load_yaml, parse_recipe
from trimaran.machine import openmp_threads

BAD_YAML = [
    ("a: 1\nb: 2001-13-45", 2, "'2001-13-45' is not a valid date"),
    ("a: " + "9" * 5000, 1, "(5,000 characters)' is not a valid integer"),
    ("a: 0x" + "f" * 5000, 1, "is an integer of more than 64 bits"),
    ("a: 9223372036854775808", 1, "is an integer of more than 64 bits"),
    ("a: !!int abc", 1, "'abc' is not a valid integer"),
    ("a: !!int ''", 1, "'' is not a valid integer"),
    ("a: !!bool abc", 1, "'abc' is not a valid true or false"),
    ("a: !!float x", 1, "'x' is not a valid number"),
    ("a: !!timestamp abc", 1, "'abc' is not a valid date"),
    ("a: !!binary é", 1, "base64"),
    ("a:\n- " + "[" * 30, 2, "the nesting is too deep"),
    ("- " * 5000, 1, "the nesting is too deep"),
    ("[" * 100_000, 1, "the nesting is too deep"),
    ("a: &x 1\nb: *x", 2, "alias"),
    ('a: "\\0"', 1, "U+0000"),
    ('a: "\\ud800"', 1, "U+D800"),
    ("a: \x1b[2J", 1, "special characters are not allowed"),
    ("a: !!python/object/apply:os.system [ls]", 1, "could not determine a constructor"),
]


@pytest.mark.parametrize(("text", "line", "says"), BAD_YAML, ids=range(len(BAD_YAML)))
def test_every_mistake_in_yaml_has_its_line(text: str, line: int, says: str) -> None:
    with pytest.raises(TextError) as caught:
        load_yaml(text)
    assert says in caught.value.what
    assert caught.value.line == line
    with pytest.raises(UserError) as shown:
        parse_recipe(text, name="r.yaml")
    assert shown.value.code in ("R001", "R003")
    assert f"r.yaml, line {line}" in shown.value.where
    with pytest.raises(UserError, match="R010"):
        parse_recipe("", name="r.yaml", overrides=[f"train={text}"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "'c' is set twice"),
        ('{"a": ' + "9" * 5000 + "}", "more than 64 bits"),
        ('{"a": 18446744073709551616}', "more than 64 bits"),
        ('{"a": NaN}', "NaN is not a finite number"),
        ('{"a": 1e999}', "1e999 is not a finite number"),
        ("[" * 100_000, "the nesting is too deep"),
        (b"\xff\xfe", "not UTF-8"),
        ("", "Expecting value"),
    ],
)
def test_every_mistake_in_json_is_one_error(text: str | bytes, says: str) -> None:
    with pytest.raises(TextError, match=says):
        load_json(text)


def test_numbers_that_every_reader_has_are_accepted() -> None:
    assert load_json("[18446744073709551615, -9223372036854775807, 0, 1.5]") == [2**64 - 1, 1 - 2**63, 0, 1.5]
    assert load_yaml("[9223372036854775807, 0x1f, 10:13, 1_000, 2001-12-14]")[:4] == [2**63 - 1, 31, "10:13", 1000]


@pytest.mark.parametrize(
    "setting",
    ["train.steps=1000000000001", "train.global_batch=16777217", "data.timeout_seconds=1000001", "data.epochs=1e+7",
     "plan.micro_batch=16777217", "train.clip_norm=1.0e+31", "faults.hang_seconds=1.0e+10"],
)  # fmt: skip
def test_a_number_above_its_limit_is_refused(setting: str) -> None:
    with pytest.raises(UserError, match=r"R013.*(less than|at most)"):
        parse_recipe("", name="r.yaml", overrides=[setting])


@pytest.mark.parametrize(
    ("value", "threads"),
    [("4", 4), ("2,1", 2), (" 3 , 2,1", 3), (None, None), ("", None), ("0", None), ("-1", None), ("abc", None),
     ("2,", None), ("2,x", None), ("9" * 400, None), ("٣", None)],
)  # fmt: skip
def test_the_number_of_threads_is_read_as_openmp_does(value: str | None, threads: int | None) -> None:
    assert openmp_threads(value) == threads
