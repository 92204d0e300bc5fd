"""Finds the pods that a manifest starts: how many, by which job, and where their template is in the YAML.

Manifests are anybody's, so nothing is assumed about them: what is missing, or has another type, reads as None.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

TRAINER = re.compile(r"\b(torchrun|torch\.distributed|torch\.multiprocessing|accelerate|deepspeed|trimaran|mpirun)\b")
STEP_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"
WORD = re.compile(r"[^\s;&|]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One container of a pod. `path` is where it is in the YAML of its object."""

    tree: dict[str, Any]
    path: str

    @property
    def words(self) -> list[str]:
        """Command and arguments; those of a shell script are split into words."""
        texts = [str(each) for name in ("command", "args") for each in listed(self.tree, name)]
        return [word for text in texts for word in _split(text)]

    @property
    def variables(self) -> list[tuple[str, str, str]]:
        """Name, literal value and path of each variable; the value is "" if it is a reference."""
        found = [(index, each) for index, each in enumerate(listed(self.tree, "env")) if isinstance(each, dict)]
        return [
            (str(each.get("name") or ""), str(each.get("value") or ""), f"{self.path}.env[{index}]")
            for index, each in found
        ]

    def value_of(self, *names: str) -> str:
        """Return the value of the first option or variable with one of these names; "" if there is none.

        Options are named without hyphens in front, with underscores; torchrun takes both spellings.
        """
        words = self.words
        for at, word in enumerate(words):
            option, separator, value = word.partition("=")
            if word.startswith("-") and option.lstrip("-").replace("-", "_") in names:
                return value if separator else words[at + 1] if at + 1 < len(words) else ""
        return next((value for name, value, _ in self.variables if name in names and value), "")

    @property
    def is_trainer(self) -> bool:
        """Whether it starts ranks: it has a GPU, or a launcher in its command."""
        return bool(gpu_names(self.tree)) or any(TRAINER.search(word) for word in self.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The pods of one job. `pods` is None if their number is not in the manifest.

    `partial`: a part of the pod is in a runtime that the manifest does not contain. `has_dns`: the controller gives the
    pods names. `is_indexed`: it gives them an index. `restart_policy` is the one that results from defaults.
    """

    kind: str
    name: str
    spec: dict[str, Any]
    pod: dict[str, Any]
    pod_path: str
    pods: int | None = None
    pods_path: str = ""
    partial: bool = False
    has_dns: bool = False
    is_indexed: bool = False
    restart_policy: str = ""

    @property
    def containers(self) -> list[Container]:
        return self._containers("containers")

    @property
    def all_containers(self) -> list[Container]:
        return [*self._containers("initContainers"), *self.containers]

    def _containers(self, name: str) -> list[Container]:
        found = enumerate(listed(self.pod, name))
        return [
            Container(tree=each, path=f"{self.pod_path}.{name}[{at}]") for at, each in found if isinstance(each, dict)
        ]


def within(tree: Any, *path: str | int) -> Any:
    """Return the value at a path; None if there is nothing."""
    for step in path:
        if isinstance(step, int):
            tree = tree[step] if isinstance(tree, list) and step < len(tree) else None
        else:
            tree = tree.get(step) if isinstance(tree, dict) else None
    return tree


def mapping(tree: Any, *path: str | int) -> dict[str, Any]:
    """Return the mapping at a path; empty if there is none."""
    found = within(tree, *path)
    return found if isinstance(found, dict) else {}


def listed(tree: Any, *path: str | int) -> list[Any]:
    """Return the list at a path; empty if there is none."""
    found = within(tree, *path)
    return found if isinstance(found, list) else []


def number(tree: Any, *path: str | int) -> int | None:
    """Return the integer at a path; None if there is none."""
    found = within(tree, *path)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def gpu_names(container: dict[str, Any]) -> list[str]:
    """Return the resource names of GPUs that a container requests or is limited to."""
    found = [*mapping(container, "resources", "requests"), *mapping(container, "resources", "limits")]
    is_gpu = re.compile(r".+/(gpu|mig-.*|gpu\..*)$")
    return sorted({str(name) for name in found if is_gpu.match(str(name))})


def flat_documents(documents: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the objects of a manifest, those of lists one by one."""
    found = [each for each in documents if isinstance(each, dict)]
    return [
        item
        for each in found
        for item in (listed(each, "items") if each.get("kind") == "List" else [each])
        if isinstance(item, dict)
    ]


def find_workloads(documents: Sequence[Any]) -> list[Workload]:
    """Return the workloads of a manifest, in its order."""
    trees = flat_documents(documents)
    found: list[Workload] = []
    for tree in trees:
        match tree.get("kind"):
            case "Job":
                found.append(_job(tree, mapping(tree, "spec"), "spec"))
            case "CronJob":
                found.append(_job(tree, mapping(tree, "spec", "jobTemplate", "spec"), "spec.jobTemplate.spec"))
            case "Pod":
                policy = str(within(tree, "spec", "restartPolicy") or "Always")
                pod = mapping(tree, "spec")
                found.append(Workload(kind="Pod", name=name_of(tree), spec={}, pod=pod, pod_path="spec", pods=1,
                                      restart_policy=policy))  # fmt: skip
            case "JobSet":
                found += _job_set(tree)
            case "PyTorchJob":
                found += _pytorch_job(tree)
            case "TrainJob":
                found += _train_job(tree, trees)
    return found


def name_of(tree: dict[str, Any]) -> str:
    """Return the name of an object."""
    return str(within(tree, "metadata", "name") or within(tree, "metadata", "generateName") or "")


def _job(tree: dict[str, Any], spec: dict[str, Any], path: str) -> Workload:
    pods = number(spec, "parallelism")
    return Workload(
        kind=str(tree.get("kind")),
        name=name_of(tree),
        spec=spec,
        pod=mapping(spec, "template", "spec"),
        pod_path=f"{path}.template.spec",
        pods=1 if pods is None and "parallelism" not in spec else pods,
        pods_path=f"{path}.parallelism",
        is_indexed=spec.get("completionMode") == "Indexed",
        restart_policy=str(within(spec, "template", "spec", "restartPolicy") or ""),
    )


def _job_set(tree: dict[str, Any], path: str = "spec") -> Iterator[Workload]:
    """Yield the workload of each replicated job. A JobSet's jobs are indexed, and restart containers by default."""
    has_dns = within(tree, "spec", "network", "enableDNSHostnames") is not False
    for at, each in enumerate(listed(tree, "spec", "replicatedJobs")):
        spec, replicas = mapping(each, "template", "spec"), within(each, "replicas")
        per_job = number(spec, "parallelism") or 1
        here = f"{path}.replicatedJobs[{at}].template.spec"
        yield Workload(
            kind=str(tree.get("kind")),
            name=name_of(tree),
            spec=spec,
            pod=mapping(spec, "template", "spec"),
            pod_path=f"{here}.template.spec",
            pods=per_job * (replicas if isinstance(replicas, int) else 1),
            pods_path=f"{here}.parallelism",
            has_dns=has_dns,
            is_indexed=spec.get("completionMode", "Indexed") == "Indexed",
            restart_policy=str(within(spec, "template", "spec", "restartPolicy") or "OnFailure"),
        )


def _pytorch_job(tree: dict[str, Any]) -> Iterator[Workload]:
    """Yield the workloads of master and workers; each knows the number of pods of both."""
    replicas = mapping(tree, "spec", "pytorchReplicaSpecs")
    counts = [number(each, "replicas") for each in replicas.values()]
    pods = sum(1 if count is None else count for count in counts)
    for name, each in replicas.items():
        path = f"spec.pytorchReplicaSpecs.{name}"
        yield Workload(
            kind="PyTorchJob",
            name=name_of(tree),
            spec=mapping(each),
            pod=mapping(each, "template", "spec"),
            pod_path=f"{path}.template.spec",
            pods=pods,
            pods_path=f"{path}.replicas",
            has_dns=True,
            is_indexed=True,
            restart_policy=str(within(each, "restartPolicy") or "Never"),
        )


def _train_job(tree: dict[str, Any], trees: Sequence[dict[str, Any]]) -> Iterator[Workload]:
    """Yield the workload of a TrainJob: the runtime's, if the manifest contains it, with what the TrainJob sets."""
    trainer, wanted = mapping(tree, "spec", "trainer"), within(tree, "spec", "runtimeRef", "name")
    node = {name: trainer[name] for name in ("image", "command", "args", "env") if name in trainer}
    node |= {"resources": trainer["resourcesPerNode"]} if "resourcesPerNode" in trainer else {}
    pods = number(trainer, "numNodes")
    runtime = next((each for each in trees if str(each.get("kind", "")).endswith("TrainingRuntime")
                    and name_of(each) == wanted), None)  # fmt: skip
    if runtime is None:
        yield Workload(kind="TrainJob", name=name_of(tree), spec={}, pod={"containers": [{"name": "node", **node}]},
                       pod_path="spec.trainer", pods=pods, pods_path="spec.trainer.numNodes", partial=True,
                       has_dns=True, is_indexed=True, restart_policy="Never")  # fmt: skip
        return
    pods = number(runtime, "spec", "mlPolicy", "numNodes") if pods is None else pods
    template = {
        "kind": "TrainJob",
        "metadata": tree.get("metadata"),
        "spec": within(runtime, "spec", "template", "spec"),
    }
    where = f"{runtime.get('kind')}/{wanted}: spec.template.spec"
    for at, each in enumerate(_job_set(template, where)):
        step = within(template, "spec", "replicatedJobs", at, "template", "metadata", "labels", STEP_LABEL)
        if step != "trainer":
            yield each
            continue
        containers = [
            _merged(inner.tree, node) if inner.tree.get("name") == "node" else inner.tree for inner in each.containers
        ]
        spec = each.spec | {"parallelism": pods, "completions": pods}
        yield Workload(kind="TrainJob", name=name_of(tree), spec=spec, pod=each.pod | {"containers": containers},
                       pod_path=each.pod_path, pods=pods, pods_path="spec.trainer.numNodes", has_dns=each.has_dns,
                       is_indexed=True, restart_policy=each.restart_policy)  # fmt: skip


def _merged(container: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    """Return the runtime's container with what a TrainJob sets; variables are merged by name."""
    ours = {str(within(each, "name")): each for each in listed(node, "env")}
    kept = [each for each in listed(container, "env") if str(within(each, "name")) not in ours]
    return container | node | ({"env": [*kept, *ours.values()]} if ours or kept else {})


def _split(text: str) -> list[str]:
    """Return the words of a text; a shell script has several, an argument with spaces too, which is harmless here."""
    if not re.search(r"\s", text):
        return [text]
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError:
        return WORD.findall(text)
