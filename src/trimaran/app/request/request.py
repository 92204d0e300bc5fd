"""From what a person typed to a plan: recipe, model, cluster, plan. No torch, no processes, nothing written."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trimaran.core import Plan, Recipe, UserError, nearest, parse_recipe
from trimaran.hardware import Cluster, calibration_folder, detect, parse_cluster
from trimaran.models import Outline, outline_for, outline_if_told, refuse_freezing, spec_of
from trimaran.models.stages import Spec
from trimaran.planner import Question, choose

MAX_RECIPE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to run, on what, and how it was decided to split it. `spec` is None for a foreign Hugging Face model."""

    recipe: Recipe
    spec: Spec | None
    outline: Outline | None
    cluster: Cluster
    plan: Plan


def resolve(file: str | None, settings: Sequence[str], *, cluster: Cluster | None = None) -> Request:
    """Return the plan to train the recipe in `file` with, `settings` on top, see `ask`. Its paths are whole ones."""
    asked = ask(file, settings, cluster=cluster, trains=True)
    asked = replace(asked, recipe=with_whole_paths(asked.recipe))
    refuse_freezing(asked.recipe.model)
    plan = choose(asked.recipe, asked.spec, asked.cluster, asked.outline)
    return Request(recipe=asked.recipe, spec=asked.spec, outline=asked.outline, cluster=asked.cluster, plan=plan)


def ask(file: str | None, settings: Sequence[str], *, cluster: Cluster | None = None, trains: bool = False) -> Question:
    """Return what the recipe in `file` (`-`: standard input, None: the defaults) asks for, with `settings` on top.

    `cluster` is what `auto` means; without it, this machine. What `trains` need not be predicted: a Hugging Face model
    whose config.json does not tell its sizes has no outline then.
    """
    recipe = read_recipe(file, settings)
    spec = spec_of(recipe.model)
    outline = (outline_if_told if trains else outline_for)(recipe.model, recipe.data)
    if cluster is None or recipe.cluster != "auto":
        visible, measured = os.environ.get("CUDA_VISIBLE_DEVICES"), calibration_folder(os.environ)
        cluster = parse_cluster(recipe.cluster, visible_devices=visible, calibrations=measured)
    return Question(recipe=recipe, spec=spec, outline=outline, cluster=cluster)


def read_recipe(file: str | None, settings: Sequence[str]) -> Recipe:
    """Return the recipe in `file` (`-`: standard input, None: the defaults) with `settings` on top."""
    return _anchored(parse_recipe(_read(file), name=_name(file), overrides=settings), file)


def torchrun_cluster(environment: Mapping[str, str]) -> Cluster:
    """Return the cluster that an outside torchrun spans: this machine's kind of device, as many as it has ranks."""
    world_size = int(environment["WORLD_SIZE"])
    devices_per_node = int(environment.get("LOCAL_WORLD_SIZE", world_size))
    measured = calibration_folder(environment)
    here = detect(visible_devices=environment.get("CUDA_VISIBLE_DEVICES"), calibrations=measured)
    if here.device.kind == "cpu":
        return parse_cluster(f"{world_size // devices_per_node}x{devices_per_node}xcpu", calibrations=measured)
    return replace(here, num_nodes=world_size // devices_per_node, devices_per_node=devices_per_node)


def refuse_other_size(plan: Plan, environment: Mapping[str, str]) -> None:
    """Raise unless torchrun started as many ranks as the plan is for."""
    started, planned = int(environment["WORLD_SIZE"]), plan.mesh.world_size
    if started != planned:
        raise UserError("A010", f"the plan is for {planned} ranks, torchrun started {started}", where="cluster",
                        fix=f"leave cluster at auto, or start torchrun with {planned} processes")  # fmt: skip


def refuse_elsewhere(cluster: Cluster) -> None:
    """Raise unless this machine is the cluster: one node, and as many GPUs as it asks for."""
    if cluster.num_nodes == 1 and cluster.device.kind == "cpu":
        return
    here = detect(visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"))
    if cluster.num_nodes > 1 or here.device.kind != cluster.device.kind or here.world_size < cluster.world_size:
        raise UserError("A007", f"the run needs {cluster}, and this machine is {here}", where="cluster",
                        fix="train with --set cluster=auto, or look at it with `trimaran plan`")  # fmt: skip


def with_whole_paths(recipe: Recipe) -> Recipe:
    """Return the recipe with whole paths for the files that are there: a run is gone on with from any folder."""
    samples = recipe.data.samples
    data: dict[str, object] = {
        "path": _whole(recipe.data.path),
        "tokenizer": _whole(recipe.data.tokenizer),
        "samples": samples.model_copy(update={"images": _whole(samples.images)}),
        "mixture": tuple(
            source.model_copy(update={"path": _whole(source.path), "images": _whole(source.images)})
            for source in recipe.data.mixture
        ),
    }
    changes: dict[str, object] = {
        "cluster": _whole(recipe.cluster) if recipe.cluster.endswith((".yaml", ".yml")) else recipe.cluster,
        "data": recipe.data.model_copy(update=data),
        "model": recipe.model.model_copy(update={"path": _whole(recipe.model.path)}),
    }
    return recipe.model_copy(update=changes)


def _whole(path: str | None) -> str | None:
    named = Path(path) if path else None
    return str(named.absolute()) if named and named.exists() else path


def _anchored(recipe: Recipe, file: str | None) -> Recipe:
    """Return the recipe with whole paths for what is not under this folder but under the recipe's own."""
    if file is None or file == "-":
        return recipe
    folder = Path(file).parent.absolute()
    changes: dict[str, object] = {"cluster": _found(recipe.cluster, folder)}
    if recipe.model.path:
        changes["model"] = recipe.model.model_copy(update={"path": _found(recipe.model.path, folder)})
    return recipe.model_copy(update=changes)


def _found(path: str, folder: Path) -> str:
    here, there = Path(path).expanduser(), folder / path
    return str(there) if not here.exists() and there.exists() else path


def _name(file: str | None) -> str:
    return {None: "the defaults", "-": "standard input"}.get(file) or str(file)


def _read(file: str | None) -> str:
    if file is None:
        return ""
    data = _read_bytes(file)
    if len(data) > MAX_RECIPE_BYTES:
        raise UserError("A004", "the recipe is larger than 1 MiB, more than a recipe ever needs", where=_name(file),
                        fix="name a YAML file; data belongs under data.path")  # fmt: skip
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError("A005", "the recipe is not text in UTF-8", where=_name(file),
                        fix="name a YAML file; data belongs under data.path") from None  # fmt: skip


def _read_bytes(file: str) -> bytes:
    """Return at most one byte more than a recipe may have: even an endless file is read no further."""
    if file == "-":
        return sys.stdin.buffer.read(MAX_RECIPE_BYTES + 1)
    path = Path(file)
    try:
        with path.open("rb") as stream:
            return stream.read(MAX_RECIPE_BYTES + 1)
    except OSError as error:
        near = nearest(file, [str(each) for each in path.parent.glob("*.y*ml")])
        raise UserError("A003", f"the recipe cannot be read: {error.strerror}{near}", where=file,
                        fix="name a YAML file, - for standard input, or none for the defaults") from None  # fmt: skip
