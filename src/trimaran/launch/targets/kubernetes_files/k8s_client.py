"""Submits, follows and stops jobs of a Kubernetes cluster, with the credentials of the user's kubeconfig.

The package `kubernetes` is an extra; it is imported when it is needed. The namespace is that of the objects, else that
of the context. Nothing is retried: a person reads the answer.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trimaran.core import EXIT_STUCK, EXIT_USER, UserError
from trimaran.launch.targets.kubernetes_files.k8s_manifest import job_documents
from trimaran.launch.targets.kubernetes_files.k8s_pod import CONTAINER, INSTANCE
from trimaran.launch.targets.kubernetes_files.k8s_site import KubernetesSite
from trimaran.launch.targets.kubernetes_files.k8s_workloads import listed, mapping, name_of, within
from trimaran.launch.targets.target import JobState, LaunchRequest, SiteCheck

REQUEST_SECONDS = 20.0  # for one answer of the API server
DELETE_SECONDS = 900.0  # until all pods of a job have saved and are gone
POLL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class JobKind:
    """How the API server calls a job, and the conditions with which it is over."""

    version: str
    kind: str
    resource: str
    done: str


KINDS = {
    "trainjob": JobKind("trainer.kubeflow.org/v1alpha1", "TrainJob", "trainjob.trainer.kubeflow.org", "Complete"),
    "jobset": JobKind("jobset.x-k8s.io/v1alpha2", "JobSet", "jobset.jobset.x-k8s.io", "Completed"),
    "job": JobKind("batch/v1", "Job", "job.batch", "Complete"),
}
WAITING_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError",
                   "CreateContainerError", "RunContainerError")  # fmt: skip


class Api:
    """The API server of one context. Errors of the server are UserErrors of a kind that the user can act on."""

    def __init__(self, client: Any, namespace: str) -> None:
        self._client, self.namespace = client, namespace

    def resource(self, version: str, kind: str) -> Any:
        """Return the resource of a kind of object; raise UserError if the cluster does not have it."""
        from kubernetes.dynamic.exceptions import ResourceNotFoundError  # noqa: PLC0415

        try:
            return self._client.resources.get(api_version=version, kind=kind)
        except ResourceNotFoundError:
            raise UserError("L059", f"the cluster has no {kind} ({version})", where="the cluster's API",
                            fix=f"install what provides it, or leave it out: {LEAVE_OUT.get(kind, 'k8s.kind')}"
                            ) from None  # fmt: skip

    def create(self, tree: Mapping[str, Any], *, dry_run: bool = False) -> bool:
        """Create an object; return False if there is one of this name."""
        from kubernetes.dynamic.exceptions import ConflictError  # noqa: PLC0415

        resource = self.resource(tree["apiVersion"], tree["kind"])
        options = {"dry_run": "All"} if dry_run else {}
        with self._errors(tree["kind"], name_of(dict(tree))):
            try:
                resource.create(body=dict(tree), namespace=self.namespace, field_manager="trimaran",
                                _request_timeout=REQUEST_SECONDS, **options)  # fmt: skip
            except ConflictError:
                return False
        return True

    def patch(self, version: str, kind: str, name: str, change: Mapping[str, Any]) -> None:
        """Merge a change into an object."""
        with self._errors(kind, name):
            self.resource(version, kind).patch(
                body=dict(change), name=name, namespace=self.namespace, content_type="application/merge-patch+json",
                field_manager="trimaran", _request_timeout=REQUEST_SECONDS
            )  # fmt: skip

    def get(self, version: str, kind: str, name: str) -> dict[str, Any] | None:
        """Return an object; None if there is none of this name."""
        from kubernetes.dynamic.exceptions import NotFoundError  # noqa: PLC0415

        with self._errors(kind, name):
            try:
                found = self.resource(version, kind).get(
                    name=name, namespace=self.namespace, _request_timeout=REQUEST_SECONDS
                )
            except NotFoundError:
                return None
        return found.to_dict()

    def pods(self, name: str) -> list[dict[str, Any]]:
        """Return the pods of a job, the oldest first."""
        with self._errors("Pod", name):
            found = self.resource("v1", "Pod").get(
                namespace=self.namespace, label_selector=f"{INSTANCE}={name}", _request_timeout=REQUEST_SECONDS
            )
        pods = listed(found.to_dict(), "items")
        return sorted(pods, key=lambda pod: str(within(pod, "metadata", "creationTimestamp")))

    def delete(self, version: str, kind: str, name: str) -> None:
        """Delete an object after what it owns; pods get their grace period."""
        from kubernetes.dynamic.exceptions import NotFoundError  # noqa: PLC0415

        with self._errors(kind, name):
            try:
                self.resource(version, kind).delete(
                    name=name, namespace=self.namespace, propagation_policy="Foreground",
                    _request_timeout=REQUEST_SECONDS
                )  # fmt: skip
            except NotFoundError:
                return

    def log(self, pod: str, *, tail_lines: int) -> str:
        """Return the last lines of a pod's log; "" if it has not started."""
        from kubernetes.client import CoreV1Api  # noqa: PLC0415
        from kubernetes.client.exceptions import ApiException  # noqa: PLC0415

        try:
            return CoreV1Api(self._client.client).read_namespaced_pod_log(
                pod, self.namespace, container=CONTAINER, tail_lines=tail_lines, _request_timeout=REQUEST_SECONDS
            )
        except ApiException as error:
            if error.status in (400, 404):  # not started, or gone
                return ""
            raise _refused(error, "Pod", pod) from None

    @contextmanager
    def _errors(self, kind: str, name: str) -> Iterator[None]:
        from kubernetes.client.exceptions import ApiException  # noqa: PLC0415
        from urllib3.exceptions import HTTPError  # noqa: PLC0415

        try:
            yield
        except ApiException as error:
            raise _refused(error, kind, name) from None
        except (HTTPError, OSError) as error:
            raise _unreachable(self._client.configuration.host, error) from None


