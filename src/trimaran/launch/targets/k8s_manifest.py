"""The manifest of a launch: TrainJob, JobSet or Indexed Job with one pod for each node, and the objects around it.

A pod runs the node's supervisor in a container without privileges, with volumes and limits.
"""

import math
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from trimaran.core import EXIT_AGAIN, EXIT_STUCK, EXIT_USER, dump_recipe
from trimaran.launch.targets.site_file import Variables
from trimaran.launch.targets.target import LaunchRequest, job_name, node_command
from trimaran.runs import dump_plan

LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"  # RFC 1123, as Kubernetes names most objects
SUBDOMAIN = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"

Label = Annotated[str, Field(pattern=LABEL)]
Subdomain = Annotated[str, Field(pattern=SUBDOMAIN)]
OptionalSubdomain = Annotated[str, Field(pattern=rf"{SUBDOMAIN}|^$")]
Quantity = Annotated[str, Field(pattern=rf"{QUANTITY}|^$")]

CONTAINER = "node"  # the name that Kubeflow's runtimes require
LAUNCH_FOLDER = "/etc/trimaran/launch"
LAUNCH_FILES = ("recipe.yaml", "plan.json")
INSTANCE = "app.kubernetes.io/instance"
MIN_GRACE_SECONDS = 60
STOP_SECONDS = 30  # to agree on the last step, and to end the processes afterwards
CORES_PER_GPU = 4  # a rank, its loaders and a part of the supervisor
REPLICATED_JOB = "node"  # the name that Kubeflow's runtimes require, as that of the container
MANAGER = "trimaran.dev/launch"
STEP_LABEL = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
Document = dict[str, Any]


