"""Launch requests for tests of Kubernetes manifests."""

from functools import cache
from pathlib import Path
from typing import Any

from trimaran.core import Plan, Recipe, Seconds, parse_recipe
from trimaran.launch import KubernetesSite, LaunchRequest
from trimaran.machine import Cluster, parse_cluster
from trimaran.models import spec_of
from trimaran.planner import choose

TINY = ("model.preset=tiny", "data.seq_len=32", "train.global_batch=8", "train.sample.tokens=0",
        "train.evaluate.batches=0")  # fmt: skip


def launch_request(
    *settings: str, cluster: str = "2x2xcpu", name: str = "first", run_dir: str = "", **site: Any
) -> LaunchRequest:
    """Return the request of a small run; `site` are fields of the site's section."""
    recipe, machines, plan = _planned(cluster, settings)
    fields = {"image": "registry.example/trimaran:1.0", "kind": "job", **site}
    return LaunchRequest(
        name=name,
        run_dir=Path(run_dir or f"/runs/{name}"),
        recipe=recipe,
        plan=plan,
        cluster=machines,
        site=KubernetesSite.model_validate(fields),
        run_exists=False,
        save_seconds=Seconds(20.0),
        secrets=("HF_TOKEN",),
    )


@cache
def _planned(cluster: str, settings: tuple[str, ...]) -> tuple[Recipe, Cluster, Plan]:
    recipe = parse_recipe("", name="test", overrides=[*TINY, f"cluster={cluster}", *settings])
    machines = parse_cluster(recipe.cluster)
    return recipe, machines, choose(recipe, spec_of(recipe.model), machines)
