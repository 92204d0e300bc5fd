"""The configurations in `ops/filebeat` and `ops/logstash` fit the lines that the ECS sink writes."""

import json
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.test_sinks import LIFE, documents, feed_sinks
from tests.runs import new_run

OPS = Path(__file__).parents[2] / "ops"
FIELD = re.compile(r"(?:\[[\w]+\])+")


def expanded(document: dict[str, Any]) -> dict[str, Any]:
    """Do what Filebeat's `expand_keys` does: names with dots become objects. Two names that conflict are an error."""
    tree: dict[str, Any] = {}
    for name, value in document.items():
        *outer, last = name.split(".")
        place = tree
        for each in outer:
            place = place.setdefault(each, {})
            assert isinstance(place, dict), f"{name} is inside another field's value"
        assert last not in place, name
        place[last] = value
    return tree


@pytest.fixture
def shipped(tmp_path: Path) -> list[dict[str, Any]]:
    run = new_run(tmp_path / "runs" / "toy")
    run.log(1).write_text("WARNING trimaran.train: step 3 was refused\n")
    feed_sinks(run, {"ecs": True}, LIFE)
    return [expanded(each) for each in documents(run)]


def test_filebeat_reads_the_file_that_a_run_writes(tmp_path: Path, shipped: list[dict[str, Any]]) -> None:
    tree = yaml.safe_load((OPS / "filebeat" / "filebeat.yml").read_text())
    (source,) = tree["filebeat.inputs"]
    assert fnmatch("/data/runs/toy/logs/ecs.jsonl", source["paths"][0])
    assert (tmp_path / "runs/toy/logs/ecs.jsonl").exists()
    (parser,) = source["parsers"]
    assert parser["ndjson"]["target"] == ""
    assert parser["ndjson"]["expand_keys"]
    for each in shipped:
        assert {"@timestamp", "message", "log", "event", "labels", "host", "service", "ecs"} <= each.keys()


def test_logstash_uses_fields_that_exist_with_values_that_it_can_convert(shipped: list[dict[str, Any]]) -> None:
    text = re.sub(r"^\s*#.*$", "", (OPS / "logstash" / "trimaran.conf").read_text(), flags=re.MULTILINE)
    assert text.count("{") == text.count("}")
    written = {"[trimaran][details]"}  # by the filter itself
    for field in set(FIELD.findall(text)) - written:
        found = [value for each in shipped if (value := _value(each, field)) is not None]
        assert found, f"no line has {field}"
        if field in ("[labels][rank]", "[labels][step]", "[labels][attempt]"):
            assert all(int(each) >= 0 for each in found)
    kinds = {each["event"]["dataset"] for each in shipped}
    assert kinds == {"trimaran.event", "trimaran.incident", "trimaran.log"}
    assert all(name in kinds for name in re.findall(r'== "(trimaran\.\w+)"', text))
    assert any(each["log"]["level"] == "error" for each in shipped if each["event"]["dataset"] == "trimaran.incident")
    for each in shipped:
        if each["event"]["dataset"] == "trimaran.event":
            assert isinstance(json.loads(each["trimaran"]["event"]), dict)


def _value(document: dict[str, Any], field: str) -> Any:
    value: Any = document
    for name in re.findall(r"\w+", field):
        value = value.get(name) if isinstance(value, dict) else None
    return value