LEAVE_OUT = {"PodMonitor": "--site pod_monitor=false", "TrainJob": "--site kind=jobset, or kind=job",
             "TrainingRuntime": "--site kind=jobset, or kind=job", "JobSet": "--site kind=job",
             "PodGroup": "--site gang=none"}  # fmt: skip


def _refused(error: Any, kind: str, name: str) -> UserError:
    """Return the error for what the API server refuses; its message is what a person needs."""
    summary = error.summary() if hasattr(error, "summary") else str(error.reason)
    what = " ".join(str(summary).split())
    fix = "ask for the permission: kubectl auth can-i create jobs" if error.status in (401, 403) else "see the message"
    return UserError("L042", f"Kubernetes refuses it ({error.status}): {what}", where=f"{kind}/{name}", fix=fix)


def _unreachable(host: str, error: Exception) -> UserError:
    return UserError("L042", f"the API server does not answer: {type(error).__name__}", where=host,
                     fix="try `kubectl get nodes`; name another context: --site context=NAME")  # fmt: skip


@contextmanager
def open_api(context: str, namespace: str = "") -> Iterator[Api]:
    """Return the API server of a context of the kubeconfig."""
    if find_spec("kubernetes") is None:
        raise UserError("L042", "the package kubernetes is not installed", where="--on k8s",
                        fix="pip install 'trimaran[k8s]', or submit job.yaml with kubectl")  # fmt: skip
    from kubernetes import config  # noqa: PLC0415
    from kubernetes.client import ApiClient, Configuration  # noqa: PLC0415
    from kubernetes.client.exceptions import ApiException  # noqa: PLC0415
    from kubernetes.dynamic import DynamicClient  # noqa: PLC0415
    from urllib3.exceptions import HTTPError  # noqa: PLC0415

    settings, file = Configuration(), os.environ.get("KUBECONFIG") or None
    try:
        config.load_kube_config(file, context=context or None, client_configuration=settings)
        contexts, current = config.list_kube_config_contexts(file)
        active = next((each for each in contexts if each["name"] == context), current)
        namespace = namespace or active["context"].get("namespace") or "default"
    except config.ConfigException as error:
        raise UserError("L042", f"no usable kubeconfig: {error}", where="KUBECONFIG, or ~/.kube/config",
                        fix="set KUBECONFIG, or name a context: --site context=NAME") from None  # fmt: skip
    settings.retries = False
    with ApiClient(settings) as client, tempfile.TemporaryDirectory(prefix="trimaran-k8s-") as folder:
        try:
            # The library's own cache is a file in /tmp that anybody could have written.
            dynamic = DynamicClient(client, cache_file=str(Path(folder) / "api.json"))
        except ApiException as error:
            raise _refused(error, "API", settings.host) from None
        except (HTTPError, OSError) as error:
            raise _unreachable(settings.host, error) from None
        yield Api(dynamic, namespace)