class KubernetesSite(BaseModel):
    """A site's defaults for Kubernetes: its pods, its queue, its storage and its jobs."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    # What each pod asks for and may do.
    gpu: Annotated[str, Field(description="resource name of a GPU")] = "nvidia.com/gpu"
    rdma: Annotated[str, Field(description="RDMA resource per pod, such as rdma/hca; adds IPC_LOCK; empty: none")] = ""
    cpu: Annotated[Quantity, Field(description="CPU cores per pod (4 for each GPU, 1 for each CPU rank)")] = ""
    memory: Annotated[Quantity, Field(description="host memory per pod, request and limit; empty: none")] = ""
    shm: Annotated[Quantity, Field(description="size of /dev/shm")] = "16Gi"
    user: Annotated[int, Field(ge=1, description="user and group id of the processes, not root")] = 1000
    env: Annotated[Variables, Field(description="environment variables, such as NCCL_SOCKET_IFNAME")] = {}
    secret: Annotated[
        OptionalSubdomain, Field(description="Secret with keys such as HF_TOKEN; pods get them by reference")
    ] = "trimaran-secrets"
    pull_secret: Annotated[OptionalSubdomain, Field(description="Secret to pull the image with")] = ""
    service_account: Annotated[OptionalSubdomain, Field(description="service account; its token is not mounted")] = ""
    runtime_class: Annotated[OptionalSubdomain, Field(description="runtimeClassName, such as nvidia")] = ""
    python: Annotated[str, Field(min_length=1, description="the Python of the image")] = "python"

    # Who decides when all pods of a job start together, and on which nodes.
    gang: Annotated[
        Literal["auto", "none", "kueue", "volcano"],
        Field(description="what starts all pods or none; auto: Kueue if a queue is named"),
    ] = "auto"
    queue: Annotated[OptionalSubdomain, Field(description="queue of Kueue or Volcano")] = ""
    topology: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9./_-]*$", description="Kueue: node label within which pods are placed")
    ] = ""
    priority_class: Annotated[OptionalSubdomain, Field(description="priorityClassName of the pods")] = ""
    node_selector: Annotated[dict[str, str], Field(description="labels of the nodes to use")] = {}
    tolerations: Annotated[tuple[dict[str, Any], ...], Field(description="taints of nodes to tolerate")] = ()

    # Where run directories are: a volume claim that all pods mount, so its access mode is ReadWriteMany.
    runs: Annotated[
        str,
        Field(pattern=r"^/[^\x00-\x1f:]+$", description="folder of the runs in the pods, where the claim is mounted"),
    ] = "/runs"
    volume_claim: Annotated[Subdomain, Field(description="volume claim (PVC) that holds the runs")] = "trimaran-runs"
    storage_class: Annotated[
        OptionalSubdomain, Field(description="create the claim in this class, in storage.yaml; empty: it exists")
    ] = ""
    storage_size: Annotated[Quantity, Field(description="size of a claim that is created")] = "500Gi"

    kind: Annotated[
        Literal["trainjob", "jobset", "job"],
        Field(description="TrainJob (Kubeflow Trainer v2), JobSet, or Indexed Job with a headless Service"),
    ] = "trainjob"
    image: Annotated[str, Field(max_length=512, description="container image, with a tag or digest")] = ""
    namespace: Annotated[Literal[""] | Label, Field(description="namespace; empty: that of the context")] = ""
    context: Annotated[str, Field(description="context of the kubeconfig; empty: the current one")] = ""
    runtime: Annotated[
        OptionalSubdomain, Field(description="existing ClusterTrainingRuntime of a TrainJob; empty: write our own")
    ] = ""
    restarts: Annotated[int, Field(ge=0, le=100, description="how often each pod may fail; disruptions count not")] = 3
    disruption_budget: Annotated[bool, Field(description="let no drained node take a pod (PDB)")] = True
    network_policy: Annotated[bool, Field(description="let only pods of the job connect to each other")] = True
    pod_monitor: Annotated[bool, Field(description="PodMonitor of the Prometheus operator, if the run has a port")] = (
        True
    )

    @field_validator("queue")
    @classmethod
    def _queue_is_used(cls, queue: str, known: ValidationInfo) -> str:
        if known.data.get("gang") == "none" and queue:
            raise ValueError(f"nothing uses the queue {queue}: gang is none")
        if known.data.get("gang") == "kueue" and not queue:
            raise ValueError("Kueue never starts a job without a queue")
        return queue

    @field_validator("topology")
    @classmethod
    def _topology_is_used(cls, topology: str, known: ValidationInfo) -> str:
        if topology and (known.data.get("gang") not in ("auto", "kueue") or not known.data.get("queue")):
            raise ValueError("only Kueue uses it, and needs a queue")
        return topology

    @property
    def uses_kueue(self) -> bool:
        """Whether Kueue decides when the job starts."""
        return self.gang == "kueue" or (self.gang == "auto" and self.queue != "")


def grace_seconds(request: LaunchRequest) -> int:
    """Return how long a pod may take to stop: two saves and two steps, and time to agree on it and to exit."""
    # The prediction of a save may be wrong by a factor of two; a pod that is killed during one loses it.
    step_seconds = request.plan.prediction.step_seconds if request.plan.prediction else 0.0
    return max(MIN_GRACE_SECONDS, math.ceil(STOP_SECONDS + 2 * (request.save_seconds + step_seconds)))


def _labels(request: LaunchRequest) -> dict[str, str]:
    """Return the labels of every object of the job; `INSTANCE` alone selects its pods."""
    return {
        "app.kubernetes.io/name": "trimaran",
        INSTANCE: job_name(request.name),
        "app.kubernetes.io/managed-by": "trimaran",
    }


def _selector(request: LaunchRequest) -> dict[str, Any]:
    return {"matchLabels": {INSTANCE: job_name(request.name)}}


def _container(request: LaunchRequest) -> dict[str, Any]:
    """Return the container. It has no liveness probe: a rank that holds the interpreter's lock is not dead."""
    # Secrets are references, and may be missing. Recipe and plan are mounted one by one: in a mounted ConfigMap they
    # would be links, which no file of a run is.
    site: KubernetesSite = request.site
    # The root file system is read-only, and the user may not be in the image's /etc/passwd.
    own = {"HOME": "/tmp", "USER": "trimaran", "XDG_CACHE_HOME": f"{site.runs.rstrip('/')}/.cache"}
    # Kubernetes would expand `$(NAME)` in a command or a variable.
    variables: list[dict[str, Any]] = [
        {"name": name, "value": each.replace("$", "$$")} for name, each in (own | site.env).items()
    ]
    for name in sorted(set(request.secrets) - site.env.keys()) if site.secret else []:
        reference = {"name": site.secret, "key": name, "optional": True}
        variables.append({"name": name, "valueFrom": {"secretKeyRef": reference}})
    ranks, on_cpu = request.ranks_per_node, request.cluster.device.traits.shares_cores
    limits = {} if on_cpu else {site.gpu: str(ranks)}  # what cannot be shared has equal requests and limits
    limits |= {site.rdma: "1"} if site.rdma else {}
    limits |= {"memory": site.memory} if site.memory else {}
    cpu = site.cpu or str(ranks * (1 if on_cpu else CORES_PER_GPU))
    command = node_command(request, python=site.python, launch_folder=LAUNCH_FOLDER)
    tree: dict[str, Any] = {
        "name": CONTAINER,
        "image": site.image,
        "command": [word.replace("$", "$$") for word in command],
        "env": variables,
        "resources": {"requests": {"cpu": cpu, **limits}, **({"limits": limits} if limits else {})},
    }
    if port := request.recipe.telemetry.prometheus.port:
        tree["ports"] = [{"name": "metrics", "containerPort": port, "protocol": "TCP"}]
    # RDMA locks the memory that it registers.
    capabilities: dict[str, Any] = {"drop": ["ALL"]} | ({"add": ["IPC_LOCK"]} if site.rdma else {})
    tree["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": capabilities,
    }
    places = {"runs": site.runs, "shm": "/dev/shm", "tmp": "/tmp"}
    tree["volumeMounts"] = [{"name": name, "mountPath": path} for name, path in places.items()] + [
        {"name": "launch", "mountPath": f"{LAUNCH_FOLDER}/{file}", "subPath": file, "readOnly": True}
        for file in LAUNCH_FILES
    ]
    return tree


