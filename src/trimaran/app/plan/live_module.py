"""The planner for a live nn.Module: `trimaran.plan(module, inputs, cluster="8xH100")`."""

import os
from typing import TYPE_CHECKING, Any

from trimaran.core import Plan, UserError, parse_recipe
from trimaran.machine import calibration_folder, parse_cluster
from trimaran.planner import Goal, PlanAnswer, Question, search

if TYPE_CHECKING:
    from torch import nn

MIN_SEQ_LEN = 2  # the minimum of a recipe; used for samples that are not sequences


def plan(
    module: "nn.Module",
    *inputs: Any,
    cluster: str = "auto",
    global_batch: int | None = None,
    seq_len: int | None = None,
    goal: Goal = "throughput",
    pins: Plan | None = None,
) -> PlanAnswer:
    """Return the best plans to train `module` on `cluster`, each with its prediction, and why other plans lost.

    The module is traced with `inputs`, a small batch, without computing anything, and is not changed. An optimizer step
    has `global_batch` samples, by default one per device. `seq_len` is by default that of the first input if it is a
    batch of tokens. Fields set in `pins` are fixed.
    """
    from torch import nn

    from trimaran.models.from_module import outline_from_module

    visible, measured = os.environ.get("CUDA_VISIBLE_DEVICES"), calibration_folder(os.environ)
    parsed = parse_cluster(cluster, visible_devices=visible, calibrations=measured)
    if not isinstance(module, nn.Module):
        name = module if isinstance(module, str) else "NAME"
        raise UserError("M033.not-nn-module", where="trimaran.plan", module=module, name=name)
    if not inputs and not hasattr(getattr(module, "config", None), "to_dict"):
        raise UserError("M031.no-example-inputs", where="trimaran.plan")
    first = inputs[0] if inputs else None
    is_tokens = getattr(first, "ndim", 0) == 2 and not first.is_floating_point()  # type: ignore[union-attr]
    usual = max(MIN_SEQ_LEN, first.shape[1]) if is_tokens else MIN_SEQ_LEN  # type: ignore[union-attr]
    length = usual if seq_len is None else seq_len
    batch = parsed.world_size if global_batch is None else global_batch
    settings = [f"cluster={cluster}", f"data.seq_len={length}", f"train.global_batch={batch}"]
    recipe = parse_recipe("", name="trimaran.plan", overrides=settings)
    recipe = recipe.model_copy(update={"plan": pins or "auto"})
    outline = outline_from_module(module, *inputs)
    if not outline.trained_parameters or not outline.training_flops(length):
        raise UserError("M032.nothing-train", where="trimaran.plan", outline=outline.name)
    # Any framework may run the plan, so the limits of our own trainer do not apply.
    return search(Question(recipe=recipe, spec=None, outline=outline, cluster=parsed, goal=goal, for_trainer=False))
