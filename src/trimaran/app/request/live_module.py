"""The planner for a network in memory: `trimaran.plan(module, inputs, cluster="8xH100")`."""

import os
from typing import TYPE_CHECKING, Any

from trimaran.core import Plan, UserError, parse_recipe
from trimaran.hardware import calibration_folder, parse_cluster
from trimaran.planner import Goal, PlanAnswer, Question, search

if TYPE_CHECKING:
    from torch import nn

SHORTEST = 2  # a recipe knows no shorter sequences; it stands for a sample that is none


def plan(
    module: "nn.Module",
    *inputs: Any,
    cluster: str = "auto",
    global_batch: int | None = None,
    seq_len: int | None = None,
    goal: Goal = "throughput",
    pins: Plan | None = None,
) -> PlanAnswer:
    """Return the best ways to train `module` on `cluster`, each with its prediction, and why the others lost.

    The module is traced with `inputs`, a sample or a few, without computing anything, and is not changed. An optimizer
    step has `global_batch` samples, by default one a device. `seq_len` is by default that of the first input where it
    holds tokens, in rows. What `pins` sets stays.
    """
    from trimaran.models.from_module import outline_from_module

    visible, measured = os.environ.get("CUDA_VISIBLE_DEVICES"), calibration_folder(os.environ)
    place = parse_cluster(cluster, visible_devices=visible, calibrations=measured)
    _refuse_no_module(module, inputs)
    length = _length(inputs) if seq_len is None else seq_len
    batch = place.world_size if global_batch is None else global_batch
    settings = [f"cluster={cluster}", f"data.seq_len={length}", f"train.global_batch={batch}"]
    recipe = parse_recipe("", name="trimaran.plan", overrides=settings)
    recipe = recipe.model_copy(update={"plan": pins or "auto"})
    outline = outline_from_module(module, *inputs)
    if not outline.trained_parameters or not outline.training_flops(length):
        raise UserError("M032", f"{outline.name} has nothing to train: no parameters that learn, or no arithmetic",
                        where="trimaran.plan", fix="call trimaran.plan(network, *inputs)")  # fmt: skip
    # Any system may run it: no pin of our own trainer's limits counts.
    return search(Question(recipe=recipe, spec=None, outline=outline, cluster=place, goal=goal, trains=False))


def _refuse_no_module(module: object, inputs: tuple[Any, ...]) -> None:
    """Raise where there is no network, or nothing to run it on; a transformers model tells its sizes by itself."""
    from torch import nn

    if not isinstance(module, nn.Module):
        name = module if isinstance(module, str) else "NAME"
        raise UserError("M033", f"{module!r:.80} is not an nn.Module", where="trimaran.plan",
                        fix=f"call trimaran.plan(module, *inputs), or type `trimaran plan {name}`")  # fmt: skip
    if not inputs and not hasattr(getattr(module, "config", None), "to_dict"):
        raise UserError("M031", "there is no example to run: the sizes of activations depend on the inputs",
                        where="trimaran.plan", fix="call trimaran.plan(module, *inputs)")  # fmt: skip


def _length(inputs: tuple[Any, ...]) -> int:
    """Return the length of a sequence of tokens: rows of whole numbers."""
    first = inputs[0] if inputs else None
    rows = getattr(first, "ndim", 0) == 2 and not first.is_floating_point()  # type: ignore[union-attr]
    return max(SHORTEST, first.shape[1]) if rows else SHORTEST  # type: ignore[union-attr]
