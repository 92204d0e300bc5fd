"""Launch requests for tests of Kubernetes manifests."""

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The job of a manifest: the spec of its Job (of a TrainJob that names a runtime there is none) and of its pods."""

    kind: str
    name: str
    spec: dict[str, Any]
    pod: dict[str, Any]
    pods: int


def workload_of(documents: Sequence[dict[str, Any]]) -> Workload:
    """Return the job that a manifest of ours starts; a TrainJob sets a part of the pods of its runtime."""
    (job,) = [each for each in documents if each["kind"] in ("TrainJob", "JobSet", "Job")]
    spec = job["spec"]
    runtimes = [each for each in documents if each["kind"] == "TrainingRuntime"]
    if job["kind"] == "TrainJob" and not runtimes:
        node = spec["trainer"] | {"name": "node"}
        return Workload(kind="TrainJob", name=job["metadata"]["name"], spec={}, pod={"containers": [_own(node)]},
                        pods=spec["trainer"]["numNodes"])  # fmt: skip
    owner = runtimes[0]["spec"]["template"]["spec"] if runtimes else spec
    if job["kind"] != "Job":
        (replicated,) = owner["replicatedJobs"]
        spec = replicated["template"]["spec"]
    pod = spec["template"]["spec"]
    if runtimes:
        trainer = job["spec"]["trainer"]
        spec = spec | {"parallelism": trainer["numNodes"], "completions": trainer["numNodes"]}
        pod = pod | {"containers": [each | _own(trainer) for each in pod["containers"]]}
    return Workload(kind=job["kind"], name=job["metadata"]["name"], spec=spec, pod=pod, pods=spec["parallelism"])


def _own(trainer: dict[str, Any]) -> dict[str, Any]:
    """Return what the trainer of a TrainJob says about the container."""
    known = {name: trainer[name] for name in ("name", "image", "command", "env") if name in trainer}
    return known | {"resources": trainer["resourcesPerNode"]}


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