def submit(details: Mapping[str, Any], documents: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Create the objects of a job; return its native id and details. Raises if there is a job of this name.

    All objects are first created as a trial, so that nothing is left of a job that the API server refuses.
    """
    job = documents[-1]
    namespace = str(within(dict(job), "metadata", "namespace") or details.get("namespace") or "")
    with open_api(str(details["context"]), namespace) as api:
        _try_out(api, documents)
        for tree in documents:
            if api.create(tree):
                continue
            if tree is job:
                raise _exists(str(tree["kind"]), name_of(dict(tree)))
            if tree["kind"] != "PersistentVolumeClaim":
                api.patch(tree["apiVersion"], tree["kind"], name_of(dict(tree)), tree)
        return f"{api.namespace}/{name_of(dict(job))}", {**details, "namespace": api.namespace}


def _try_out(api: Api, documents: Sequence[Mapping[str, Any]]) -> None:
    """Let the API server check all objects without creating one.

    It cannot check a TrainJob before its runtime exists, so only whether there are TrainJobs is asked.
    """
    job = documents[-1]
    for tree in documents:
        if tree["kind"] == "TrainJob":
            api.resource(tree["apiVersion"], tree["kind"])
            is_new = api.get(tree["apiVersion"], tree["kind"], name_of(dict(tree))) is None
        else:
            is_new = api.create(tree, dry_run=True)
        if tree is job and not is_new:
            raise _exists(str(tree["kind"]), name_of(dict(tree)))


def _exists(kind: str, name: str) -> UserError:
    return UserError("L043", f"there is already a {kind} of this name", where=f"{kind}/{name}",
                     fix=f"choose another run directory, or remove it: kubectl delete {kind.lower()} {name}"
                     )  # fmt: skip


def check_cluster(site: KubernetesSite, request: LaunchRequest | None) -> list[SiteCheck]:
    """Return what the cluster says about a launch. A cluster that cannot be asked is no error here, but of `submit`."""
    try:
        with open_api(site.context, site.namespace) as api:
            checks = [SiteCheck(name="cluster", found=f"namespace {api.namespace}"), _check_claim(api, site)]
            kind = KINDS[site.kind]
            checks.append(_asked("kind", lambda: str(api.resource(kind.version, kind.kind).group_version)))
            if request is not None and site.image:
                documents = job_documents(request)
                checks.append(_asked("objects", lambda: _tried(api, documents)))
            return checks
    except UserError as error:
        return [SiteCheck(name="cluster", found=f"not asked: {error.what}")]


def _asked(name: str, question: Any) -> SiteCheck:
    try:
        return SiteCheck(name=name, found=question())
    except UserError as error:
        return SiteCheck(name=name, found=error.what, error=error)


def _tried(api: Api, documents: Sequence[Mapping[str, Any]]) -> str:
    _try_out(api, documents)
    return f"{len(documents)} accepted"


def _check_claim(api: Api, site: KubernetesSite) -> SiteCheck:
    """Return whether the volume of the runs exists, and whether all nodes can mount it."""

    def ask() -> str:
        claim = api.get("v1", "PersistentVolumeClaim", site.volume_claim)
        if claim is None and site.storage_class:
            return f"{site.volume_claim} will be created"
        modes = listed(claim, "spec", "accessModes")
        if claim is not None and "ReadWriteMany" in modes:
            return f"{site.volume_claim}, {within(claim, 'status', 'phase') or 'Pending'}"
        what = f"has access mode {', '.join(modes)}" if claim is not None else "does not exist"
        raise UserError("L059", f"the volume claim {site.volume_claim} {what}; pods on all nodes mount it",
                        where="k8s.volume_claim", fix="name a claim with ReadWriteMany, or a class to create it in: "
                        "--site storage_class=NAME")  # fmt: skip

    return _asked("volume claim", ask)


def job_state(details: Mapping[str, Any], native_id: str) -> JobState:
    """Return the state of a job from its conditions and its pods."""
    kind, name = KINDS[details["kind"]], native_id.rpartition("/")[2]
    with open_api(str(details["context"]), str(details["namespace"])) as api:
        job = api.get(kind.version, kind.kind, name)
        if job is None:
            return JobState(state="stopped", native="NotFound", reason="the job was deleted from the cluster")
        return describe(job, api.pods(name), kind)


def describe(job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], kind: JobKind) -> JobState:
    """Return the state of a job object and its pods."""
    conditions = {str(each.get("type")): each for each in listed(dict(job), "status", "conditions")
                  if isinstance(each, dict) and each.get("status") == "True"}  # fmt: skip
    running = [pod for pod in pods if within(dict(pod), "status", "phase") == "Running"]
    nodes = tuple(sorted({str(within(dict(pod), "spec", "nodeName")) for pod in running}))
    codes = [code for pod in pods if (code := _exit_code(pod)) is not None]
    if kind.done in conditions:
        return JobState(state="done", native=kind.done, exit_code=0)
    if "Failed" in conditions:
        final = [code for code in codes if code in (EXIT_USER, EXIT_STUCK)]
        code = (final or [code for code in codes if code] or [None])[-1]
        reason = f"{conditions['Failed'].get('reason', '')}: {conditions['Failed'].get('message', '')}".strip(": ")
        return JobState(state="failed", native="Failed", reason=reason, exit_code=code)
    is_suspended = "Suspended" in conditions or within(dict(job), "spec", "suspend") is True
    if is_suspended and not running:
        is_queued = "kueue.x-k8s.io/queue-name" in mapping(dict(job), "metadata", "labels")
        return JobState(state="queued" if is_queued else "stopped", native="Suspended")
    if running:
        return JobState(state="running", native=f"{len(running)} of {len(pods)} pods run", nodes=nodes)
    return JobState(state="queued", native="Pending", reason=next(filter(None, map(_why_waiting, pods)), ""))


def _exit_code(pod: Mapping[str, Any]) -> int | None:
    for each in listed(dict(pod), "status", "containerStatuses"):
        code = within(each, "state", "terminated", "exitCode")
        if within(each, "name") == CONTAINER and isinstance(code, int):
            return code
    return None


def _why_waiting(pod: Mapping[str, Any]) -> str:
    """Return why a pod does not start: its container cannot be created, or no node has room."""
    for each in listed(dict(pod), "status", "containerStatuses"):
        waiting = mapping(each, "state", "waiting")
        if waiting.get("reason") in WAITING_REASONS:
            return f"{waiting['reason']}: {waiting.get('message', '')}".strip(": ")
    for each in listed(dict(pod), "status", "conditions"):
        if within(each, "type") == "PodScheduled" and within(each, "status") == "False":
            return f"{within(each, 'reason')}: {within(each, 'message') or ''}".strip(": ")
    return ""


def stop_job(details: Mapping[str, Any], native_id: str) -> None:
    """Let all pods save and end. The job is suspended; Kueue would resume it, so one in a queue is deleted."""
    kind, name = KINDS[details["kind"]], native_id.rpartition("/")[2]
    with open_api(str(details["context"]), str(details["namespace"])) as api:
        if details.get("queued"):
            api.delete(kind.version, kind.kind, name)
        else:
            api.patch(kind.version, kind.kind, name, {"spec": {"suspend": True}})


def delete_job(details: Mapping[str, Any], native_id: str, *, wait_seconds: float = DELETE_SECONDS) -> None:
    """Delete a job that is over or stopped, and wait until its pods are gone. Raises if it still runs."""
    kind, name = KINDS[details["kind"]], native_id.rpartition("/")[2]
    with open_api(str(details["context"]), str(details["namespace"])) as api:
        job = api.get(kind.version, kind.kind, name)
        if job is None:
            return
        state = describe(job, api.pods(name), kind)
        if state.state in ("running", "queued"):
            raise UserError("L043", f"the job has not ended: {state.native}", where=f"{kind.kind}/{name}",
                            fix="stop it first, or wait until it ends")  # fmt: skip
        api.delete(kind.version, kind.kind, name)
        until = time.monotonic() + wait_seconds
        while api.get(kind.version, kind.kind, name) is not None or api.pods(name):
            if time.monotonic() > until:
                raise UserError("L043", "the pods of the job have not ended", where=f"{kind.kind}/{name}",
                                fix=f"see kubectl get pods --selector={INSTANCE}={name}")  # fmt: skip
            time.sleep(POLL_SECONDS)


def read_logs(details: Mapping[str, Any], native_id: str, *, tail_lines: int = 100) -> dict[str, str]:
    """Return the last lines of the log of each pod, by its name."""
    with open_api(str(details["context"]), str(details["namespace"])) as api:
        names = [str(within(pod, "metadata", "name")) for pod in api.pods(native_id.rpartition("/")[2])]
        return {name: api.log(name, tail_lines=tail_lines) for name in names}
