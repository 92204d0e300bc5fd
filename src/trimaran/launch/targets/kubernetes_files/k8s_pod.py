"""The pod of one node: the supervisor in a container without privileges, its volumes and its limits."""

import math
from typing import Any

from trimaran.launch.targets.kubernetes_files.k8s_site import KubernetesSite
from trimaran.launch.targets.node_command import node_command
from trimaran.launch.targets.target import LaunchRequest, job_name

CONTAINER = "node"  # the name that Kubeflow's runtimes require
LAUNCH_FOLDER = "/etc/trimaran/launch"
LAUNCH_FILES = ("recipe.yaml", "plan.json")
INSTANCE = "app.kubernetes.io/instance"
MIN_GRACE_SECONDS = 60
STOP_SECONDS = 30  # to agree on the last step, and to end the processes afterwards
CORES_PER_GPU = 4  # a rank, its loaders and a part of the supervisor


def labels(request: LaunchRequest) -> dict[str, str]:
    """Return the labels of every object of the job; `INSTANCE` alone selects its pods."""
    return {
        "app.kubernetes.io/name": "trimaran",
        INSTANCE: job_name(request.name),
        "app.kubernetes.io/managed-by": "trimaran",
    }


def selector(request: LaunchRequest) -> dict[str, Any]:
    """Return the selector of the job's pods."""
    return {"matchLabels": {INSTANCE: job_name(request.name)}}


def recipe_map_name(request: LaunchRequest) -> str:
    """Return the name of the ConfigMap with recipe and plan."""
    return f"{job_name(request.name)}-recipe"


def grace_seconds(request: LaunchRequest) -> int:
    """Return how long a pod may take to stop: two saves and two steps, and time to agree on it and to exit.

    The prediction of a save may be wrong by a factor of two; a pod that is killed during one loses it.
    """
    step_seconds = request.plan.prediction.step_seconds if request.plan.prediction else 0.0
    return max(MIN_GRACE_SECONDS, math.ceil(STOP_SECONDS + 2 * (request.save_seconds + step_seconds)))


def literal(text: str) -> str:
    """Return a text of a command or a variable such that Kubernetes does not expand `$(NAME)` in it."""
    return text.replace("$", "$$")


def command(request: LaunchRequest) -> list[str]:
    """Return the command of the container, the same in all pods."""
    words = node_command(request, python=request.site.python, launch_folder=LAUNCH_FOLDER)
    return [literal(word) for word in words]


def environment(request: LaunchRequest) -> list[dict[str, Any]]:
    """Return the environment of the container. Secrets are references, and may be missing."""
    site: KubernetesSite = request.site
    # The root file system is read-only, and the user may not be in the image's /etc/passwd.
    own = {"HOME": "/tmp", "USER": "trimaran", "XDG_CACHE_HOME": f"{site.runs.rstrip('/')}/.cache"}
    found: list[dict[str, Any]] = [{"name": name, "value": literal(each)} for name, each in (own | site.env).items()]
    for name in sorted(set(request.secrets) - site.env.keys()) if site.secret else []:
        reference = {"name": site.secret, "key": name, "optional": True}
        found.append({"name": name, "valueFrom": {"secretKeyRef": reference}})
    return found


def resources(request: LaunchRequest) -> dict[str, Any]:
    """Return the resources of a pod. What cannot be shared has equal requests and limits."""
    site, ranks, on_cpu = request.site, request.ranks_per_node, request.cluster.device.traits.shares_cores
    limits = {} if on_cpu else {site.gpu: str(ranks)}
    limits |= {site.rdma: "1"} if site.rdma else {}
    limits |= {"memory": site.memory} if site.memory else {}
    cpu = site.cpu or str(ranks * (1 if on_cpu else CORES_PER_GPU))
    return {"requests": {"cpu": cpu, **limits}, **({"limits": limits} if limits else {})}


