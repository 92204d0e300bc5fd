"""The manifest of a launch: TrainJob, JobSet or Indexed Job, and the objects around it."""

from collections.abc import Callable
from typing import Any

import yaml

from trimaran.core import EXIT_AGAIN, EXIT_STUCK, EXIT_USER, dump_recipe
from trimaran.launch.targets.kubernetes_files import k8s_pod
from trimaran.launch.targets.target import LaunchRequest, job_name
from trimaran.runs.run_directory import dump_plan

REPLICATED_JOB = "node"  # the name that Kubeflow's runtimes require, as that of the container
MANAGER = "trimaran.dev/launch"
STEP_LABEL = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
Document = dict[str, Any]


class ManifestDumper(yaml.SafeDumper):
    """Writes long texts as blocks, and lists below their key as people do."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


ManifestDumper.add_representer(str, _text_node)


def dump_documents(documents: list[Document], *, header: str) -> str:
    """Return documents as YAML; the lines of `header` become comments."""
    parts = [
        yaml.dump(each, Dumper=ManifestDumper, sort_keys=False, allow_unicode=True, width=110) for each in documents
    ]
    comments = "".join(f"# {line}\n" for line in header.splitlines())
    return comments + "".join(f"---\n{part}" for part in parts)


def job_documents(request: LaunchRequest) -> list[Document]:
    """Return the objects of a job in the order in which they are created, the job itself last."""
    site = request.site
    documents = [_recipe_map(request)]
    if site.kind == "job":
        documents.append(_service(request))
    if site.disruption_budget:
        documents.append(_disruption_budget(request))
    if site.network_policy:
        documents.append(_network_policy(request))
    if site.pod_monitor and k8s_pod.has_metrics(request):
        documents.append(_pod_monitor(request))
    if site.gang == "volcano" and site.kind != "trainjob":
        documents.append(_pod_group(request))
    return [*documents, *WORKLOADS[site.kind](request)]


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
    return {"apiVersion": version, "kind": kind, "metadata": metadata | {"labels": k8s_pod.labels(request)}}


def _recipe_map(request: LaunchRequest) -> Document:
    data = {"recipe.yaml": dump_recipe(request.recipe), "plan.json": dump_plan(request.plan)}
    return _object(request, "v1", "ConfigMap", name=k8s_pod.recipe_map_name(request)) | {"data": data}


def _service(request: LaunchRequest) -> Document:
    """Return the headless Service that gives the pods their names: `<job>-0.<job>`."""
    pods = k8s_pod.selector(request)["matchLabels"]
    return _object(request, "v1", "Service") | {
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": pods}
    }


def _disruption_budget(request: LaunchRequest) -> Document:
    """Return the budget that keeps `kubectl drain` from taking pods that the run cannot do without.

    A number of pods that must stay: for pods of a Job, `maxUnavailable` cannot be computed.
    """
    spec = {"minAvailable": request.min_nodes, "unhealthyPodEvictionPolicy": "AlwaysAllow"}
    return _object(request, "policy/v1", "PodDisruptionBudget") | {
        "spec": spec | {"selector": k8s_pod.selector(request)}
    }


def _network_policy(request: LaunchRequest) -> Document:
    """Return the policy that lets only pods of the job connect to its pods, and everybody to the metrics."""
    ours = k8s_pod.selector(request)
    ingress: list[dict[str, Any]] = [{"from": [{"podSelector": ours}]}]
    if k8s_pod.has_metrics(request):
        ingress.append({"ports": [{"protocol": "TCP", "port": request.recipe.telemetry.prometheus.port}]})
    return _object(request, "networking.k8s.io/v1", "NetworkPolicy") | {
        "spec": {"podSelector": ours, "policyTypes": ["Ingress"], "ingress": ingress}
    }


def _pod_monitor(request: LaunchRequest) -> Document:
    endpoint = {"port": "metrics", "path": "/metrics", "interval": "15s"}
    return _object(request, "monitoring.coreos.com/v1", "PodMonitor") | {
        "spec": {"selector": k8s_pod.selector(request), "podMetricsEndpoints": [endpoint]}
    }


def _pod_group(request: LaunchRequest) -> Document:
    queue = {"queue": request.site.queue} if request.site.queue else {}
    return _object(request, "scheduling.volcano.sh/v1beta1", "PodGroup") | {
        "spec": {"minMember": request.min_nodes, **queue}
    }


def _job_spec(request: LaunchRequest, *, with_size: bool = True) -> dict[str, Any]:
    """Return the spec of the Job that keeps one pod for each node.

    The run is done when one pod says so: all supervisors return the run's exit code, and a pod that was replaced at the
    very end, or never found a node, has nothing left to do.
    """
    nodes = request.max_nodes
    size = {"completions": nodes, "parallelism": nodes} if with_size else {}
    return {
        "completionMode": "Indexed",
        **size,
        "backoffLimit": request.site.restarts * nodes,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": _failure_rules()},
        "successPolicy": {"rules": [{"succeededCount": 1}]},
        "template": k8s_pod.pod_template(request),
    }


def _failure_rules() -> list[dict[str, Any]]:
    """Return what follows from a pod's end; the first rule that fits decides. Other failures count as restarts."""
    final = {"containerName": k8s_pod.CONTAINER, "operator": "In", "values": sorted([EXIT_USER, EXIT_STUCK])}
    again = {"containerName": k8s_pod.CONTAINER, "operator": "In", "values": [EXIT_AGAIN]}
    return [
        {"action": "FailJob", "onExitCodes": final},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": again},
    ]


