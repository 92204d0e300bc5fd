"""Kubernetes: a TrainJob, a JobSet or an Indexed Job, with one pod for each node."""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import yaml
from pydantic import BaseModel

from trimaran.core import UserError, show_bytes
from trimaran.core.regular_files import read_regular_bytes
from trimaran.launch.targets.kubernetes_files import k8s_client
from trimaran.launch.targets.kubernetes_files.k8s_lint import lint_manifest
from trimaran.launch.targets.kubernetes_files.k8s_manifest import dump_documents, job_documents, storage_documents
from trimaran.launch.targets.kubernetes_files.k8s_pod import INSTANCE, grace_seconds
from trimaran.launch.targets.kubernetes_files.k8s_site import KubernetesSite
from trimaran.launch.targets.kubernetes_files.k8s_workloads import find_workloads
from trimaran.launch.targets.target import (
    JobCommands,
    JobRecord,
    JobState,
    LaunchFiles,
    LaunchRequest,
    SiteCheck,
    job_name,
)
from trimaran.models import hub_repo_of

JOB_FILE, STORAGE_FILE = "job.yaml", "storage.yaml"
MAX_MANIFEST_BYTES = 4 << 20
MAX_RECIPE_BYTES = 240 << 10  # `kubectl apply` keeps a copy in an annotation, of which there may be 256 KiB
READ_FOR_PLAN = ("model.path", "model.adapter.path", "data.tokenizer", "cluster")  # by the machine that launches
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class KubernetesTarget:
    """Writes a manifest, and submits it with the credentials of the user's kubeconfig."""

    name = "k8s"
    shares_disk = False  # the runs are on a volume claim
    site_model: ClassVar[type[BaseModel]] = KubernetesSite

    def check(self, request: LaunchRequest | None, site: Any) -> list[SiteCheck]:
        """Return what was checked: the site's section, our own manifest, and what the cluster has."""
        image = [_checked("image", site.image or "none", _image_error(site))]
        checks = image if request is None else self.check_request(request)
        return [*checks, *k8s_client.check_cluster(site, request)]

    def check_request(self, request: LaunchRequest) -> list[SiteCheck]:
        """Return what can be said about a launch without asking the cluster, as a dry run does."""
        image = _checked("image", request.site.image or "none", _image_error(request.site))
        paths = [_checked("path", each.where, each) for each in _path_errors(request)]
        return [image, *paths, *(_check_manifest(request) if request.site.image else [])]

    def check_file(self, path: Path) -> list[SiteCheck]:
        """Return what is wrong with anybody's manifest; one check without an error if nothing is."""
        documents = read_documents(path)
        found = lint_manifest(documents)
        if not found:
            names = [f"{each.kind}/{each.name}" for each in find_workloads(documents)]
            return [SiteCheck(name=path.name, found=f"no mistakes in {', '.join(names) or 'it: it starts no pods'}")]
        return [SiteCheck(name=path.name, found=each.what, error=each) for each in found]

    def render(self, request: LaunchRequest) -> LaunchFiles:
        """Return `job.yaml`, and `storage.yaml` if the site has the volume claim created."""
        apply = ["kubectl", *_context(request.site), "apply", "-f"]
        files = {JOB_FILE: dump_documents(job_documents(request), header=_header(request))}
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
        k8s_client.delete_job(job.details, job.native_id)
        return _submit(Path(job.folder), job.details)

    def state(self, job: JobRecord) -> JobState:
        """Return the state of the job object and its pods."""
        return k8s_client.job_state(job.details, job.native_id)

    def stop(self, job: JobRecord) -> None:
        """Ask the pods to stop: they get SIGTERM, and their grace period is longer than a save."""
        k8s_client.stop_job(job.details, job.native_id)

    def commands(self, job: JobRecord) -> JobCommands:
        """Return the commands of `kubectl`."""
        details, name = job.details, job.native_id.rpartition("/")[2]
        tool = ["kubectl", *(["--context", details["context"]] if details.get("context") else [])]
        tool += ["--namespace", str(details["namespace"])]
        target = f"{k8s_client.KINDS[details['kind']].resource}/{name}"
        suspend = ["patch", target, "--type=merge", "--patch", '{"spec": {"suspend": true}}']
        return JobCommands(
            follow=[*tool, "logs", "--follow", "--prefix", "--max-log-requests=100", f"--selector={INSTANCE}={name}"],
            stop=[*tool, *(["delete", target] if details.get("queued") else suspend)],
            resume=["trimaran", "jobs", job.id, "--resume"],
        )


