"""The plan and the recipe that a patch of a running run asks for, and whether the run may go on with them."""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from trimaran.core import OTHER_CHANGEABLE_FIELDS, Plan, Recipe, UserError, dump_recipe, parse_recipe
from trimaran.machine import cluster_of
from trimaran.models import cached_facts, outline_if_known, spec_of
from trimaran.planner.question import Question
from trimaran.planner.rules.legal import check_plan
from trimaran.planner.search.goals import predicted

# `environment` is an argument: only entry points read it.


def question_of(recipe: Recipe, world_size: int, environment: Mapping[str, str]) -> Question:
    """Return what the planner needs to predict plans of the recipe on `world_size` ranks."""
    spec, outline = spec_of(recipe.model), outline_if_known(recipe.model, recipe.data)
    cluster, facts = cluster_of(recipe, world_size, environment), cached_facts(recipe.model, environment)
    return Question(recipe=recipe, spec=spec, outline=outline, cluster=cluster, max_plans=1, facts=facts)


def with_prediction(plan: Plan, recipe: Recipe, environment: Mapping[str, str]) -> Plan:
    """Return `plan` with its prediction, if the model's outline is known. Raises if the plan is not valid."""
    question = question_of(recipe, plan.mesh.world_size, environment)
    check_plan(plan, recipe, question.spec, question.cluster)
    return plan if question.outline is None else predicted(plan, question)


