"""Kubernetes: writes a manifest, and submits, follows and stops jobs with the credentials of the user's kubeconfig.

The package `kubernetes` is an extra; it is imported when it is needed. The namespace is that of the objects, else that
of the context. Nothing is retried: a person reads the answer.
"""

import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import yaml
from pydantic import BaseModel

from trimaran.core import EXIT_STUCK, EXIT_USER, UserError, show_bytes
from trimaran.launch.targets.k8s_manifest import (
    CONTAINER,
    INSTANCE,
    KubernetesSite,
    dump_documents,
    grace_seconds,
    job_documents,
    storage_documents,
)
from trimaran.launch.targets.target import (
    JobCommands,
    JobRecord,
    JobState,
    LaunchFiles,
    LaunchRequest,
    SiteCheck,
    ask_check,
    job_name,
)
from trimaran.models import hub_repo_of

JOB_FILE, STORAGE_FILE = "job.yaml", "storage.yaml"
MAX_RECIPE_BYTES = 240 << 10  # `kubectl apply` keeps a copy in an annotation, of which there may be 256 KiB
READ_FOR_PLAN = ("model.path", "model.adapter.path", "data.tokenizer", "cluster")  # by the machine that launches
LOOPBACK = ("127.0.0.1", "localhost", "::1")
SECRET_VALUE = re.compile(r"\b(hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|AKIA[0-9A-Z]{16}|"
                          r"xox[abp]-[A-Za-z0-9-]{10,})")  # fmt: skip
REQUEST_SECONDS = 20.0  # for one answer of the API server
DELETE_SECONDS = 900.0  # until all pods of a job have saved and are gone
POLL_SECONDS = 1.0


class KubernetesTarget:
    """Writes a manifest, and submits it with the credentials of the user's kubeconfig."""

    name = "k8s"
    shares_disk = False  # the runs are on a volume claim
    site_model: ClassVar[type[BaseModel]] = KubernetesSite

    def check(self, request: LaunchRequest | None, site: Any) -> list[SiteCheck]:
        """Return what was checked: the site's section, our own manifest, and what the cluster has."""
        image = SiteCheck(name="image", found=site.image or "none", error=_image_error(site))
        checks = [image] if request is None else self.check_request(request)
        return [*checks, *check_cluster(site, request)]

    def check_request(self, request: LaunchRequest) -> list[SiteCheck]:
        """Return what can be said about a launch without asking the cluster, as a dry run does."""
        image = SiteCheck(name="image", found=request.site.image or "none", error=_image_error(request.site))
        paths = [SiteCheck(name="path", found=each.where, error=each) for each in _path_errors(request)]
        return [image, *paths, *(_manifest_checks(request) if request.site.image else [])]

    def render(self, request: LaunchRequest) -> LaunchFiles:
        """Return `job.yaml`, and `storage.yaml` if the site has the volume claim created."""
        context = ["--context", request.site.context] if request.site.context else []
        apply = ["kubectl", *context, "apply", "-f"]
        header = (
            "Written by `trimaran launch --on k8s`. Pods get the recipe and the plan below; the first creates the run."
            "\nExit codes: 2 and 93 end the job; 75, and pods that Kubernetes evicts, are started again. A pod has "
            f"{grace_seconds(request)} s to save."
        )
        files = {JOB_FILE: dump_documents(job_documents(request), header=header)}
        if storage := storage_documents(request):
            files[STORAGE_FILE] = dump_documents(storage, header="The volume of all runs. It outlives the jobs.")
        names = [name for name in (STORAGE_FILE, JOB_FILE) if name in files]
        return LaunchFiles(files=files, main=JOB_FILE, submit=[[*apply, name] for name in names])

    def submit(self, request: LaunchRequest, folder: Path) -> tuple[str, dict[str, Any]]:
        """Create the objects of the files in `folder`."""
        if error := _image_error(request.site):
            raise error
        details = {"context": request.site.context, "kind": request.site.kind}
        return _submit(folder, details | {"queued": request.site.uses_kueue})

    def submit_again(self, job: JobRecord) -> tuple[str, dict[str, Any]]:
        """Remove what is left of a job, and create it again: the run continues from its newest state."""
        with _open_job(job) as (api, kind, name):
            found, where = api.get(kind.version, kind.kind, name), f"{kind.kind}/{name}"
            state = describe(found, api.pods(name), kind) if found is not None else None
            if state is not None and state.state in ("running", "queued"):
                raise UserError("L043.job-not-ended", where=where, native=state.native)
            if found is not None:
                api.delete(kind.version, kind.kind, name)
            until = time.monotonic() + DELETE_SECONDS
            while found is not None and (api.get(kind.version, kind.kind, name) is not None or api.pods(name)):
                if time.monotonic() > until:
                    raise UserError("L043.pods-job", where=where, instance=INSTANCE, name=name)
                time.sleep(POLL_SECONDS)
        return _submit(Path(job.folder), job.details)

    def state(self, job: JobRecord) -> JobState:
        """Return the state of the job object and its pods."""
        with _open_job(job) as (api, kind, name):
            found = api.get(kind.version, kind.kind, name)
            if found is None:
                return JobState(state="stopped", native="NotFound", reason="the job was deleted from the cluster")
            return describe(found, api.pods(name), kind)

    def stop(self, job: JobRecord) -> None:
        """Ask the pods to stop: they get SIGTERM, and their grace period is longer than a save."""
        # The job is suspended. Kueue would resume it, so one in a queue is deleted.
        with _open_job(job) as (api, kind, name):
            if job.details.get("queued"):
                api.delete(kind.version, kind.kind, name)
            else:
                api.patch(kind.version, kind.kind, name, {"spec": {"suspend": True}})

    def commands(self, job: JobRecord) -> JobCommands:
        """Return the commands of `kubectl`."""
        details, name = job.details, job.native_id.rpartition("/")[2]
        tool = ["kubectl", *(["--context", details["context"]] if details.get("context") else [])]
        tool += ["--namespace", str(details["namespace"])]
        target = f"{KINDS[details['kind']].resource}/{name}"
        suspend = ["patch", target, "--type=merge", "--patch", '{"spec": {"suspend": true}}']
        return JobCommands(
            follow=[*tool, "logs", "--follow", "--prefix", "--max-log-requests=100", f"--selector={INSTANCE}={name}"],
            stop=[*tool, *(["delete", target] if details.get("queued") else suspend)],
            resume=["trimaran", "jobs", job.id, "--resume"],
        )


