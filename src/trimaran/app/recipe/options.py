"""Options that several commands share, and their shell completion."""

import glob
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

if TYPE_CHECKING:
    from pydantic import BaseModel

    from trimaran.machine import Cluster
    from trimaran.runs import RunDirectory

RUNS = Path("runs")
YAML = re.compile(r"\.ya?ml$")
LINES = re.compile(r"\.jsonl$")
ANY = re.compile(r"")
MODEL = re.compile(r"\.ya?ml$|(^|/)config\.json$")


def complete_recipe(incomplete: str) -> list[str]:
    """Return the YAML files and folders that complete `incomplete`."""
    return _files(incomplete, YAML)


def complete_lines(incomplete: str) -> list[str]:
    """Return the JSONL files and folders that complete `incomplete`."""
    return _files(incomplete, LINES)


def complete_data(incomplete: str) -> list[str]:
    """Return the files and folders that complete `incomplete`."""
    return _files(incomplete, ANY)


def complete_model_or_recipe(incomplete: str) -> list[str]:
    """Return what `plan` accepts: presets, recipes, and the config.json and folders of models."""
    from trimaran.models import PRESETS, VLM_PRESETS

    return [*starting(PRESETS | VLM_PRESETS, incomplete), *_files(incomplete, MODEL)]


def complete_cluster(incomplete: str) -> list[str]:
    """Return the clusters that complete `incomplete`: counts and a device of the catalogue, or a file."""
    from trimaran.machine import DEVICES

    counts, separator, name = incomplete.rpartition("x")
    devices = [f"{counts}{separator}{device}" for device in DEVICES if device.casefold().startswith(name.casefold())]
    return [*starting(["auto"], incomplete), *devices, *_files(incomplete, YAML)]


def complete_autopilot(incomplete: str) -> list[str]:
    """Return the modes of the autopilot that complete `incomplete`."""
    return starting(["act", "advise", "off"], incomplete)


def complete_goal(incomplete: str) -> list[str]:
    """Return the goals that complete `incomplete`."""
    from trimaran.planner import GOALS

    return starting(GOALS, incomplete)


def complete_adapter(incomplete: str) -> list[str]:
    """Return the adapters that complete `incomplete`."""
    from trimaran.app.recipe.plan_request import ADAPTERS

    return starting(ADAPTERS, incomplete)


def complete_tool(incomplete: str) -> list[str]:
    """Return the tools that a plan can be written for."""
    from trimaran.planner.emit import EMITTERS

    return starting(EMITTERS, incomplete)


def complete_fabric(incomplete: str) -> list[str]:
    """Return the fabrics that complete `incomplete`."""
    from trimaran.machine.checks.fabric_presets import FABRICS

    return starting(["auto", *FABRICS], incomplete)


def _files(incomplete: str, kind: re.Pattern[str]) -> list[str]:
    names = sorted(glob.glob(glob.escape(incomplete) + "*"))
    return [f"{name}/" if Path(name).is_dir() else name for name in names if Path(name).is_dir() or kind.search(name)]


def starting(words: Iterable[str], incomplete: str) -> list[str]:
    """Return the words that complete `incomplete`."""
    return [word for word in words if word.startswith(incomplete)]


def complete_setting(incomplete: str) -> list[str]:
    """Return the recipe fields that complete `incomplete` and, after the `=`, the values of the field."""
    from trimaran.core import Recipe

    path, separator, _ = incomplete.partition("=")
    fields = dict(_fields(Recipe, ""))
    values = [f"{path}={choice}" for choice in fields.get(path, ())]
    return [
        setting
        for setting in (values if separator else [f"{field}=" for field in fields])
        if setting.startswith(incomplete)
    ]


def complete_run(incomplete: str) -> list[str]:
    """Return the runs under `runs/` that complete `incomplete`."""
    return [str(path) for path in sorted(RUNS.glob("*/")) if str(path).startswith(incomplete)]


def complete_run_or_recipe(incomplete: str) -> list[str]:
    """Return the runs and the recipes that complete `incomplete`."""
    return [*complete_run(incomplete), *(each for each in complete_recipe(incomplete) if not each.startswith("runs/"))]


