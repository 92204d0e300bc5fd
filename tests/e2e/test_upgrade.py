"""What 0.1 wrote and what people typed for it: names still work or say what replaces them, and its runs are read.

`tests/v0_1` has the names of commit 7f2eb4ef, the last one before the first renames, a run directory that it wrote and
stopped at step 16, and the losses that it computed itself without the stop.
"""

import inspect
import json
import os
import shutil
import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import trimaran
import trimaran.runs
from tests import forked
from tests.sources import SRC
from trimaran.app import build_app, main
from trimaran.core import GONE_IN, RENAMED, all_fields, parse_recipe
from trimaran.runs import RunDirectory

FOLDER = Path(__file__).parents[1] / "v0_1"
NAMES = json.loads((FOLDER / "names.json").read_text())
ROOT = SRC.parents[1]
DATA = Path("/tmp/trimaran-of-0.1/text.txt")  # a path is part of what a checkpoint was trained on (K041)


def words(section: str) -> list[str]:
    return " ".join(NAMES[section].values()).split()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run directory of 0.1, with its data where its checkpoint says that they are."""
    with tarfile.open(FOLDER / "run.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    DATA.parent.mkdir(exist_ok=True)
    shutil.copy(tmp_path / "text.txt", draft := DATA.with_suffix(f".{os.getpid()}"))
    draft.rename(DATA)
    (tmp_path / "run" / "lease").chmod(0o700)  # as 0.1 made it; tarfile takes the modes of folders from the umask
    return tmp_path / "run"


def options_of(name: str) -> set[str]:
    command: Any = get_command(build_app(name.split()[0]))
    for word in name.split():
        command = command.commands[word]
    return {option for each in command.params for option in (*each.opts, *each.secondary_opts)}


def test_every_command_and_option_of_0_1_is_still_there() -> None:
    gone = {name: set(options.split()) - options_of(name) for name, options in NAMES["commands"].items()}
    assert {name: options for name, options in gone.items() if options} == {}


def test_every_field_and_value_of_a_recipe_of_0_1_is_still_there() -> None:
    assert set(words("recipe_fields")) - set(all_fields()) - prediction_fields() == set()
    schema = json.loads((ROOT / "recipes" / "recipe.schema.json").read_text())
    pairs = [each.split("=") for each in words("recipe_values")]
    assert [(field, value) for field, value in pairs if value not in allowed(schema, field)] == []


def prediction_fields() -> set[str]:
    """Return the fields that a plan in a file has beside those that a person writes."""
    return {each for each in words("recipe_fields") if each.startswith("plan.prediction")}


def allowed(schema: dict[str, Any], field: str) -> set[str]:
    """Return every constant that `schema` names for a dotted field, as text."""
    parts: list[dict[str, Any]] = [schema]
    for name in field.split("."):
        parts = [form["properties"][name] for part in parts for form in forms(schema, part)
                 if name in form.get("properties", {})]  # fmt: skip
    found = [form for part in parts for form in forms(schema, part)]
    return {str(value) for form in found for value in (*form.get("enum", ()), form.get("const"))}


def forms(schema: dict[str, Any], part: dict[str, Any]) -> list[dict[str, Any]]:
    """Return `part` and everything that it may be instead, with references followed."""
    if "$ref" in part:
        return forms(schema, schema["$defs"][part["$ref"].rpartition("/")[2]])
    options = [*part.get("anyOf", ()), *part.get("oneOf", ()), *part.get("allOf", ())]
    return [part, *(form for each in options for form in forms(schema, each))]


def test_every_name_of_the_api_of_0_1_works_or_has_a_new_one() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FutureWarning)
        found = {name: getattr(trimaran, name) for name in NAMES["api"]["trimaran"].split()}
    assert found["Boat"] is trimaran.Loop
    (warning,) = caught
    assert str(warning.message) == "trimaran.Boat is now trimaran.Loop; the old name goes away in Trimaran 0.3"
    assert warning.filename == __file__
    assert [name for name in NAMES["api"]["Loop"].split() if not hasattr(trimaran.Loop, name)] == []
    assert set(NAMES["api"]["prepare"].split()) <= set(inspect.signature(trimaran.prepare).parameters)
    with pytest.raises(AttributeError, match="has no attribute 'Ship'"):
        getattr(trimaran, "Ship")  # noqa: B009


def test_the_former_name_of_the_package_of_runs_works_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="trimaran.run is now trimaran.runs"):
        from trimaran.run import open_run  # noqa: PLC0415
    assert open_run is trimaran.runs.open_run


def test_every_code_of_0_1_still_has_a_page() -> None:
    pages = {path.stem for path in (ROOT / "docs" / "codes").glob("*.md")}
    assert [code for code in words("codes") if code not in pages] == []


def test_old_names_go_away_when_their_message_says_so() -> None:
    version = tuple(int(part) for part in trimaran.__version__.split(".")[:2])
    assert version < tuple(int(part) for part in GONE_IN.split(".")), f"delete the names of {GONE_IN}: {RENAMED}"
    guide = (ROOT / "docs" / "guides" / "upgrade.md").read_text()
    assert [old for old in RENAMED if f"`{old}`" not in guide] == []


def test_a_recipe_of_0_1_is_read_as_it_is(run: Path) -> None:
    written, resolved = (run.parent / "recipe.yaml").read_text(), (run / "recipe.yaml").read_text()
    for text in (written, resolved):
        recipe = parse_recipe(text, name="test")
        assert (recipe.train.steps, recipe.model.shape["hidden"], recipe.checkpoint.every) == (60, 16, 10)


@pytest.mark.parametrize("command", [
    ("watch", "--json"), ("incidents", "--json"), ("doctor", "--json"), ("checkpoints", "list", "--json"),
    ("checkpoints", "verify", "--json"), ("report", "--json"), ("decisions", "--json"),
])  # fmt: skip
def test_a_run_of_0_1_is_shown_by_every_command(
    command: tuple[str, ...], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *words, last = command
    assert main([*words, str(run), last]) == 0
    shown = json.loads(capsys.readouterr().out)
    if command[0] == "watch":
        assert (shown["status"], shown["steps"], shown["total_steps"]) == ("stopped", 16, 60)
    if command[0] == "incidents":
        assert [(each["cause"], each["step"]) for each in shown] == [("preempted", 16)]


def test_a_run_of_0_1_is_resumed_and_computes_what_0_1_computed(run: Path) -> None:
    done = forked.run("trimaran", "resume", "--warm", str(run), "--quiet", "--no-check")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in RunDirectory(run).metrics.read_text().splitlines()]
    assert [each["step"] for each in lines] == list(range(1, 61))
    assert [each["loss"] for each in lines] == pytest.approx(NAMES["losses"], rel=1e-5)
    assert set(NAMES["metrics"].split()) - {"mfu", "hfu"} <= set(lines[-1] | lines[16])