def read_documents(path: Path) -> list[Any]:
    """Return the documents of a manifest; raise UserError if it is not YAML of Kubernetes objects."""
    fix = "name a YAML file as `kubectl apply -f` takes it"
    try:
        raw = read_regular_bytes(path, follow_links=True, limit_bytes=MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise UserError("L044", f"the manifest cannot be read: {error.strerror}", where=str(path), fix=fix) from None
    if len(raw) > MAX_MANIFEST_BYTES:
        raise UserError("L044", f"the manifest is larger than {show_bytes(MAX_MANIFEST_BYTES)}", where=str(path),
                        fix="check its jobs one by one")  # fmt: skip
    try:
        documents = [each for each in yaml.safe_load_all(raw) if each is not None]
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError("L044", f"this is not YAML: {error.problem}", where=f"{path}{line}", fix=fix) from None
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
        raise UserError("L044", "this is not YAML", where=str(path), fix=fix) from None
    if not any(isinstance(each, dict) and "kind" in each for each in documents):
        raise UserError("L044", "there is no Kubernetes object in it", where=str(path), fix=fix)
    return documents


def _submit(folder: Path, details: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    storage = folder / STORAGE_FILE
    documents = read_documents(storage) if storage.exists() else []
    return k8s_client.submit(details, [*documents, *read_documents(folder / JOB_FILE)])


def _context(site: KubernetesSite) -> list[str]:
    return ["--context", site.context] if site.context else []


def _header(request: LaunchRequest) -> str:
    """Return the comments at the top of the manifest."""
    lines = [
        "Written by `trimaran launch --on k8s`. Pods get the recipe and the plan below; the first creates the run.",
        f"Exit codes: 2 and 93 end the job; 75, and pods that Kubernetes evicts, are started again. A pod has "
        f"{grace_seconds(request)} s to save.",
    ]
    return "\n".join(lines)


def _checked(name: str, found: str, error: UserError | None = None) -> SiteCheck:
    return SiteCheck(name=name, found=found, error=error)


def _image_error(site: KubernetesSite) -> UserError | None:
    if site.image:
        return None
    return UserError("L040", "Kubernetes needs the container image of the pods", where="k8s.image",
                     fix="--site image=REGISTRY/trimaran:TAG, or image in the site file; see the Dockerfile"
                     )  # fmt: skip


def _check_manifest(request: LaunchRequest) -> list[SiteCheck]:
    documents = job_documents(request)
    findings = lint_manifest(documents)
    checks = [
        _checked("run directory", str(request.run_dir), _run_dir_error(request)),
        _checked("recipe and plan", show_bytes(_recipe_bytes(documents)), _size_error(documents)),
        _checked("metrics", str(request.recipe.telemetry.prometheus.port or "none"), _metrics_error(request)),
    ]
    checks += [_checked("manifest", each.what, each) for each in findings]
    return checks if findings else [*checks, _checked("manifest", f"{request.site.kind} {job_name(request.name)}")]


def _path_errors(request: LaunchRequest) -> list[UserError]:
    """Return a mistake for each path of the recipe that exists here and is not on the volume of the pods.

    What comes from the Hub is fetched again by the pods, to the same path.
    """
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
    return [UserError("S054", f"{name} is a path of this machine, which the pods do not have",
                      where=str(path), fix=_path_fix(name, path, request.site))
            for name, path in here.items() if runs not in path.absolute().parents]  # fmt: skip


def _path_fix(name: str, path: Path, site: KubernetesSite) -> str:
    there = PurePosixPath(site.runs) / path.name
    if name in READ_FOR_PLAN:
        return (f"put it on the volume {site.volume_claim}, mount that at {site.runs} here too, as the plan needs the "
                f"file, and name it there: --set {name}={there}")  # fmt: skip
    named = f"path: {there} in the recipe" if name.startswith("data.mixture.") else f"--set {name}={there}"
    return f"put it on the volume {site.volume_claim} and name it as the pods see it: {named}"


def _run_dir_error(request: LaunchRequest) -> UserError | None:
    runs = PurePosixPath(request.site.runs)
    if runs in PurePosixPath(request.run_dir).parents:
        return None
    return UserError("L041", f"the run directory is not on the volume of the runs, which is mounted at {runs}",
                     where=str(request.run_dir), fix=f"--run-dir {runs}/NAME, or set k8s.runs")  # fmt: skip


def _recipe_bytes(documents: Sequence[dict[str, Any]]) -> Any:
    return sum(len(text.encode()) for each in documents for text in each.get("data", {}).values())


def _size_error(documents: Sequence[dict[str, Any]]) -> UserError | None:
    if _recipe_bytes(documents) <= MAX_RECIPE_BYTES:
        return None
    return UserError("L057", f"recipe and plan are larger than {show_bytes(MAX_RECIPE_BYTES)}, which a ConfigMap that "
                     "`kubectl apply` creates may not be", where="recipe.yaml",
                     fix="name data files by a pattern instead of one by one")  # fmt: skip


def _metrics_error(request: LaunchRequest) -> UserError | None:
    server = request.recipe.telemetry.prometheus
    if not (request.site.pod_monitor and server.port and server.host in LOOPBACK):
        return None
    return UserError("L058", f"the metrics are served at {server.host}, which Prometheus cannot reach in a pod",
                     where="telemetry.prometheus.host", fix="--set telemetry.prometheus.host=0.0.0.0, or "
                     "--site pod_monitor=false")  # fmt: skip
