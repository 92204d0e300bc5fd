"""Resolves the command line to a recipe, model, cluster and plan. No torch, no processes, no files written."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trimaran.app.recipe.ask_torch import ask_hf_facts, cluster_of_text
from trimaran.app.recipe.recipe_files import with_local_model, with_model_tokenizer
from trimaran.core import Plan, Recipe, RowSizes, ScenePoints, UserError, did_you_mean, parse_recipe, templated
from trimaran.core.errors import collected, raise_together
from trimaran.core.recipe import load_used_plugins
from trimaran.core.regular_files import expand_user, read_regular_bytes
from trimaran.launch.supervise.fork_server_process import SHARE_GPUS
from trimaran.machine import Cluster, calibration_folder, detect, parse_cluster
from trimaran.machine.parse_cluster import MAX_DEVICES
from trimaran.models import (
    Outline,
    Spec,
    is_hub_name,
    outline_for,
    outline_if_known,
    recipe_image_rules,
    refuse_freezing,
    spec_of,
    vision_of,
)
from trimaran.planner import Question, choose

MAX_RECIPE_BYTES = 1 << 20
TORCHRUN_FIX = "start the command with torchrun, which sets it; or unset RANK and WORLD_SIZE to run without torchrun"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A resolved run: recipe, model, cluster and plan. `spec` is None for a foreign Hugging Face model."""

    recipe: Recipe
    spec: Spec | None
    outline: Outline | None
    cluster: Cluster
    plan: Plan


def resolve(file: str | None, settings: Sequence[str], *, cluster: Cluster | None = None) -> Request:
    """Return the recipe in `file` with `settings` on top, and its plan; see `read_question`. Paths are absolute."""
    question = read_question(file, settings, cluster=cluster, trains=True)
    recipe, spec, outline = with_absolute_paths(question.recipe), question.spec, question.outline
    refuse_freezing(recipe.model)
    load_used_plugins(recipe, ("data source", "autopilot policy"))  # those of ranks and sinks are checked there
    inputs = (recipe, spec, question.cluster, outline)
    plan = choose(*inputs)
    # Of a Hugging Face model only its code knows which axes it supports. That takes seconds to find out, once, and is
    # asked only if the plan uses such an axis. Under torchrun the plan of rank 0 counts.
    uses_axis = plan.mesh.tp > 1 or plan.mesh.cp > 1 or plan.precision == "fp8"
    is_other_rank = {"RANK", "WORLD_SIZE"} <= os.environ.keys() and os.environ["RANK"] != "0"
    if recipe.model.kind.is_hf and uses_axis and not is_other_rank:
        facts, _ = ask_hf_facts(recipe.model, os.environ)
        plan = plan if facts is None else choose(*inputs, facts)
    return Request(recipe=recipe, spec=spec, outline=outline, cluster=question.cluster, plan=plan)


def read_question(
    file: str | None, settings: Sequence[str], *, cluster: Cluster | None = None, trains: bool = False
) -> Question:
    """Return the planner's question for the recipe in `file` (`-`: standard input, None: the defaults).

    `settings` override fields of the recipe. `cluster` is the meaning of `auto`; without it, this machine. With
    `trains` a prediction is optional: a Hugging Face model whose config.json lacks its sizes then has no outline.
    """
    recipe, mistakes = read_recipe(file, settings), []
    with collected(mistakes):
        recipe = with_local_model(recipe, only_config=not trains)
        spec = spec_of(recipe.model)
        points = scene_points_of(recipe, spec)
        outline = (outline_if_known if trains else outline_for)(recipe.model, recipe.data, points)
        rows = row_sizes_of(recipe, spec)
    if not mistakes and (cluster is None or recipe.cluster != "auto"):
        with collected(mistakes):
            cluster = cluster_of_text(recipe.cluster, os.environ)
    if mistakes:  # look for more of them, so that a recipe is corrected once and not three times
        from trimaran.data import check, named_path

        with collected(mistakes):
            if recipe.cluster != "auto":
                parse_cluster(recipe.cluster)
        with collected(mistakes):
            if trains and recipe.data.path and not is_hub_name(recipe.data.path):
                named_path(recipe.data)
                is_decoder = recipe.model.kind.is_language_model and not recipe.model.kind.is_hf
                if recipe.data.source in ("text", "jsonl", "datasets") and is_decoder:
                    check(recipe.data)
    raise_together(mistakes)
    assert cluster is not None, "a cluster that cannot be read is a mistake"
    if rows is not None and outline is not None and spec is not None and spec.vision is not None:
        from trimaran.models.vlm_spec import with_row_sizes

        outline = with_row_sizes(outline, spec, rows)
    return Question(recipe=recipe, spec=spec, outline=outline, cluster=cluster, rows=rows)


