"""Options that several commands share, and their shell completion."""

import glob
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from trimaran.core import UserError
from trimaran.runs import RunDirectory, open_run

if TYPE_CHECKING:
    from pydantic import BaseModel

    from trimaran.machine import Cluster

RUNS = Path("runs")
YAML = re.compile(r"\.ya?ml$")
Completion = Callable[[str], list[str]]


def words_of(*words: str, table: str = "") -> Completion:
    """Return the completion by `words` and the names in a table, `module:NAME`, which is imported when it is used."""
    module, _, name = table.partition(":")

    def complete(incomplete: str) -> list[str]:
        return starting([*words, *(getattr(import_module(f"trimaran.{module}"), name) if table else ())], incomplete)

    return complete


def files_named(pattern: str) -> Completion:
    """Return the completion by folders, and by files whose names have the pattern."""
    kind = re.compile(pattern)

    def complete(incomplete: str) -> list[str]:
        names = ((name, Path(name).is_dir()) for name in sorted(glob.glob(glob.escape(incomplete) + "*")))
        return [f"{name}/" if is_folder else name for name, is_folder in names if is_folder or kind.search(name)]

    return complete


def starting(words: Iterable[str], incomplete: str) -> list[str]:
    """Return the words that complete `incomplete`."""
    return [word for word in words if word.startswith(incomplete)]


complete_recipe, complete_lines, complete_data = files_named(YAML.pattern), files_named(r"\.jsonl$"), files_named("")
complete_autopilot = words_of("act", "advise", "off")
complete_goal = words_of(table="planner:GOALS")
complete_adapter = words_of(table="app.recipe.plan_request:ADAPTERS")
complete_tool = words_of(table="planner.emit:EMITTERS")
complete_fabric = words_of("auto", table="machine.checks.fabric_presets:FABRICS")


def complete_model_or_recipe(incomplete: str) -> list[str]:
    """Return what `plan` accepts: presets, recipes, and the config.json and folders of models."""
    from trimaran.models import PRESETS, VLM_PRESETS

    return [*starting(PRESETS | VLM_PRESETS, incomplete), *files_named(r"\.ya?ml$|(^|/)config\.json$")(incomplete)]


def complete_cluster(incomplete: str) -> list[str]:
    """Return the clusters that complete `incomplete`: counts and a device of the catalogue, or a file."""
    from trimaran.machine import DEVICES

    counts, separator, name = incomplete.rpartition("x")
    devices = [f"{counts}{separator}{device}" for device in DEVICES if device.casefold().startswith(name.casefold())]
    return [*starting(["auto"], incomplete), *devices, *complete_recipe(incomplete)]


def complete_setting(incomplete: str) -> list[str]:
    """Return the recipe fields that complete `incomplete` and, after the `=`, the values of the field."""
    from trimaran.core import Recipe

    path, separator, _ = incomplete.partition("=")
    fields = dict(_fields(Recipe, ""))
    values = [f"{path}={choice}" for choice in fields.get(path, ())]
    return starting(values if separator else [f"{field}=" for field in fields], incomplete)


def complete_run(incomplete: str) -> list[str]:
    """Return the runs under `runs/` that complete `incomplete`."""
    return starting(map(str, sorted(RUNS.glob("*/"))), incomplete)


def complete_run_or_recipe(incomplete: str) -> list[str]:
    """Return the runs and the recipes that complete `incomplete`."""
    return [*complete_run(incomplete), *(each for each in complete_recipe(incomplete) if not each.startswith("runs/"))]


def _fields(model: "type[BaseModel]", prefix: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield every field that `--set` can name, with its values if they are a fixed list."""
    from pydantic import BaseModel

    from trimaran.core.plugins import KINDS, plugin_names
    from trimaran.models import PRESETS, VLM_PRESETS

    for name, field in model.model_fields.items():
        if field.exclude:
            continue
        options = _options(field.annotation)
        section = next((each for each in options if isinstance(each, type) and issubclass(each, BaseModel)), None)
        if section:
            yield from _fields(section, f"{prefix}{name}.")
        else:
            path, listed = f"{prefix}{name}", tuple(str(each) for each in options if isinstance(each, str))
            if path == "model.preset":
                listed = tuple(PRESETS | VLM_PRESETS)
            elif kind := next((name for name, kind in KINDS.items() if kind.field == path and name != "sink"), None):
                listed = (*KINDS[kind].reserved, *plugin_names(kind)) or listed  # it may name a plug-in
            yield path, listed


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


def find_run(name: str) -> RunDirectory:
    """Return the run of that name: a path, or the name of a run under `runs/`."""
    is_here = Path(name).exists() or len(Path(name).parts) != 1 or not RUNS.is_dir()
    return open_run(Path(name) if is_here else RUNS / name)


def refuse_missing_ranks(ranks: str, world: int) -> None:
    """Raise UserError unless `ranks` is `all`, or a list of ranks of a run that has `world` of them."""
    from trimaran.runs.run_requests import RANKS_PATTERN

    if not RANKS_PATTERN.match(ranks) or (ranks != "all" and max(map(int, ranks.split(","))) >= world):
        raise UserError("A001.not-list-ranks", where="--ranks", ranks=ranks, num_ranks=world, last=world - 1)


def path_argument(path: Path) -> str:
    """Return `path` as a command line argument: a leading dash would make it an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def argument(metavar: str, help: str, complete: Completion | None = None, **more: Any) -> Any:
    """Return an argument of a command whose help says what its default is."""
    return typer.Argument(metavar=metavar, show_default=False, help=help, autocompletion=complete, **more)


def cluster_option(help: str) -> Any:
    return typer.Option(metavar="C", help=help, autocompletion=complete_cluster)


RECIPE_HELP = "A YAML file, or - for standard input. [default: a small built-in recipe]"
RecipeFile = Annotated[str | None, argument("[RECIPE]", RECIPE_HELP, complete_recipe)]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", autocompletion=complete_setting,
                 help="Override a field of the recipe, such as train.steps=300. Repeatable."),
]  # fmt: skip
RUN_HELP = "A run directory, or its name under runs/."
RunName = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=complete_run)]
MODEL_HELP = "A run directory or its name under runs/, a checkpoint of it, a Hugging Face or a PEFT folder."
TrainedModelName = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=complete_run)]
SeqLen = Annotated[int | None, typer.Option(metavar="N", help="Tokens per sequence, if a model is named.")]
GlobalBatch = Annotated[int | None, typer.Option(metavar="N", help="Sequences per step, if a model is named.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Warm = Annotated[
    bool, typer.Option("--warm", help="Start from the warm fork server, and start it if needed; see `trimaran warm`.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show only the result.")]
NoCheck = Annotated[bool, typer.Option("--no-check", help="Skip the machine checks of `trimaran doctor`.")]


def start_command(cluster: "Cluster") -> list[str]:
    """Return what precedes `train` in the command; several nodes need torchrun on each, with a common rendezvous."""
    if cluster.num_nodes == 1:
        return [program_name()]
    ranks = [f"--nnodes={cluster.num_nodes}", f"--nproc-per-node={cluster.devices_per_node}"]
    return ["torchrun", *ranks, "--rdzv-backend=c10d", "--rdzv-endpoint=FIRST_NODE:29500", "-m", "trimaran"]
