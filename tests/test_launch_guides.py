"""The guides about launching: each command is tried, and the fields of each target are in the table of its guide."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import PydanticUndefined

from tests.guide_commands import FOLDER, GUIDES, HERE, REAL, UNTRIED, guide_commands
from trimaran.app import main
from trimaran.launch import TARGET_CLASSES, open_target

ROOT = FOLDER.parents[1]
GUIDE_OF_TARGET = {"local": "several-machines", "ssh": "several-machines", "k8s": "kubernetes", "sky": "skypilot"}
ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \|(?: `(.*?)` \|)? (.*) \|$", re.MULTILINE)


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the recipe, of a user without a site file and without jobs."""
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("recipes/stdlib-tiny.yaml", "my.yaml"):
        Path(name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "recipes" / "stdlib-tiny.yaml", name)
    return tmp_path


def run(command: str, *more: str) -> None:
    words = [word for word in shlex.split(command) if word != "--wait"]
    assert words[0] == "trimaran"
    assert main([*words[1:], *more]) == 0, command


def test_every_command_of_the_guides_is_tried_somewhere_or_says_why_not() -> None:
    shown = {command for guide in GUIDES for command in guide_commands(guide)}
    assert shown == {*HERE, *UNTRIED, *(command for commands in REAL.values() for command in commands)}


def test_commands_that_need_no_cluster_run_here(bare_machine: Path, capsys: Any) -> None:
    printed = {}
    for command in HERE:
        run(command)
        printed[command] = capsys.readouterr().out
    assert {each.name for each in (bare_machine / "job").iterdir()} == {
        "job.yaml",
        "node.sh",
        "plan.json",
        "recipe.yaml",
    }
    (plan,) = [each for each in HERE if each.startswith("trimaran plan")]
    guide = (FOLDER / "several-machines.md").read_text()
    (answer,) = re.findall(rf"^\$ {re.escape(plan)}\n\.\.\.\n(.*)$", guide, re.MULTILINE)
    assert printed[plan].splitlines()[-1] == answer


def test_every_launch_of_the_guides_can_be_rendered(bare_machine: Path, capsys: Any) -> None:
    """What they start is proved on the real thing, see `tests/e2e/test_guides.py`."""
    launches = [each for commands in REAL.values() for each in commands if each.startswith("trimaran launch ")]
    for command in launches:
        if "--check" not in command:
            run(command, "--dry-run", "--json")
            answer = json.loads(capsys.readouterr().out)
            assert answer["main"] in answer["files"]
            assert answer["submit"]
    assert not (bare_machine / "runs").exists()


@pytest.mark.parametrize("name", TARGET_CLASSES)
def test_the_guide_of_a_target_lists_its_fields_with_their_defaults(name: str) -> None:
    model = open_target(name).site_model
    text = (FOLDER / f"{GUIDE_OF_TARGET.get(name, name)}.md").read_text()
    table = text.partition(f"section `{name}`")[2].partition("| field |")[2].partition("\n\n")[0]
    rows = {field: default for names, default, _ in ROW.findall(table) for field in re.findall(r"\w+", names)}
    assert rows.keys() == model.model_fields.keys()
    for field, default in rows.items():
        known = model.model_fields[field].get_default(call_default_factory=True)
        assert known is not PydanticUndefined
        shown = ("", str(known), repr(known), json.dumps(known, default=list))  # "": the table has no such column
        assert default in shown, (field, default, known)
