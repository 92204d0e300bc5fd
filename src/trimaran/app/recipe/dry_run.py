"""What `train --dry-run` checks beyond the plan: that the ranks of the plan can be built."""

from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from trimaran.app.recipe.request import Request
from trimaran.core.engine_rules import refuse_missing_packages
from trimaran.data.feature_cache import refuse_trained_tower
from trimaran.models import decoder_of, model_folder, spec_to_hf, weight_files

NO_TORCH = "torch is not installed here"


def refuse_before_start(request: Request) -> None:
    """Raise now what a rank would find minutes later and what does not depend on the machine."""
    refuse_missing_packages(request.plan)
    if request.recipe.data.samples.cache_features:
        refuse_trained_tower(request.recipe)
    if folder := request.recipe.model.path:
        weight_files(model_folder(folder))
    if request.recipe.train.save and (decoder := decoder_of(request.spec)) is not None:
        spec_to_hf(decoder)


def check_ranks(request: Request) -> dict[str, Any]:
    """Build ranks of the plan without weights, and return which, for `--json`. Raises what `train` would raise."""
    refuse_before_start(request)
    if find_spec("torch") is None:
        return {"ranks": [], "world_size": request.plan.mesh.world_size, "seconds": 0.0, "not_built": NO_TORCH}
    from trimaran.train.fake_ranks import check_build  # imports torch: seconds

    found = asdict(check_build(request.recipe, request.plan))
    return found | {"ranks": list(found["ranks"])}


def show_check(check: dict[str, Any]) -> str:
    """Return the line of `--dry-run` about the ranks that were built."""
    ranks, world_size = check["ranks"], check["world_size"]
    if not ranks:
        return f"not built: {check['not_built']}; only the plan is checked"
    names = " and ".join(f"rank {rank:,}" for rank in ranks)
    return f"built {names} of {world_size:,} without weights in {check['seconds']:.1f} s: the model accepts this plan"
