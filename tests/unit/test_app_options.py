"""Options of commands, and shell completion."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from tests.runs import new_run
from trimaran.app import (
    COMMANDS,
    build_app,
    complete_recipe,
    complete_run,
    complete_run_or_recipe,
    complete_setting,
    find_run,
)
from trimaran.core import UserError, parse_recipe


def test_every_completed_field_is_accepted_by_set() -> None:
    fields = [setting.removesuffix("=") for setting in complete_setting("")]
    assert len(fields) == len(set(fields)) > 40
    for field in fields:
        with pytest.raises(UserError) as caught:
            parse_recipe("", name="test", overrides=[f"{field}=2001-01-01"])
        assert caught.value.code in ("R012", "R013"), f"{field} is unknown, or takes a date"


def test_values_and_presets_complete_after_the_equals_sign() -> None:
    assert complete_setting("model.preset=tiny-") == ["model.preset=tiny-moe", "model.preset=tiny-tiled"]
    assert complete_setting("plan.precision=") == [f"plan.precision={each}" for each in ("fp32", "bf16", "fp16", "fp8")]
    assert complete_setting("train.lr=") == []
    for setting in complete_setting("plan.sharding="):
        assert parse_recipe("", name="test", overrides=[setting])


def test_recipes_complete_through_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "a.yaml").touch()
    (tmp_path / "recipes" / "notes.txt").touch()
    assert complete_recipe("rec") == ["recipes/"]
    assert complete_recipe("recipes/") == ["recipes/a.yaml"]
    assert complete_run("") == []
    (tmp_path / "runs" / "first").mkdir(parents=True)
    assert complete_run_or_recipe("r") == ["runs/first", "recipes/"]


def options(command: Any) -> Iterator[tuple[str, str | None]]:
    """Yield the name and the metavar of every option of a command and its subcommands."""
    yield from ((each.name, each.metavar) for each in command.params if each.param_type_name == "option")
    for each in getattr(command, "commands", {}).values():
        yield from options(each)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_placeholder_is_the_name_of_its_option(name: str) -> None:
    """Typer 0.27 takes such a placeholder for the option itself: `--GOAL`, and no `--goal`."""
    found = [*options(get_command(build_app(name)))]
    assert found
    assert not [option for option, metavar in found if metavar and metavar.lower() == option]


@pytest.mark.parametrize("name", ["stdlib-tin", "runs/stdlib-tin"])
def test_a_run_that_does_not_exist_suggests_one_of_a_near_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    run = new_run(Path("runs/stdlib-tiny"))
    (tmp_path / "runs" / "stdlib-ti").mkdir()  # no run
    with pytest.raises(UserError, match="D001") as caught:
        find_run(name)
    assert (caught.value.what.partition(" (")[2], caught.value.where) == (
        "did you mean 'stdlib-tiny'?)",
        f"runs/{Path(name).name}",
    )
    assert find_run("stdlib-tiny").path == run.path