def _pod_template(request: LaunchRequest) -> dict[str, Any]:
    site, user, notes = request.site, request.site.user, {}
    if site.uses_kueue and site.topology:
        notes["kueue.x-k8s.io/podset-preferred-topology"] = site.topology
    if site.gang == "volcano" and site.kind != "trainjob":
        notes["scheduling.k8s.io/group-name"] = job_name(request.name)
    spec: dict[str, Any] = {
        "restartPolicy": "Never",  # a container that restarts alone cannot join the ranks that wait for it
        "terminationGracePeriodSeconds": grace_seconds(request),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    # On different nodes, and close to each other, if possible.
    ours = _selector(request)
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    near = {"weight": 100, "podAffinityTerm": {"topologyKey": "topology.kubernetes.io/zone", "labelSelector": ours}}
    given = {
        "subdomain": job_name(request.name) if site.kind == "job" else "",
        "serviceAccountName": site.service_account,
        "imagePullSecrets": [{"name": site.pull_secret}] if site.pull_secret else [],
        "topologySpreadConstraints": [spread | {"labelSelector": ours}],
        "affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [near]}},
        "nodeSelector": site.node_selector,
        "tolerations": list(site.tolerations),
        "priorityClassName": site.priority_class,
        "runtimeClassName": site.runtime_class,
        "schedulerName": "volcano" if site.gang == "volcano" else "",
    }
    spec |= {name: value for name, value in given.items() if value}
    spec["containers"] = [_container(request)]
    spec["volumes"] = [
        {"name": "runs", "persistentVolumeClaim": {"claimName": site.volume_claim}},
        {"name": "launch", "configMap": {"name": f"{job_name(request.name)}-recipe"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": site.shm}},
        {"name": "tmp", "emptyDir": {}},
    ]
    return {"metadata": {"labels": _labels(request)} | ({"annotations": notes} if notes else {}), "spec": spec}


class ManifestDumper(yaml.SafeDumper):
    """Writes long texts as blocks, and lists below their key as people do."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


ManifestDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def dump_documents(documents: list[Document], *, header: str) -> str:
    """Return documents as YAML; the lines of `header` become comments."""
    parts = [
        yaml.dump(each, Dumper=ManifestDumper, sort_keys=False, allow_unicode=True, width=110) for each in documents
    ]
    comments = "".join(f"# {line}\n" for line in header.splitlines())
    return comments + "".join(f"---\n{part}" for part in parts)


def job_documents(request: LaunchRequest) -> list[Document]:
    """Return the objects of a job in the order in which they are created, the job itself last."""
    site, ours, port = request.site, _selector(request), request.recipe.telemetry.prometheus.port
    files = {"recipe.yaml": dump_recipe(request.recipe), "plan.json": dump_plan(request.plan)}
    documents = [_object(request, "v1", "ConfigMap", name=f"{job_name(request.name)}-recipe") | {"data": files}]
    if site.kind == "job":  # a headless Service gives the pods their names: `<job>-0.<job>`
        spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": ours["matchLabels"]}
        documents.append(_object(request, "v1", "Service") | {"spec": spec})
    if site.disruption_budget:
        # It keeps `kubectl drain` from taking pods that the run cannot do without. The number of pods that must stay:
        # for pods of a Job, `maxUnavailable` cannot be computed.
        spec = {"minAvailable": request.min_nodes, "unhealthyPodEvictionPolicy": "AlwaysAllow", "selector": ours}
        documents.append(_object(request, "policy/v1", "PodDisruptionBudget") | {"spec": spec})
    if site.network_policy:  # only pods of the job connect to its pods, and everybody to the metrics
        ingress: list[dict[str, Any]] = [{"from": [{"podSelector": ours}]}]
        if port:
            ingress.append({"ports": [{"protocol": "TCP", "port": port}]})
        spec = {"podSelector": ours, "policyTypes": ["Ingress"], "ingress": ingress}
        documents.append(_object(request, "networking.k8s.io/v1", "NetworkPolicy") | {"spec": spec})
    if site.pod_monitor and port:
        endpoint = {"port": "metrics", "path": "/metrics", "interval": "15s"}
        spec = {"selector": ours, "podMetricsEndpoints": [endpoint]}
        documents.append(_object(request, "monitoring.coreos.com/v1", "PodMonitor") | {"spec": spec})
    if site.gang == "volcano" and site.kind != "trainjob":
        spec = {"minMember": request.min_nodes, **({"queue": site.queue} if site.queue else {})}
        documents.append(_object(request, "scheduling.volcano.sh/v1beta1", "PodGroup") | {"spec": spec})
    return [*documents, *_workload(request)]


def storage_documents(request: LaunchRequest) -> list[Document]:
    """Return the volume claim of the runs if it is to be created. It outlives the jobs, so it has a file of its own."""
    site = request.site
    if not site.storage_class:
        return []
    tree = _object(request, "v1", "PersistentVolumeClaim", name=site.volume_claim)
    tree["metadata"].pop("labels")
    requests = {"requests": {"storage": site.storage_size}}
    spec = {"accessModes": ["ReadWriteMany"], "storageClassName": site.storage_class, "resources": requests}
    return [tree | {"spec": spec}]


def _object(request: LaunchRequest, version: str, kind: str, *, name: str = "") -> Document:
    """Return an object without a spec, with the name of the job if it gets no other."""
    metadata: dict[str, Any] = {"name": name or job_name(request.name)}
    metadata |= {"namespace": request.site.namespace} if request.site.namespace else {}
    return {"apiVersion": version, "kind": kind, "metadata": metadata | {"labels": _labels(request)}}


def _job_spec(request: LaunchRequest, *, with_size: bool = True) -> dict[str, Any]:
    """Return the spec of the Job that keeps one pod for each node."""
    # The run is done when one pod says so: all supervisors return the run's exit code, and a pod that was replaced at
    # the very end, or never found a node, has nothing left to do. Of the failure rules the first that fits decides;
    # other failures count as restarts.
    nodes = request.max_nodes
    size = {"completions": nodes, "parallelism": nodes} if with_size else {}
    final = {"containerName": CONTAINER, "operator": "In", "values": sorted([EXIT_USER, EXIT_STUCK])}
    again = {"containerName": CONTAINER, "operator": "In", "values": [EXIT_AGAIN]}
    failure_rules = [
        {"action": "FailJob", "onExitCodes": final},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": again},
    ]
    return {
        "completionMode": "Indexed",
        **size,
        "backoffLimit": request.site.restarts * nodes,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": failure_rules},
        "successPolicy": {"rules": [{"succeededCount": 1}]},
        "template": _pod_template(request),
    }


def _queued(request: LaunchRequest, tree: Document) -> Document:
    """Return the object that a queue admits, with the label of the queue; Kueue resumes it when it may start."""
    if request.site.uses_kueue:
        tree["metadata"]["labels"] = tree["metadata"]["labels"] | {"kueue.x-k8s.io/queue-name": request.site.queue}
    return tree


def _job_set_spec(request: LaunchRequest, *, template: Document) -> dict[str, Any]:
    """Return the spec of a JobSet with one Job, which replaces its pods itself; when it fails, so does the set."""
    replicated = {"name": REPLICATED_JOB, "replicas": 1, "template": template}
    network = {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    return {"network": network, "failurePolicy": {"maxRestarts": 0}, "replicatedJobs": [replicated]}


def _workload(request: LaunchRequest) -> list[Document]:
    """Return the job itself. A TrainJob has a runtime of its own, unless the site names one."""
    # A TrainJob can change only a part of its runtime's pods. Exit codes, restarts and placement are not among it.
    site = request.site
    spec: dict[str, Any] = {"suspend": site.uses_kueue}
    if site.kind == "job":
        return [_queued(request, _object(request, "batch/v1", "Job") | {"spec": spec | _job_spec(request)})]
    if site.kind == "jobset":
        template = {"metadata": {"labels": _labels(request)}, "spec": _job_spec(request)}
        spec |= _job_set_spec(request, template=template)
        return [_queued(request, _object(request, "jobset.x-k8s.io/v1alpha2", "JobSet") | {"spec": spec})]
    kind = "ClusterTrainingRuntime" if site.runtime else "TrainingRuntime"
    spec |= {"runtimeRef": {"kind": kind, "name": site.runtime or job_name(request.name)}}
    node = _container(request)
    names = ("image", "command", "env")
    trainer = {"numNodes": request.max_nodes, **{name: node[name] for name in names}}
    spec["trainer"] = trainer | {"resourcesPerNode": node["resources"]}
    tree = _queued(request, _object(request, "trainer.kubeflow.org/v1alpha1", "TrainJob") | {"spec": spec})
    if not site.runtime:
        return [_training_runtime(request), tree]
    template = _pod_template(request)
    names = ("terminationGracePeriodSeconds", "securityContext", "serviceAccountName", "imagePullSecrets",
             "nodeSelector", "tolerations", "affinity", "volumes")  # fmt: skip
    pod = {name: template["spec"][name] for name in names if name in template["spec"]}
    (node,) = template["spec"]["containers"]
    pod["containers"] = [{name: node[name] for name in ("name", "securityContext", "volumeMounts")}]
    patch = {"metadata": template["metadata"], "spec": pod}
    jobs = [{"name": REPLICATED_JOB, "template": {"spec": {"template": patch}}}]
    changes = {"template": {"spec": {"replicatedJobs": jobs}}}
    spec["runtimePatches"] = [{"manager": MANAGER, "trainingRuntimeSpec": changes}]
    return [tree]


def _training_runtime(request: LaunchRequest) -> Document:
    """Return the runtime of the TrainJob, without what the TrainJob sets: size, command, variables and resources."""
    site = request.site
    job_spec = _job_spec(request, with_size=False)
    for each in job_spec["template"]["spec"]["containers"]:
        for name in ("command", "env", "resources"):
            each.pop(name)
    template = {"metadata": {"labels": STEP_LABEL | _labels(request)}, "spec": job_spec}
    spec: dict[str, Any] = {"mlPolicy": {"numNodes": request.max_nodes}}
    note = {"metadata": {"annotations": {"scheduling.volcano.sh/queue-name": site.queue}}} if site.queue else {}
    if site.gang == "volcano":
        spec |= {"podGroupPolicy": {"volcano": {}}}
    spec["template"] = (note if site.gang == "volcano" else {}) | {"spec": _job_set_spec(request, template=template)}
    tree = _object(request, "trainer.kubeflow.org/v1alpha1", "TrainingRuntime")
    tree["metadata"]["labels"] = tree["metadata"]["labels"] | {"trainer.kubeflow.org/framework": "torch"}
    return tree | {"spec": spec}