IN_PLACE_FIELDS = ("micro_batch", "micro_batches", "grad_accum", "recompute", "comm.bucket_mb", "comm.prefetch")
"""Fields of the plan that ranks may change without building networks and process groups again: `is_in_place`."""
RESULT_FIELDS = ("precision", "engine", "comm.compression", "comm.local_steps", "comm.async_sgd")
"""Fields of the plan that change the results of training, not only how they are computed."""
COURSE_FIELDS = ("precision", "comm.compression", "comm.local_steps")
"""Those of them that may change while the run runs, if the recipe's `autopilot.may_change_course` allows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedRun:
    """What a running run goes on with. `how`: whether networks, optimizer and process groups stay."""

    recipe: Recipe
    plan: Plan
    how: Literal["in place", "rebuilt"]


def change_run(recipe: Recipe, plan: Plan, patch: Mapping[str, Any], environment: Mapping[str, str]) -> ChangedRun:
    """Return what `patch` makes of a run; raise UserError if the run cannot go on with that.

    What follows from the patched fields follows them: data ranks fill the mesh, and micro-batch and accumulation give
    the same global batch. The other fields stay as they are.
    """
    new, pins = apply_patch(recipe, plan, patch)
    refuse_other_results(plan, new, may_change=COURSE_FIELDS if recipe.autopilot.may_change_course else ())
    new = with_prediction(new, recipe, environment)
    return ChangedRun(recipe=pins, plan=new, how="in place" if is_in_place(plan, new) else "rebuilt")


def is_in_place(old: Plan, new: Plan) -> bool:
    """Return whether networks, optimizer and process groups stay if a run goes from one plan to the other.

    Recompute is part of what a compiler sees, and of what a gathered input saves; projections are joined, or not, when
    the networks are built. The buckets of sharded weights are the units that they are gathered in.
    """
    changed = {name.removeprefix("plan.") for name in patch_between(old, new)}
    accumulates = (old.grad_accum > 1) != (new.grad_accum > 1)
    if not changed <= {*IN_PLACE_FIELDS} or (old.splits_weights and accumulates):
        return False
    saves_gathered = old.comm.regather and old.mesh.tp > 1
    joined = [(each.joins_projections, each.joins_projections_on_cpu) for each in (old, new)]
    if "recompute" in changed and (old.compile or saves_gathered or joined[0] != joined[1]):
        return False
    if "comm.bucket_mb" not in changed:
        return True
    # Gradients are summed in DDP's buckets, which DDP can fill anew.
    shardings = {old.sharding, *(each.sharding or "none" for each in old.towers.values())}
    is_replicated = old.mesh.world_size == old.mesh.dp_replicate > 1 == old.mesh.ep and shardings == {"none"}
    is_plain = old.comm.compression == "none" and not old.comm.local.is_on
    return is_replicated and is_plain and not old.reduces_after_backward


def patch_between(old: Plan, new: Plan) -> dict[str, Any]:
    """Return the patch that makes `new` of `old`: every field that differs, by its dotted name."""
    before, after = (dict(_leaves(each.model_dump(mode="json"), "plan")) for each in (old, new))
    return {name: value for name, value in after.items() if before.get(name) != value}


def apply_patch(recipe: Recipe, plan: Plan, patch: Mapping[str, Any]) -> tuple[Plan, Recipe]:
    """Return the patched plan, complete, and the recipe with the patched fields. Raises for fields that must stay."""
    for name in patch:
        if not name.startswith("plan.") and name not in OTHER_CHANGEABLE_FIELDS:
            fields = ", ".join(("plan.*", *OTHER_CHANGEABLE_FIELDS))
            raise UserError("S040.cannot-change-while", where=name, name=name, fields=fields)
    full = recipe.model_copy(update={"plan": Plan.model_validate(plan.model_dump())})  # every field of it is set
    pairs = [f"{name}={json.dumps(value)}" for name, value in patch.items()]
    patched = parse_recipe(dump_recipe(full), name="recipe.yaml", overrides=pairs)
    assert isinstance(patched.plan, Plan)
    new = _completed(patched.plan, plan, recipe.train.global_batch, patch.keys())
    pins = recipe.plan
    if isinstance(pins, Plan):
        names = pins.model_fields_set - {"prediction"}
        if "micro_batch" in names and new.micro_batches:  # it is the most rows of a rank then, and means little alone
            names |= {"micro_batches"}
        pins = pins.model_copy(update={name: getattr(new, name) for name in names})
    return new, patched.model_copy(update={"plan": pins})


def refuse_other_results(old: Plan, new: Plan, *, may_change: Collection[str] = ()) -> None:
    """Raise UserError unless a run may go on with `new` with the same results, except for the fields `may_change`."""
    for name in (each for each in RESULT_FIELDS if each not in may_change):
        before, after = map(attrgetter(name), (old, new))
        if before != after:
            raise UserError("S040.plan-changes-results", where=f"plan.{name}", name=name, before=before, after=after)
    if not old.engine_traits.can_change_live:
        raise UserError("S040.run-with-engine", where="plan.engine", engine=old.engine)
    if "measured" in (old.micro_batches, new.micro_batches):
        raise UserError("S040.rows-measured-speed", where="plan.micro_batches")
    if old.mesh.world_size != new.mesh.world_size:
        raise UserError(
            "S043.mesh-ranks-run",
            where="plan.mesh",
            mesh=new.mesh,
            world_size=new.mesh.world_size,
            mesh_world_size=old.mesh.world_size,
        )
    if old.global_batch != new.global_batch:
        raise UserError(
            "S041.global-batch-run",
            where="plan.micro_batch, plan.grad_accum",
            global_batch=old.global_batch,
            dp=new.mesh.dp,
            micro_batch=new.micro_batch,
            grad_accum=new.grad_accum,
            new_global_batch=new.global_batch,
        )
    is_split_alike = (old.mesh, old.sharding, old.towers) == (new.mesh, new.sharding, new.towers)
    if old.comm.compression != "none" and not is_split_alike:
        raise UserError("S040.compressed-gradients-results", where="plan.mesh")
    if old.comm.sync_every > 1 and old.mesh.dp_replicate != new.mesh.dp_replicate:
        raise UserError("S040.local-steps-results", where="plan.mesh.dp_replicate")


def _completed(new: Plan, old: Plan, global_batch: int, names: Collection[str]) -> Plan:
    """Return the patched plan with the fields that follow from those in the patch."""

    def is_set(field: str) -> bool:
        """Return whether the patch sets this field of the plan, all of its section or some of its parts."""
        own = (name.removeprefix("plan.") for name in names)
        return any(f"{each}.".startswith(f"{field}.") or f"{field}.".startswith(f"{each}.") for each in own)

    mesh = new.mesh
    has_replicas, has_shards = is_set("mesh.dp_replicate"), is_set("mesh.dp_shard")
    data, rest = divmod(old.mesh.world_size, mesh.tp * mesh.pp * mesh.cp)
    if has_replicas != has_shards:
        axis = "dp_replicate" if has_shards else "dp_shard"
        degree, rest = divmod(old.mesh.world_size, mesh.world_size // getattr(mesh, axis))
        mesh = mesh if rest or not degree else mesh.model_copy(update={axis: degree})
    elif not has_replicas and not rest:
        sharded = old.mesh.dp_shard > 1
        if is_set("sharding"):
            sharded = new.sharding != "none" and (mesh.cp == 1 or old.mesh.dp_shard > 1)
        replicas = math.gcd(mesh.dp_replicate, data) if sharded and old.mesh.dp_shard > 1 else 1
        sizes = (replicas, data // replicas) if sharded else (data, 1)
        mesh = mesh.model_copy(update=dict(zip(("dp_replicate", "dp_shard"), sizes, strict=True)))
    fields: dict[str, Any] = {"mesh": mesh}
    if not is_set("sharding") and (new.sharding == "none") != (mesh.shards == 1) and new.offload != "parameters":
        must_shard = new.sharding == "none" and mesh.dp_shard > 1
        fields["sharding"] = "parameters" if must_shard else new.sharding if mesh.shards > 1 else "none"
    if not is_set("pipeline.stages") and mesh.pp != old.mesh.pp:
        fields["pipeline"] = new.pipeline.model_copy(update={"stages": ()})
    if not is_set("loss") and mesh.tp * mesh.pp > 1:
        fields["loss"] = "logits"
    if not is_set("comm.overlap") and mesh.world_size != mesh.dp_replicate:
        fields["comm"] = new.comm.model_copy(update={"overlap": True})
    if not is_set("micro_batches") and mesh.dp != old.mesh.dp and new.rows_by_rank:
        fields["micro_batches"] = ()
    completed = new.model_copy(update=fields)
    if completed.global_batch == global_batch or global_batch % mesh.dp or completed.rows_by_rank:
        return completed
    batch, rows = global_batch // mesh.dp, completed.micro_batch  # of a data rank
    if is_set("grad_accum"):
        if is_set("micro_batch") or batch % completed.grad_accum:
            return completed
        return completed.model_copy(update={"micro_batch": batch // completed.grad_accum})
    if not is_set("micro_batch"):  # the most rows that are not more than before and fill the pipeline
        fits = (each for each in range(min(rows, batch), 0, -1) if batch % each == 0)
        rows = next((each for each in fits if mesh.pp == 1 or batch // each >= completed.num_stages), 1)
    return completed.model_copy(update={"micro_batch": rows, "grad_accum": max(1, batch // rows)})


def _leaves(tree: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    """Return the fields of the tree by their dotted names; options that are mappings of their own stay whole."""
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        if isinstance(value, dict) and name in ("mesh", "pipeline", "comm"):
            found += _leaves(value, f"{prefix}.{name}")
        else:
            found.append((f"{prefix}.{name}", value))
    return found