def read_recipe(file: str | None, settings: Sequence[str]) -> Recipe:
    """Return the recipe in `file` (`-`: standard input, None: the defaults) with `settings` on top."""
    recipe = parse_recipe(_read(file), name=_name(file), overrides=settings)
    if file is None or file == "-":
        return recipe
    folder = Path(file).parent.absolute()
    changes: dict[str, object] = {"cluster": _found(recipe.cluster, folder)}
    if recipe.model.path:
        changes["model"] = recipe.model.model_copy(update={"path": _found(recipe.model.path, folder)})
    return recipe.model_copy(update=changes)


def torchrun_cluster(environment: Mapping[str, str]) -> Cluster:
    """Return the cluster of an outside torchrun: this machine's kind of device, one per rank."""
    world_size = torchrun_number(environment, "WORLD_SIZE", most=MAX_DEVICES)
    devices_per_node = torchrun_number(environment, "LOCAL_WORLD_SIZE", most=world_size, default=world_size)
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"):
        torchrun_number(environment, name, least=0, most=world_size - 1, default=0)
    if world_size % devices_per_node:
        raise UserError(
            "A022.ranks-not-multiple",
            where="the environment variables WORLD_SIZE, LOCAL_WORLD_SIZE",
            world_size=world_size,
            devices_per_node=devices_per_node,
        )
    measured = calibration_folder(environment)
    here = detect(visible_devices=environment.get("CUDA_VISIBLE_DEVICES"), calibrations=measured)
    if here.device.traits.shares_cores:
        return parse_cluster(f"{world_size // devices_per_node}x{devices_per_node}xcpu", calibrations=measured)
    return replace(here, num_nodes=world_size // devices_per_node, devices_per_node=devices_per_node)


def torchrun_number(
    environment: Mapping[str, str], name: str, *, most: int, least: int = 1, default: int | None = None
) -> int:
    """Return a variable that torchrun sets; raise UserError unless it is a number from `least` to `most`."""
    text = environment.get(name, "" if default is None else str(default))
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else -1
    if not least <= number <= most:
        raise UserError(
            "A022.not-number",
            where=templated("the environment variable {name}", name=name),
            name=name,
            text=text[:40],
            least=least,
            most=most,
        )
    return number


def refuse_wrong_world_size(plan: Plan, environment: Mapping[str, str]) -> None:
    """Raise unless torchrun started as many ranks as the plan has."""
    started, planned = int(environment["WORLD_SIZE"]), plan.mesh.world_size
    if started != planned:
        raise UserError("A010.plan-ranks-torchrun", where="cluster", planned=planned, started=started)


def refuse_other_machine(cluster: Cluster) -> None:
    """Raise unless this machine is the cluster: one node, and as many GPUs as it asks for, unless ranks share them."""
    if cluster.num_nodes == 1 and cluster.device.traits.shares_cores:
        return
    here = detect(visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"))
    is_enough = here.world_size >= cluster.world_size or os.environ.get(SHARE_GPUS) == "1"
    if cluster.num_nodes > 1 or here.device.kind != cluster.device.kind or not is_enough:
        raise UserError("A007.run-needs", where="cluster", cluster=cluster, here=here)


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Return the recipe with absolute paths for existing files, so that a run can be resumed from any folder."""
    samples = recipe.data.samples
    data: dict[str, object] = {
        "path": _absolute(recipe.data.path),
        "tokenizer": "bytes" if recipe.data.tokenizer == "bytes" else _absolute(recipe.data.tokenizer),
        "samples": samples.model_copy(update={"images": _absolute(samples.images)}),
        "mixture": tuple(
            source.model_copy(update={"path": _absolute(source.path), "images": _absolute(source.images)})
            for source in recipe.data.mixture
        ),
    }
    adapter = recipe.model.adapter
    if adapter is not None:
        adapter = adapter.model_copy(update={"path": _absolute(adapter.path)})
    changes: dict[str, object] = {
        "cluster": _absolute(recipe.cluster) if recipe.cluster.endswith((".yaml", ".yml")) else recipe.cluster,
        "data": recipe.data.model_copy(update=data),
        "model": recipe.model.model_copy(update={"path": _absolute(recipe.model.path), "adapter": adapter}),
    }
    return recipe.model_copy(update=changes)


def _absolute(path: str | None) -> str | None:
    named = Path(path) if path else None
    return str(named.absolute()) if named and named.exists() else path


def _found(path: str, folder: Path) -> str:
    here, there = expand_user(path), folder / path
    return str(there) if not here.exists() and there.exists() else path


def _name(file: str | None) -> str:
    return {None: "the defaults", "-": "standard input"}.get(file) or str(file)


def _read(file: str | None) -> str:
    if file is None:
        return ""
    limit = MAX_RECIPE_BYTES + 1  # an endless file is not read forever
    try:
        if file == "-":
            data = sys.stdin.buffer.read(limit)
        else:
            data = read_regular_bytes(file, follow_links=True, limit_bytes=limit)
    except OSError as error:
        near = did_you_mean(file, [str(each) for each in Path(file).parent.glob("*.y*ml")])
        raise UserError("A003.recipe-cannot-read", where=file, reason=error.strerror, near=near) from None
    if len(data) > MAX_RECIPE_BYTES:
        raise UserError("A004.recipe-larger-mib", where=_name(file))
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError("A005.recipe-not-utf", where=_name(file)) from None


def row_sizes_of(recipe: Recipe, spec: Spec | None) -> RowSizes | None:
    """Return what a row holds on average, from the first samples of the data.

    None where images are described by the recipe, for data that is not on this machine or cannot be read (training
    reports why), and for a model without vision.
    """
    data = recipe.data
    if vision_of(spec) is None or {"images_per_sample", "image_size"} & data.model_fields_set:
        return None
    from trimaran.data.data_kind import SAMPLE_SOURCES

    sources = data.mixture or (data,)
    if not all(each.source in SAMPLE_SOURCES for each in sources):
        return None
    if any(each.path is not None and is_hub_name(each.path) for each in sources):
        return None
    from trimaran.data.samples.prepare_samples import estimate_rows

    try:
        return estimate_rows(with_model_tokenizer(recipe).data, recipe_image_rules(recipe))
    except (UserError, OSError):
        return None


def scene_points_of(recipe: Recipe, spec: Spec | None) -> ScenePoints | None:
    """Return the mean points of a few recorded scenes; None if they are simulated, or cannot be read here."""
    data, rules = recipe.data, None if spec is None else spec.scenes()
    if rules is None or data.source != "scenes" or data.path is None:
        return None
    from trimaran.data.quarantine import BadSampleError
    from trimaran.data.scenes.scene_feed import measure_points, recorded_scenes

    try:
        return measure_points(recorded_scenes(data, rules))
    except (UserError, BadSampleError, OSError):
        return None
