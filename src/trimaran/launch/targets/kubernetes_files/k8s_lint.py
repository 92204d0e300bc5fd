"""Finds mistakes in Kubernetes manifests of training jobs: those that make a job wait forever, or lose its work."""

import ipaddress
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trimaran.core import UserError
from trimaran.launch.targets.kubernetes_files.k8s_workloads import (
    Container,
    Workload,
    find_workloads,
    flat_documents,
    gpu_names,
    listed,
    mapping,
    name_of,
    number,
    within,
)
from trimaran.launch.targets.site_variables import SECRET_NAME

MIN_GRACE_SECONDS = 30
INDEX = re.compile(r"JOB_COMPLETION_INDEX|batch\.kubernetes\.io/job-completion-index")
SECRET_VALUE = re.compile(r"\b(hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|AKIA[0-9A-Z]{16}|"
                          r"xox[abp]-[A-Za-z0-9-]{10,})")  # fmt: skip
Found = Iterator[UserError]


def lint_manifest(documents: Sequence[Any]) -> list[UserError]:
    """Return what is wrong with the objects of a manifest, in its order; where is a path in the YAML."""
    trees = flat_documents(documents)
    return [
        error
        for workload in find_workloads(trees)
        for rule in RULES
        for error in rule(workload, trees)
        if not (workload.partial and rule in NEEDS_WHOLE_POD)
    ]


def _error(code: str, what: str, workload: Workload, path: str, fix: str) -> UserError:
    where = path if ": " in path else f"{workload.kind}/{workload.name}: {path}"
    return UserError(code, what, where=where, fix=fix)


def _trainers(workload: Workload) -> list[Container]:
    return [each for each in workload.containers if each.is_trainer]


def num_nodes_rule(workload: Workload, _: Sequence[Any]) -> Found:
    """As many pods as the launcher waits for."""
    for container in _trainers(workload):
        asked = container.value_of("nnodes", "PET_NNODES", "num_machines", "num_nodes", "nodes")
        if not (bounds := _bounds(asked, container.value_of("min_nodes"))) or workload.pods is None:
            continue
        if not bounds[0] <= workload.pods <= bounds[1]:
            what = f"the Job runs {workload.pods} pods, but the command waits for {asked} nodes"
            fix = f"set it to {bounds[1]}, or the number of nodes in the command to {workload.pods}"
            yield _error("L045", what, workload, workload.pods_path, fix)