@contextmanager
def _open_job(job: JobRecord) -> Iterator[tuple["Api", "JobKind", str]]:
    """Yield the API server, and the kind and name of the job object."""
    with open_api(str(job.details["context"]), str(job.details["namespace"])) as api:
        yield api, KINDS[job.details["kind"]], job.native_id.rpartition("/")[2]


def _submit(folder: Path, details: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Create the objects of the launch files; return the job's native id and details. Raises if the job exists."""
    # All objects are first created as a trial, so that nothing is left of a job that the API server refuses.
    storage = folder / STORAGE_FILE
    documents = [*(_read_documents(storage) if storage.exists() else []), *_read_documents(folder / JOB_FILE)]
    job = documents[-1]
    namespace = str(within(job, "metadata", "namespace") or details.get("namespace") or "")
    with open_api(str(details["context"]), namespace) as api:
        _try_out(api, documents)
        for tree in documents:
            if api.create(tree):
                continue
            if tree is job:
                raise _exists(str(tree["kind"]), name_of(tree))
            if tree["kind"] != "PersistentVolumeClaim":
                api.patch(tree["apiVersion"], tree["kind"], name_of(tree), tree)
        return f"{api.namespace}/{name_of(job)}", {**details, "namespace": api.namespace}


def _read_documents(path: Path) -> list[Any]:
    """Return the objects of a launch file, which a person may have edited; raise UserError if it is no manifest."""
    try:
        documents = [each for each in yaml.safe_load_all(path.read_bytes()) if each is not None]
    except OSError as error:
        raise UserError("L044.manifest-cannot-read", where=str(path), reason=error.strerror) from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError("L044.not-yaml", where=f"{path}{line}", problem=error.problem) from None
    except (yaml.YAMLError, ValueError):
        raise UserError("L044.not-yaml-launch", where=str(path)) from None
    if not documents or not all(isinstance(each, dict) and "kind" in each for each in documents):
        raise UserError("L044.no-kubernetes-object", where=str(path))
    return documents


def _image_error(site: KubernetesSite) -> UserError | None:
    if site.image:
        return None
    return UserError("L040.kubernetes-needs-container", where="k8s.image")


def _manifest_checks(request: LaunchRequest) -> list[SiteCheck]:
    site, runs, server = request.site, PurePosixPath(request.site.runs), request.recipe.telemetry.prometheus
    documents = job_documents(request)
    num_bytes: Any = sum(len(text.encode()) for each in documents for text in each.get("data", {}).values())
    outside = too_large = unreachable = None
    if runs not in PurePosixPath(request.run_dir).parents:
        outside = UserError("L041.run-directory", where=str(request.run_dir), runs=runs)
    if num_bytes > MAX_RECIPE_BYTES:
        too_large = UserError(
            "L057.recipe-plan-larger", where="recipe.yaml", max_recipe_bytes=show_bytes(MAX_RECIPE_BYTES)
        )
    if site.pod_monitor and server.port and server.host in LOOPBACK:
        unreachable = UserError("L058.metrics-served-prometheus", where="telemetry.prometheus.host", host=server.host)
    checks = [
        SiteCheck(name="run directory", found=str(request.run_dir), error=outside),
        SiteCheck(name="recipe and plan", found=show_bytes(num_bytes), error=too_large),
        SiteCheck(name="metrics", found=str(server.port or "none"), error=unreachable),
    ]
    mistakes = [  # without the secret itself
        UserError("L054.value-manifest-where", where=f'k8s.env.{name}', name=name)
        for name, value in site.env.items() if SECRET_VALUE.search(value)
    ]  # fmt: skip
    if "@" not in site.image and site.image.rpartition("/")[2].partition(":")[2] in ("", "latest"):
        mistakes.append(UserError("L056.image-no-fixed", where="k8s.image", image=site.image))
    if mistakes:
        return [*checks, *(SiteCheck(name="manifest", found=each.what, error=each) for each in mistakes)]
    return [*checks, SiteCheck(name="manifest", found=f"{site.kind} {job_name(request.name)}")]


def _path_errors(request: LaunchRequest) -> list[UserError]:
    """Return a mistake for each path of the recipe that is only here; what comes from the Hub, pods fetch again."""
    recipe, runs = request.recipe, PurePosixPath(request.site.runs)
    model, adapter = recipe.model, recipe.model.adapter
    paths = {"model.path": model.path, "model.adapter.path": adapter.path if adapter else None,
             "data.tokenizer": recipe.data.tokenizer, "data.samples.images": recipe.data.samples.images,
             "cluster": recipe.cluster if recipe.cluster.endswith((".yaml", ".yml")) else None}  # fmt: skip
    if recipe.data.revision is None:
        paths["data.path"] = recipe.data.path
    for source in recipe.data.mixture:
        if source.revision is None:
            paths |= {f"data.mixture.{source.name}.path": source.path}
    if recipe.data.tokenizer == model.path:  # the model's own
        del paths["data.tokenizer"]
    here = {name: Path(path) for name, path in paths.items() if path and not hub_repo_of(path) and Path(path).exists()}
    found = []
    for name, path in here.items():
        if runs in path.absolute().parents:
            continue
        there = runs / path.name
        named = f"path: {there} in the recipe" if name.startswith("data.mixture.") else f"--set {name}={there}"
        fix = f"put it on the volume {request.site.volume_claim} and name it as the pods see it: {named}"
        if name in READ_FOR_PLAN:
            fix = (f"put it on the volume {request.site.volume_claim}, mount that at {request.site.runs} here too, as "
                   f"the plan needs the file, and name it there: --set {name}={there}")  # fmt: skip
        found.append(UserError("S054.path-machine-pods", where=str(path), fix=fix, name=name))
    return found


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
            raise UserError(
                "L059.cluster",
                where="the cluster's API",
                kind=kind,
                version=version,
                leave_out=LEAVE_OUT.get(kind, "k8s.kind"),
            ) from None

    def create(self, tree: Mapping[str, Any], *, dry_run: bool = False) -> bool:
        """Create an object; return False if there is one of this name."""
        resource = self.resource(tree["apiVersion"], tree["kind"])
        options = {"dry_run": "All"} if dry_run else {}
        with self._errors(tree["kind"], name_of(tree), ignored=HTTPStatus.CONFLICT):
            resource.create(body=dict(tree), namespace=self.namespace, field_manager="trimaran",
                            _request_timeout=REQUEST_SECONDS, **options)  # fmt: skip
            return True
        return False

    def patch(self, version: str, kind: str, name: str, change: Mapping[str, Any]) -> None:
        """Merge a change into an object."""
        with self._errors(kind, name):
            self.resource(version, kind).patch(
                body=dict(change), name=name, namespace=self.namespace, content_type="application/merge-patch+json",
                field_manager="trimaran", _request_timeout=REQUEST_SECONDS
            )  # fmt: skip

    def get(self, version: str, kind: str, name: str) -> dict[str, Any] | None:
        """Return an object; None if there is none of this name."""
        with self._errors(kind, name, ignored=HTTPStatus.NOT_FOUND):
            resource = self.resource(version, kind)
            return resource.get(name=name, namespace=self.namespace, _request_timeout=REQUEST_SECONDS).to_dict()
        return None

    def pods(self, name: str) -> list[dict[str, Any]]:
        """Return the pods of a job, the oldest first."""
        with self._errors("Pod", name):
            found = self.resource("v1", "Pod").get(
                namespace=self.namespace, label_selector=f"{INSTANCE}={name}", _request_timeout=REQUEST_SECONDS
            )
        pods = within(found.to_dict(), "items") or []
        return sorted(pods, key=lambda pod: str(within(pod, "metadata", "creationTimestamp")))

    def delete(self, version: str, kind: str, name: str) -> None:
        """Delete an object after what it owns; pods get their grace period."""
        with self._errors(kind, name, ignored=HTTPStatus.NOT_FOUND):
            resource = self.resource(version, kind)
            resource.delete(name=name, namespace=self.namespace, propagation_policy="Foreground",
                            _request_timeout=REQUEST_SECONDS)  # fmt: skip

    @contextmanager
    def _errors(self, kind: str, name: str, *, ignored: int = 0) -> Iterator[None]:
        """Raise the server's errors as UserErrors, except for that with the HTTP status `ignored`."""
        from kubernetes.client.exceptions import ApiException  # noqa: PLC0415
        from urllib3.exceptions import HTTPError  # noqa: PLC0415

        try:
            yield
        except ApiException as error:
            if error.status != ignored:
                raise _refused(error, kind, name) from None
        except (HTTPError, OSError) as error:
            raise _unreachable(self._client.configuration.host, error) from None


LEAVE_OUT = {"PodMonitor": "--site pod_monitor=false", "TrainJob": "--site kind=jobset, or kind=job",
             "TrainingRuntime": "--site kind=jobset, or kind=job", "JobSet": "--site kind=job",
             "PodGroup": "--site gang=none"}  # fmt: skip


def _refused(error: Any, kind: str, name: str) -> UserError:
    summary = error.summary() if hasattr(error, "summary") else str(error.reason)
    what = " ".join(str(summary).split())
    fix = "ask for the permission: kubectl auth can-i create jobs" if error.status in (401, 403) else "see the message"
    return UserError("L042.kubernetes-refuses", where=f"{kind}/{name}", fix=fix, status=error.status, text=what)


def _unreachable(host: str, error: Exception) -> UserError:
    return UserError("L042.api-server", where=host, kind=type(error).__name__)


@contextmanager
def open_api(context: str, namespace: str = "") -> Iterator[Api]:
    """Return the API server of a context of the kubeconfig."""
    if find_spec("kubernetes") is None:
        raise UserError("L042.package-kubernetes", where="--on k8s")
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
        raise UserError("L042.no-usable-kubeconfig", where="KUBECONFIG, or ~/.kube/config", error=error) from None
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


def _try_out(api: Api, documents: Sequence[Mapping[str, Any]]) -> str:
    """Let the API server check all objects without creating one, and return how many it accepts."""
    # It cannot check a TrainJob before its runtime exists, so only whether there are TrainJobs is asked.
    job = documents[-1]
    for tree in documents:
        if tree["kind"] == "TrainJob":
            api.resource(tree["apiVersion"], tree["kind"])
            is_new = api.get(tree["apiVersion"], tree["kind"], name_of(tree)) is None
        else:
            is_new = api.create(tree, dry_run=True)
        if tree is job and not is_new:
            raise _exists(str(tree["kind"]), name_of(tree))
    return f"{len(documents)} accepted"


def _exists(kind: str, name: str) -> UserError:
    return UserError("L043.already-name", where=f"{kind}/{name}", kind=kind, resource=kind.lower(), name=name)


def check_cluster(site: KubernetesSite, request: LaunchRequest | None) -> list[SiteCheck]:
    """Return what the cluster says about a launch. A cluster that cannot be asked is no error here, but of `submit`."""
    try:
        with open_api(site.context, site.namespace) as api:
            kind = KINDS[site.kind]
            checks = [
                SiteCheck(name="cluster", found=f"namespace {api.namespace}"),
                ask_check("volume claim", partial(_find_claim, api, site)),
                ask_check("kind", lambda: str(api.resource(kind.version, kind.kind).group_version)),
            ]
            if request is not None and site.image:
                checks.append(ask_check("objects", partial(_try_out, api, job_documents(request))))
            return checks
    except UserError as error:
        return [SiteCheck(name="cluster", found=f"not asked: {error.what}")]


def _find_claim(api: Api, site: KubernetesSite) -> str:
    """Return the volume of the runs. Raises if it does not exist, or not all nodes can mount it."""
    claim = api.get("v1", "PersistentVolumeClaim", site.volume_claim)
    if claim is None and site.storage_class:
        return f"{site.volume_claim} will be created"
    modes = within(claim, "spec", "accessModes") or []
    if claim is not None and "ReadWriteMany" in modes:
        return f"{site.volume_claim}, {within(claim, 'status', 'phase') or 'Pending'}"
    what = f"has access mode {', '.join(modes)}" if claim is not None else "does not exist"
    raise UserError("L059.volume-claim-pods", where="k8s.volume_claim", volume_claim=site.volume_claim, text=what)


def describe(job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], kind: JobKind) -> JobState:
    """Return the state of a job object and its pods."""
    conditions = {
        str(each.get("type")): each
        for each in within(job, "status", "conditions") or []
        if each.get("status") == "True"
    }
    running = [pod for pod in pods if within(pod, "status", "phase") == "Running"]
    nodes = tuple(sorted({str(within(pod, "spec", "nodeName")) for pod in running}))
    containers = [each for pod in pods for each in within(pod, "status", "containerStatuses") or []]
    ended = [within(each, "state", "terminated", "exitCode") for each in containers if each.get("name") == CONTAINER]
    codes = [code for code in ended if isinstance(code, int)]
    if kind.done in conditions:
        return JobState(state="done", native=kind.done, exit_code=0)
    if "Failed" in conditions:
        final = [code for code in codes if code in (EXIT_USER, EXIT_STUCK)]
        code = (final or [code for code in codes if code] or [None])[-1]
        reason = f"{conditions['Failed'].get('reason', '')}: {conditions['Failed'].get('message', '')}".strip(": ")
        return JobState(state="failed", native="Failed", reason=reason, exit_code=code)
    is_suspended = "Suspended" in conditions or within(job, "spec", "suspend") is True
    if is_suspended and not running:
        is_queued = "kueue.x-k8s.io/queue-name" in (within(job, "metadata", "labels") or {})
        return JobState(state="queued" if is_queued else "stopped", native="Suspended")
    if running:
        return JobState(state="running", native=f"{len(running)} of {len(pods)} pods run", nodes=nodes)
    return JobState(state="queued", native="Pending", reason=next(filter(None, map(_why_waiting, pods)), ""))


def _why_waiting(pod: Mapping[str, Any]) -> str:
    for each in within(pod, "status", "containerStatuses") or []:
        waiting = within(each, "state", "waiting") or {}
        if waiting.get("reason") in WAITING_REASONS:
            return f"{waiting['reason']}: {waiting.get('message', '')}".strip(": ")
    for each in within(pod, "status", "conditions") or []:
        if within(each, "type") == "PodScheduled" and within(each, "status") == "False":
            return f"{within(each, 'reason')}: {within(each, 'message') or ''}".strip(": ")
    return ""


def within(tree: Any, *path: str) -> Any:
    """Return the value at a path of an object of the API; None if there is nothing."""
    for step in path:
        tree = tree.get(step) if isinstance(tree, dict) else None
    return tree


def name_of(tree: Mapping[str, Any]) -> str:
    """Return the name of an object."""
    return str(within(tree, "metadata", "name") or within(tree, "metadata", "generateName") or "")