def _queued(request: LaunchRequest, tree: Document) -> Document:
    """Return the object that a queue admits, with the label of the queue; Kueue resumes it when it may start."""
    if request.site.uses_kueue:
        tree["metadata"]["labels"] = tree["metadata"]["labels"] | {"kueue.x-k8s.io/queue-name": request.site.queue}
    return tree


def _suspend(request: LaunchRequest) -> dict[str, bool]:
    return {"suspend": request.site.uses_kueue}


def _job(request: LaunchRequest) -> list[Document]:
    tree = _object(request, "batch/v1", "Job") | {"spec": _suspend(request) | _job_spec(request)}
    return [_queued(request, tree)]


def _job_set_spec(request: LaunchRequest, *, template: Document) -> dict[str, Any]:
    """Return the spec of a JobSet with one Job, which replaces its pods itself; when it fails, so does the set."""
    replicated = {"name": REPLICATED_JOB, "replicas": 1, "template": template}
    network = {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    return {"network": network, "failurePolicy": {"maxRestarts": 0}, "replicatedJobs": [replicated]}


def _job_set(request: LaunchRequest) -> list[Document]:
    template = {"metadata": {"labels": k8s_pod.labels(request)}, "spec": _job_spec(request)}
    spec = _suspend(request) | _job_set_spec(request, template=template)
    return [_queued(request, _object(request, "jobset.x-k8s.io/v1alpha2", "JobSet") | {"spec": spec})]


def _train_job(request: LaunchRequest) -> list[Document]:
    """Return a TrainJob and, unless the site names a runtime, a runtime of its own.

    A TrainJob can change only a part of its runtime's pods. Exit codes, restarts and placement are not among it.
    """
    site = request.site
    spec: dict[str, Any] = _suspend(request)
    if site.runtime:
        spec |= {"runtimeRef": {"kind": "ClusterTrainingRuntime", "name": site.runtime}}
    else:
        spec |= {"runtimeRef": {"kind": "TrainingRuntime", "name": job_name(request.name)}}
    node = k8s_pod.container(request)
    names = ("image", "command", "env")
    trainer = {"numNodes": request.max_nodes, **{name: node[name] for name in names}}
    spec["trainer"] = trainer | {"resourcesPerNode": node["resources"]}
    if site.runtime:
        spec["runtimePatches"] = [_runtime_patch(request)]
    tree = _queued(request, _object(request, "trainer.kubeflow.org/v1alpha1", "TrainJob") | {"spec": spec})
    return [tree] if site.runtime else [_training_runtime(request), tree]


def _training_runtime(request: LaunchRequest) -> Document:
    """Return the runtime of the TrainJob, without what the TrainJob sets: size, command, variables and resources."""
    site = request.site
    job_spec = _job_spec(request, with_size=False)
    for each in job_spec["template"]["spec"]["containers"]:
        for name in ("command", "env", "resources"):
            each.pop(name)
    template = {"metadata": {"labels": STEP_LABEL | k8s_pod.labels(request)}, "spec": job_spec}
    spec: dict[str, Any] = {"mlPolicy": {"numNodes": request.max_nodes}}
    note = {"metadata": {"annotations": {"scheduling.volcano.sh/queue-name": site.queue}}} if site.queue else {}
    if site.gang == "volcano":
        spec |= {"podGroupPolicy": {"volcano": {}}}
    spec["template"] = (note if site.gang == "volcano" else {}) | {"spec": _job_set_spec(request, template=template)}
    tree = _object(request, "trainer.kubeflow.org/v1alpha1", "TrainingRuntime")
    tree["metadata"]["labels"] = tree["metadata"]["labels"] | {"trainer.kubeflow.org/framework": "torch"}
    return tree | {"spec": spec}


def _runtime_patch(request: LaunchRequest) -> dict[str, Any]:
    """Return what a TrainJob may change in the pods of an existing runtime."""
    template = k8s_pod.pod_template(request)
    names = ("terminationGracePeriodSeconds", "securityContext", "serviceAccountName", "imagePullSecrets",
             "nodeSelector", "tolerations", "affinity", "volumes")  # fmt: skip
    spec = {name: template["spec"][name] for name in names if name in template["spec"]}
    node = {"name": k8s_pod.CONTAINER, "securityContext": k8s_pod.container_security(request)}
    spec["containers"] = [node | {"volumeMounts": k8s_pod.volume_mounts(request)}]
    pod = {"metadata": template["metadata"], "spec": spec}
    jobs = [{"name": REPLICATED_JOB, "template": {"spec": {"template": pod}}}]
    return {"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}


WORKLOADS: dict[str, Callable[[LaunchRequest], list[Document]]] = {
    "trainjob": _train_job,
    "jobset": _job_set,
    "job": _job,
}