def _fields(model: "type[BaseModel]", prefix: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield every field that `--set` can name, with its values if they are a fixed list."""
    from pydantic import BaseModel

    from trimaran.models import PRESETS, VLM_PRESETS

    for name, field in model.model_fields.items():
        if field.exclude:
            continue
        options = _options(field.annotation)
        section = next((each for each in options if isinstance(each, type) and issubclass(each, BaseModel)), None)
        if section:
            yield from _fields(section, f"{prefix}{name}.")
        else:
            listed = tuple(PRESETS | VLM_PRESETS) if f"{prefix}{name}" == "model.preset" else ()
            listed = listed or _plugin_choices(f"{prefix}{name}")
            yield f"{prefix}{name}", listed or tuple(str(each) for each in options if isinstance(each, str))


def _plugin_choices(path: str) -> tuple[str, ...]:
    """Return the names that a field takes which may name a plug-in; empty for other fields."""
    from trimaran.core.plugins import KINDS, plugin_names

    kind = next((name for name, kind in KINDS.items() if kind.field == path and name != "sink"), None)
    return (*KINDS[kind].reserved, *plugin_names(kind)) if kind else ()


def _options(annotation: Any) -> list[Any]:
    """Return what a value may be: the values of a Literal, the members of a union, or the type itself."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    members = [each for each in get_args(annotation) if each is not type(None)]
    return [option for each in members for option in _options(each)] if members else [annotation]


def program_name() -> str:
    """Return the name to type: `trimaran`, or the path it was started by if it is not on the PATH."""
    started, found = Path(sys.argv[0]), shutil.which("trimaran")
    if started.name != "trimaran" or (found and Path(found).resolve() == started.resolve()):
        return "trimaran"
    here = Path.cwd()
    return str(started.relative_to(here) if started.is_relative_to(here) else started)


def find_run(name: str) -> "RunDirectory":
    """Return the run of that name: a path, or the name of a run under `runs/`."""
    from trimaran.runs import open_run

    is_here = Path(name).exists() or len(Path(name).parts) != 1 or not RUNS.is_dir()
    return open_run(Path(name) if is_here else RUNS / name)


def refuse_missing_ranks(ranks: str, world: int) -> None:
    """Raise UserError unless `ranks` is `all`, or a list of ranks of a run that has `world` of them."""
    from trimaran.core import UserError
    from trimaran.runs.run_requests import RANKS_PATTERN

    if not RANKS_PATTERN.match(ranks) or (ranks != "all" and max(map(int, ranks.split(","))) >= world):
        raise UserError("A001", f"'{ranks}' is not a list of ranks of this run, which has {world}", where="--ranks",
                        fix=f"write all, or some of 0 to {world - 1}, such as 0")  # fmt: skip


def path_argument(path: Path) -> str:
    """Return `path` as a command line argument: a leading dash would make it an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)


RecipeFile = Annotated[
    str | None,
    typer.Argument(
        metavar="[RECIPE]",
        show_default=False,
        help="A YAML file, or - for standard input. [default: a small built-in recipe]",
        autocompletion=complete_recipe,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Override a field of the recipe, such as train.steps=300. Repeatable.",
        autocompletion=complete_setting,
    ),
]
RunName = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run directory, or its name under runs/.", autocompletion=complete_run),
]
TrainedModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run directory or its name under runs/, a checkpoint of it, a Hugging Face or a PEFT folder.",
        autocompletion=complete_run,
    ),
]
SeqLen = Annotated[int | None, typer.Option(metavar="N", help="Tokens per sequence, if a model is named.")]
GlobalBatch = Annotated[int | None, typer.Option(metavar="N", help="Sequences per step, if a model is named.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Warm = Annotated[
    bool, typer.Option("--warm", help="Start from the warm fork server, and start it if needed; see `trimaran warm`.")
]
NoCheck = Annotated[bool, typer.Option("--no-check", help="Skip the machine checks of `trimaran doctor`.")]


def start_command(cluster: "Cluster") -> list[str]:
    """Return what precedes `train` in the command; several nodes need torchrun on each, with a common rendezvous."""
    if cluster.num_nodes == 1:
        return [program_name()]
    ranks = [f"--nnodes={cluster.num_nodes}", f"--nproc-per-node={cluster.devices_per_node}"]
    return ["torchrun", *ranks, "--rdzv-backend=c10d", "--rdzv-endpoint=FIRST_NODE:29500", "-m", "trimaran"]