def _bounds(asked: str, least: str) -> tuple[int, int] | None:
    """Return the fewest and the most nodes of `2`, of `1:4`, or of `4` with a `least`; None if it is not a number."""
    if not (found := re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", asked)):
        return None
    first, last = int(found[1]), int(found[2] or found[1])
    return min(first, int(least)) if re.fullmatch(r"\d{1,9}", least) else first, last


def index_rule(workload: Workload, _: Sequence[Any]) -> Found:
    """Pods have the index that they read."""
    texts = [text for each in workload.all_containers for text in (*each.words, *map(str, listed(each.tree, "env")))]
    if not workload.is_indexed and any(INDEX.search(text) for text in texts):
        where = f"{workload.pod_path.removesuffix('.template.spec')}.completionMode"
        fix = "set completionMode: Indexed, and completions to the number of pods"
        yield _error("L046", "the pods read their completion index, but the Job gives them none", workload, where, fix)


def service_rule(workload: Workload, trees: Sequence[Any]) -> Found:
    """The name of the first pod can be resolved: a headless Service, and the pods' subdomain."""
    if workload.has_dns:
        return
    services = {name_of(each): each for each in trees if each.get("kind") == "Service"}
    for container in _trainers(workload):
        host = _master(container)
        name = _service_of(host, services)
        if not name:
            continue
        service = services.get(name)
        if service is None:
            what = f"no headless Service '{name}' gives '{host}' an address"
            fix = f"add a Service '{name}' with clusterIP: None that selects the pods, and subdomain: {name}"
        elif within(service, "spec", "clusterIP") != "None":
            what = f"the Service '{name}' is not headless: '{host}' leads to any pod, not to the first"
            fix = "set clusterIP: None, and publishNotReadyAddresses: true"
        elif host.partition(".")[0] != name and within(workload.pod, "subdomain") != name:
            what = f"'{host}' has no address: the pods are not in the subdomain '{name}'"
            fix = f"set subdomain: {name} in the pod template"
        else:
            continue
        yield _error("L047", what, workload, _master_path(container), fix)


def _master(container: Container) -> str:
    """Return the host of rank 0 as the command or the environment names it."""
    value = container.value_of("rdzv_endpoint", "PET_RDZV_ENDPOINT", "master_addr", "MASTER_ADDR", "PET_MASTER_ADDR")
    known = {name: text for name, text, _ in container.variables}
    value = re.sub(r"\$[({]?(\w+)[)}]?", lambda found: known.get(found[1], found[0]), value)
    return value.rpartition(":")[0] if re.search(r":\d+$", value) else value


def _master_path(container: Container) -> str:
    names = ("MASTER_ADDR", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT")
    return next((path for name, value, path in container.variables if name in names and value), container.path)


def _service_of(host: str, services: Sequence[str] | dict[str, Any]) -> str:
    """Return the Service that a host name needs; "" if it is an address, or a name outside of the cluster."""
    if not host or "$" in host or host == "localhost" or _is_address(host):
        return ""
    parts = host.split(".")
    if len(parts) == 1 or parts[2:3] == ["svc"]:
        return parts[0]
    if len(parts) == 2 or parts[3:4] == ["svc"]:
        return parts[0] if parts[0] in services else parts[1]
    return ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def shared_memory_rule(workload: Workload, _: Sequence[Any]) -> Found:
    """/dev/shm is larger than the 64 MB that container runtimes give."""
    if workload.pod.get("hostIPC") is True:
        return
    for container in _trainers(workload):
        places = {str(within(each, "mountPath")).rstrip("/") for each in listed(container.tree, "volumeMounts")}
        if "/dev/shm" not in places:
            yield _error(
                "L048",
                "/dev/shm has 64 MB: NCCL and the workers of a DataLoader end with a bus error",
                workload,
                f"{container.path}.volumeMounts",
                "mount a volume at /dev/shm: emptyDir: {medium: Memory, sizeLimit: 16Gi}",
            )


def restart_rule(workload: Workload, _: Sequence[Any]) -> Found:
    """Containers of a group do not restart alone."""
    several = workload.pods is None or workload.pods > 1
    if workload.restart_policy in ("OnFailure", "Always") and several and _trainers(workload):
        is_default = "restartPolicy" not in workload.pod and workload.kind in ("JobSet", "TrainJob")
        yield _error(
            "L049",
            f"restartPolicy is {workload.restart_policy}{' by default' if is_default else ''}: a container restarts "
            "alone, and the other ranks do not know it",
            workload,
            f"{workload.pod_path}.restartPolicy",
            "set restartPolicy: Never, and let the Job replace pods (backoffLimit, podFailurePolicy)",
        )


def grace_rule(workload: Workload, _: Sequence[Any]) -> Found:
    """There is time for a checkpoint when a pod is evicted."""
    seconds = number(workload.pod, "terminationGracePeriodSeconds")
    if seconds is not None and seconds < MIN_GRACE_SECONDS and _trainers(workload):
        yield _error(
            "L050",
            f"a pod is killed {seconds} s after it was asked to stop: too short for a checkpoint",
            workload,
            f"{workload.pod_path}.terminationGracePeriodSeconds",
            "set it above the time that a checkpoint takes, and not below 30",
        )


def liveness_rule(workload: Workload, _: Sequence[Any]) -> Found:
    """No probe kills ranks that are only busy."""
    for container in _trainers(workload):
        if container.tree.get("livenessProbe") is not None:
            yield _error(
                "L051",
                "a liveness probe kills ranks that hold the interpreter's lock or wait in a collective",
                workload,
                f"{container.path}.livenessProbe",
                "remove it; the launcher detects ranks that hang",
            )


def gpu_rule(workload: Workload, _: Sequence[Any]) -> Found:
    """GPUs cannot be shared: requests equal limits."""
    for container in workload.containers:
        requests, limits = (mapping(container.tree, "resources", each) for each in ("requests", "limits"))
        for name in gpu_names(container.tree):
            asked, limit = requests.get(name, limits.get(name)), limits.get(name)
            if str(asked) != str(limit):
                shown = "no limit" if limit is None else f"a limit of {limit}"
                yield _error("L052", f"{name} has a request of {asked} and {shown}; the API server refuses this",
                             workload, f"{container.path}.resources", f"set the limit of {name} only, or both equal"
                             )  # fmt: skip


def rendezvous_rule(workload: Workload, _: Sequence[Any]) -> Found:
    """A rendezvous has an id of its own."""
    for container in _trainers(workload):
        backend = container.value_of("rdzv_backend", "PET_RDZV_BACKEND")
        named = container.value_of("rdzv_id", "PET_RDZV_ID")
        if backend not in ("", "static") and named in ("", "none"):
            yield _error("L053", "the rendezvous has torchrun's default id: two jobs at one endpoint would join",
                         workload, container.path, "add --rdzv-id with the name of the job")  # fmt: skip


def secret_rule(workload: Workload, _: Sequence[Any]) -> Found:
    """No secret is in the manifest itself. The message does not repeat it."""
    fix = "put it into a Secret, and refer to it: valueFrom: {secretKeyRef: {name: ..., key: ...}}"
    for container in workload.all_containers:
        for name, value, path in container.variables:
            if value and not value.startswith("$(") and (SECRET_NAME.search(name) or SECRET_VALUE.search(value)):
                what = f"the value of {name} is in the manifest, where everyone who may list pods can read it"
                yield _error("L054", what, workload, path, fix)
        if any(SECRET_VALUE.search(word) for word in container.words):
            what = "the command contains a token, where everyone who may list pods can read it"
            yield _error("L054", what, workload, f"{container.path}.command", fix)


def host_rule(workload: Workload, _: Sequence[Any]) -> Found:
    """Pods do not have the privileges of their node."""
    fix = "remove it; for RDMA a device plugin and the capability IPC_LOCK are enough"
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if workload.pod.get(name) is True:
            what = f"{name}: the pods share this with their node and with all other pods that do"
            yield _error("L055", what, workload, f"{workload.pod_path}.{name}", fix)
    for container in workload.all_containers:
        if within(container.tree, "securityContext", "privileged") is True:
            where = f"{container.path}.securityContext.privileged"
            yield _error("L055", "the container is privileged: it is root on its node", workload, where, fix)


def image_rule(workload: Workload, _: Sequence[Any]) -> Found:
    """Pods that are replaced get the same image."""
    for container in workload.all_containers:
        image = container.tree.get("image")
        if isinstance(image, str) and image and "@" not in image:
            tag = image.rpartition("/")[2].partition(":")[2]
            if tag in ("", "latest"):
                yield _error("L056", f"the image '{image}' has no fixed version: a replaced pod may get another",
                             workload, f"{container.path}.image", "name a tag other than latest, or a digest"
                             )  # fmt: skip


RULES: tuple[Callable[[Workload, Sequence[Any]], Found], ...] = (
    num_nodes_rule,
    index_rule,
    service_rule,
    shared_memory_rule,
    restart_rule,
    grace_rule,
    liveness_rule,
    gpu_rule,
    rendezvous_rule,
    secret_rule,
    host_rule,
    image_rule,
)
NEEDS_WHOLE_POD = {shared_memory_rule, restart_rule}
