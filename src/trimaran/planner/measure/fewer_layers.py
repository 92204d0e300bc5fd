"""A model with fewer layers, and what its measurements say about the whole one. Imports no torch.

Everything that a rank needs is what its layers need, in proportion, and what does not depend on their number. Two
sizes give both. The peak is the largest of several moments of a step; the extrapolation holds if it is the same moment
for both sizes and for the whole model.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from trimaran.core import Plan, Recipe, UserError
from trimaran.models import Spec, decoder_of, model_folder
from trimaran.planner.measure.rank_task import MeasuredRank


def refuse_fewer_layers(recipe: Recipe, spec: Spec | None, plan: Plan, layers: int) -> None:
    """Raise unless the model can be rehearsed with so many layers in a stage, and with twice as many."""
    where, fix = "--layers", "rehearse the whole rank: leave out --layers"
    decoder = None if recipe.model.kind.is_hf else decoder_of(spec)
    if decoder is None:
        raise UserError("P091", "only a decoder can be rehearsed with fewer layers", where=where, fix=fix)
    if decoder.prediction_layers:
        raise UserError("P091", "a decoder with multi-token prediction cannot be rehearsed with fewer layers: its "
                        "stages differ", where=where, fix=fix)  # fmt: skip
    most = decoder.layers // plan.num_stages // 2
    if layers > most:
        least = f"name at most {most}, or leave out --layers" if most else fix
        raise UserError("P091", f"{layers} and {2 * layers} layers in a stage are not fewer than the "
                        f"{decoder.layers / plan.num_stages:g} of the model", where=where, fix=least)  # fmt: skip
    every = plan.recompute if isinstance(plan.recompute, int) else 1
    if layers % every:
        raise UserError("P091", f"every {every}. layer is recomputed, and {layers} is not a multiple", where=where,
                        fix=f"name a multiple of {every}")  # fmt: skip


def with_layers(recipe: Recipe, plan: Plan, layers: int, folder: Path) -> tuple[Recipe, Plan]:
    """Return the recipe and the plan with `layers` layers in every stage.

    Weights on disk have all layers, so a model with a path gets random ones: a copy of its config.json in `folder`.
    """
    model, data = recipe.model, recipe.data
    if model.path is not None:
        source = model_folder(model.path)
        shutil.copyfile(source / "config.json", folder / "config.json")
        data = data.model_copy(update={"tokenizer": data.tokenizer or str(source)})
        model = model.model_copy(update={"path": str(folder)})
    shape = model.shape | {"layers": layers * plan.num_stages}
    recipe = recipe.model_copy(update={"model": model.model_copy(update={"shape": shape}), "data": data})
    if plan.mesh.pp > 1:
        stages = plan.pipeline.model_copy(update={"stages": (layers,) * plan.num_stages})
        plan = plan.model_copy(update={"pipeline": stages})
    return recipe, plan


def extrapolated(
    small: MeasuredRank, large: MeasuredRank, layers: int, stage_layers: Mapping[int, int]
) -> MeasuredRank:
    """Return what a rank needs from measurements with `layers` and twice as many layers in each of its stages.

    `stage_layers` are the layers of its stages in the whole model.
    """
    whole = sum(stage_layers.values()) / len(stage_layers)

    def line(first: float, second: float, wanted: float = whole) -> float:
        return first + (second - first) * (wanted - layers) / layers

    return MeasuredRank(
        peak_bytes=int(line(small.peak_bytes, large.peak_bytes)),
        steady_peak_bytes=int(line(small.steady_peak_bytes, large.steady_peak_bytes)),
        reserved_bytes=int(line(small.reserved_bytes, large.reserved_bytes)),
        step_seconds=line(small.step_seconds, large.step_seconds),
        all_seconds=[],
        phases={name: line(small.phases[name], large.phases[name]) for name in small.phases},
        stages={
            stage: {kind: line(seconds, large.stages[stage][kind], stage_layers[stage])
                    for kind, seconds in kinds.items()}
            for stage, kinds in small.stages.items()
        },
        passes=small.passes,
        losses=large.losses,
        num_refused=small.num_refused + large.num_refused,
        build_seconds=small.build_seconds + large.build_seconds,
    )  # fmt: skip