def volumes(request: LaunchRequest) -> list[dict[str, Any]]:
    """Return the volumes of a pod."""
    return [
        {"name": "runs", "persistentVolumeClaim": {"claimName": request.site.volume_claim}},
        {"name": "launch", "configMap": {"name": recipe_map_name(request)}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": request.site.shm}},
        {"name": "tmp", "emptyDir": {}},
    ]


def volume_mounts(request: LaunchRequest) -> list[dict[str, Any]]:
    """Return where the container has its volumes.

    Recipe and plan are mounted one by one: in a mounted ConfigMap they would be links, which no file of a run is.
    """
    files = [
        {"name": "launch", "mountPath": f"{LAUNCH_FOLDER}/{file}", "subPath": file, "readOnly": True}
        for file in LAUNCH_FILES
    ]
    places = {"runs": request.site.runs, "shm": "/dev/shm", "tmp": "/tmp"}
    return [*({"name": name, "mountPath": path} for name, path in places.items()), *files]


def pod_security(request: LaunchRequest) -> dict[str, Any]:
    """Return the security context of the pod: a user who is not root, and the runtime's filter of system calls."""
    user = request.site.user
    ids = {"runAsUser": user, "runAsGroup": user, "fsGroup": user, "fsGroupChangePolicy": "OnRootMismatch"}
    return {"runAsNonRoot": True, **ids, "seccompProfile": {"type": "RuntimeDefault"}}


def container_security(request: LaunchRequest) -> dict[str, Any]:
    """Return the security context of the container. RDMA locks the memory that it registers."""
    capabilities: dict[str, Any] = {"drop": ["ALL"]} | ({"add": ["IPC_LOCK"]} if request.site.rdma else {})
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": capabilities}


def container(request: LaunchRequest) -> dict[str, Any]:
    """Return the container. It has no liveness probe: a rank that holds the interpreter's lock is not dead."""
    tree: dict[str, Any] = {"name": CONTAINER, "image": request.site.image, "command": command(request)}
    tree |= {"env": environment(request), "resources": resources(request)}
    if has_metrics(request):
        port = request.recipe.telemetry.prometheus.port
        tree["ports"] = [{"name": "metrics", "containerPort": port, "protocol": "TCP"}]
    return tree | {"securityContext": container_security(request), "volumeMounts": volume_mounts(request)}


def has_metrics(request: LaunchRequest) -> bool:
    """Return whether the run serves metrics that other pods can read."""
    return request.recipe.telemetry.prometheus.port > 0


def placement(request: LaunchRequest) -> dict[str, Any]:
    """Return where pods go: on different nodes, and close to each other, if possible."""
    site, ours = request.site, selector(request)
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    near = {"weight": 100, "podAffinityTerm": {"topologyKey": "topology.kubernetes.io/zone", "labelSelector": ours}}
    tree: dict[str, Any] = {
        "topologySpreadConstraints": [spread | {"labelSelector": ours}],
        "affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [near]}},
    }
    tree |= {"nodeSelector": site.node_selector} if site.node_selector else {}
    tree |= {"tolerations": list(site.tolerations)} if site.tolerations else {}
    tree |= {"priorityClassName": site.priority_class} if site.priority_class else {}
    tree |= {"runtimeClassName": site.runtime_class} if site.runtime_class else {}
    return tree | ({"schedulerName": "volcano"} if site.gang == "volcano" else {})


def pod_metadata(request: LaunchRequest) -> dict[str, Any]:
    """Return the metadata of a pod: labels, and what Kueue and Volcano read from annotations."""
    site, notes = request.site, {}
    if site.uses_kueue and site.topology:
        notes["kueue.x-k8s.io/podset-preferred-topology"] = site.topology
    if site.gang == "volcano" and site.kind != "trainjob":
        notes["scheduling.k8s.io/group-name"] = job_name(request.name)
    return {"labels": labels(request)} | ({"annotations": notes} if notes else {})


def pod_template(request: LaunchRequest) -> dict[str, Any]:
    """Return the template of the job's pods."""
    site = request.site
    spec: dict[str, Any] = {
        "restartPolicy": "Never",  # a container that restarts alone cannot join the ranks that wait for it
        "terminationGracePeriodSeconds": grace_seconds(request),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(request),
    }
    spec |= {"subdomain": job_name(request.name)} if site.kind == "job" else {}
    spec |= {"serviceAccountName": site.service_account} if site.service_account else {}
    spec |= {"imagePullSecrets": [{"name": site.pull_secret}]} if site.pull_secret else {}
    spec |= placement(request)
    return {
        "metadata": pod_metadata(request),
        "spec": spec | {"containers": [container(request)], "volumes": volumes(request)},
    }
