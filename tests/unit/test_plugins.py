"""Plug-ins are found without importing them; a bad one is named and left out, and nothing else."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.plugin_packages import make_distribution
from tests.runs import finished_run
from trimaran.app import main
from trimaran.core import (
    KINDS,
    UserError,
    find_plugin,
    installed_plugins,
    load_plugin,
    parse_recipe,
    plugin_names,
    plugin_records,
    used_plugins,
)
from trimaran.launch import TARGET_CLASSES, open_target
from trimaran.runs import SINKS, open_sinks

GOOD = """
class Rule:
    contract = 1
    def __call__(self, evidence):
        from trimaran.core import Finding
        yield Finding(code="GOOD-1", severity="note", verdict="seen")

class Raises(Rule):
    def __call__(self, evidence):
        raise RuntimeError("a rule that raises")

class Borrows(Rule):
    def __call__(self, evidence):
        from trimaran.core import Finding
        yield Finding(code="F001", severity="fault", verdict="not ours")

class Sink:
    contract = 1
    def open(self, run, options):
        raise RuntimeError("no such server")

class Old:
    contract = 0
    def open(self, run, options): ...

class Bare:
    contract = 1
"""
POINTS = {
    "trimaran.doctor_rules": {
        "good": "well_made:Rule",
        "raises": "well_made:Raises",
        "borrows": "well_made:Borrows",
        "broken": "ill_made:Rule",
    },
    "trimaran.sinks": {"server": "well_made:Sink", "old": "well_made:Old", "wandb": "well_made:Sink"},
    "trimaran.families": {"bare": "well_made:Bare", "missing": "well_made:Nothing"},
    "trimaran.objectives": {"Wrong Name": "well_made:Bare"},
    "somebody.else": {"good": "well_made:Rule"},
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    make_distribution(folder, "test-plugins", POINTS)
    (folder / "well_made.py").write_text(GOOD)
    (folder / "ill_made.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.syspath_prepend(folder)
    for name in ("well_made", "ill_made"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


def test_the_reserved_names_are_those_of_the_tables() -> None:
    assert KINDS["sink"].reserved == tuple(SINKS)
    assert KINDS["launch target"].reserved == tuple(TARGET_CLASSES)


def test_listing_imports_nothing(site: Path) -> None:
    assert plugin_names("doctor rule") == ("borrows", "broken", "good", "raises")
    assert plugin_names("sink") == ("old", "server")  # not one with the name of a built-in sink
    assert plugin_names("objective") == ()
    assert "well_made" not in sys.modules
    assert find_plugin("sink", "server").as_dict() == {
        "kind": "sink", "name": "server", "distribution": "test-plugins", "version": "1.0",
    }  # fmt: skip


def test_the_current_folder_is_not_a_place_of_installed_packages(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(site)
    assert plugin_names("sink") == ()


def test_the_command_names_each_bad_plugin_and_why(site: Path, capsys: Any) -> None:
    assert main(["plugins", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    problems = {each["name"]: each["error"]["what"] for each in found["plugins"] if each["error"]}
    loaded = {each["name"] for each in found["plugins"] if each["loaded"]}
    assert found["failed"] == len(problems)
    assert loaded >= {"good", "raises", "borrows", "server"}
    assert "ModuleNotFoundError: No module named 'a_package_that_nobody_has'" in problems["broken"]
    assert "was written for contract 0, and this release supports contract 1" in problems["old"]
    assert "there is a sink of this name in Trimaran itself" in problems["wandb"]
    assert "has no build(), which contract 1 asks for" in problems["bare"]
    assert "AttributeError" in problems["missing"]
    assert "lower-case letters" in problems["Wrong Name"]
    assert {each["error"]["code"] for each in found["plugins"] if each["error"]} == {"K076"}
    assert main(["plugins"]) == 2
    shown = capsys.readouterr()
    assert "left out" in shown.out
    assert "K076: the doctor rule 'broken' is left out" in shown.err


def test_without_plugins_the_command_says_so(capsys: Any) -> None:
    assert main(["plugins"]) == 0
    assert "No plug-ins are installed" in capsys.readouterr().out


def test_two_packages_with_one_name_are_both_left_out(site: Path) -> None:
    make_distribution(site, "another", {"trimaran.sinks": {"server": "well_made:Sink"}})
    sys.path.insert(0, str(site.parent / "nothing"))  # another path, so that folders are read again
    try:
        assert plugin_names("sink") == ("old",)
        with pytest.raises(UserError, match="several packages have one of this name: another, test-plugins"):
            load_plugin("sink", "server")
    finally:
        sys.path.pop(0)


def test_a_recipe_resolves_plugins_and_lists_them_when_it_cannot(site: Path) -> None:
    recipe = parse_recipe("model: {family: bare}\ntelemetry: {sinks: {server: {port: 1}}}", name="r")
    assert used_plugins(recipe) == [("network family", "bare"), ("sink", "server")]
    assert [each["version"] for each in plugin_records(recipe)] == ["1.0", "1.0"]
    with pytest.raises(UserError, match="use one of 'decoder', 'vlm', 'perception', 'hf', 'bare' or 'missing'"):
        parse_recipe("model: {family: bear}", name="r")
    with pytest.raises(UserError, match=r"no installed plug-in has this sink; installed are old, server"):
        parse_recipe("telemetry: {sinks: {sever: {}}}", name="r")
    with pytest.raises(UserError, match=r"this sink is built in, and has a field of its own: telemetry\.wandb"):
        parse_recipe("telemetry: {sinks: {wandb: {}}}", name="r")
    assert parse_recipe("model: {family: elsewhere}", name="r", any_plugin=True).model.family == "elsewhere"
    with pytest.raises(UserError, match="R013"):
        parse_recipe("model: {family: ../elsewhere.py}", name="r", any_plugin=True)


def test_a_recipe_of_a_run_is_read_where_its_plugins_are_not_installed(site: Path, tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    run.recipe.write_text(run.recipe.read_text().replace("family: decoder", "family: not-here"))
    assert run.read_recipe().model.family == "not-here"
    with pytest.raises(UserError, match="K075: there is no network family 'not-here' on this machine"):
        load_plugin("network family", "not-here")


def test_the_doctor_runs_good_rules_and_reports_bad_ones(site: Path, tmp_path: Path, capsys: Any) -> None:
    run = finished_run(tmp_path / "run")
    main(["doctor", str(run.path), "--json"])
    found = {each["code"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert found["GOOD-1"]["verdict"] == "seen"
    assert "a_package_that_nobody_has" in found["K076"]["verdict"]
    assert found["K076"]["culprit"] == "broken"
    assert all(each["verdict"] != "not ours" for each in found.values())


def test_a_sink_that_does_not_open_leaves_the_others(site: Path, tmp_path: Path, caplog: Any) -> None:
    run = finished_run(tmp_path / "run")
    telemetry = parse_recipe("telemetry: {ecs: true, sinks: {server: {}, old: {}}}", name="r").telemetry
    sinks = open_sinks(telemetry, run)
    assert [each.name for each in sinks] == ["ecs"]
    assert "cannot open sink server: RuntimeError: no such server" in caplog.text
    assert "cannot open sink old" in caplog.text
    for each in sinks:
        each.close()


def test_an_unknown_target_lists_plugins(site: Path) -> None:
    make_distribution(site, "targets", {"trimaran.launch_targets": {"cloud": "well_made:Bare"}})
    sys.path.insert(0, str(site.parent / "nothing"))
    try:
        with pytest.raises(UserError, match="name one of local, ssh, slurm, k8s, ray, sky, cloud"):
            open_target("clod")
        with pytest.raises(UserError, match="K076"):
            open_target("cloud")  # it has no methods
        assert installed_plugins("launch target")[0].distribution == "targets"
    finally:
        sys.path.pop(0)
