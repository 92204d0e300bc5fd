"""A small Kubernetes cluster: the mock API server, and a controller that runs the pods of its Job for real."""

import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import kmock
import yaml

from tests.pod_runner import BACKOFF_SECONDS, JobController, JobEnd, Pod, PodRunner
from tests.unit.test_k8s_client import Server
from trimaran.launch import CONTAINER, INSTANCE

NAMESPACE = "llm"


class KubernetesCluster:
    """One Job at a time: created, suspended, continued and deleted by its clients.

    `secret_values` are Secrets by name. `environment` has KUBECONFIG. Pods are objects of the API until their Job is
    deleted.
    """

    def __init__(self, folder: Path, *, secret_values: Mapping[str, Mapping[str, str]] | None = None) -> None:
        folder.mkdir()
        self.folder, self._secrets = folder, secret_values or {}
        self.environment = {"KUBECONFIG": str(folder / "kubeconfig")}
        self.failure: BaseException | None = None
        self.end: JobEnd | None = None
        self._controller: JobController | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._server = Server()
        context = {"cluster": "c", "user": "u", "namespace": NAMESPACE}
        tree = {"apiVersion": "v1", "kind": "Config", "current-context": "lab",
                "clusters": [{"name": "c", "cluster": {"server": self._server.url.rstrip("/")}}],
                "users": [{"name": "u", "user": {"token": "of-the-user"}}],
                "contexts": [{"name": "lab", "context": context}]}  # fmt: skip
        Path(self.environment["KUBECONFIG"]).write_text(yaml.safe_dump(tree))
        claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "trimaran-runs"}}
        claim |= {"spec": {"accessModes": ["ReadWriteMany"]}}
        self._server.add("v1", "persistentvolumeclaims", claim)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(60)
        if self._controller is not None:
            self._controller.runner.__exit__(None, None, None)
        self._server.close()
        assert self.failure is None, self.failure

    @property
    def volume(self) -> Path:
        """The folder of the volume claim, which pods have at /runs."""
        return self.folder / "claims" / "trimaran-runs"

    def logs(self) -> str:
        return self._controller.logs() if self._controller else ""

    def _run(self) -> None:
        try:
            while not self._stop.wait(BACKOFF_SECONDS):
                self._reconcile()
        except BaseException as error:  # the test fails with it at the end of `with`
            self.failure = error

    def _reconcile(self) -> None:
        job = self._live("batch/v1", "jobs")
        if job is None:
            self._remove()
            return
        if self._controller is None:
            documents = [each.raw for each in self._all() if each.raw["kind"] in ("ConfigMap", "Service", "Job")]
            runner = PodRunner(documents, self.folder, secret_values=self._secrets)
            runner.network.open()
            self._controller = JobController(runner)
            self.end = None
        is_suspended = bool(job.raw["spec"].get("suspend"))
        if is_suspended and not self._controller.suspended:
            self._controller.suspend()
        elif not is_suspended:
            self._controller.suspended = False
        if self.end is None and (end := self._controller.reconcile()) is not None:
            self.end = end
            condition = {"type": end.condition, "status": "True", "reason": end.reason, "message": ""}
            job.patch({"status": {"conditions": [condition]}})
        self._publish_pods(self._controller)

    def _remove(self) -> None:
        """Let the pods of a deleted Job end, with their grace period."""
        if self._controller is None:
            return
        if not self._controller.suspended:
            self._controller.suspend()
        if self.end is None and self._controller.active:
            self._controller.reconcile()
            self._publish_pods(self._controller)
            return
        self._controller.runner.__exit__(None, None, None)
        self._controller = None
        for key, found in list(self._server.api.objects.items()):
            if not found.deleted and found.raw["kind"] == "Pod":
                self._server.api.objects[key].delete()

    def _publish_pods(self, controller: JobController) -> None:
        for number, pod in enumerate(controller.runner.pods):
            name = f"{pod.host}-{number}"
            labels = {INSTANCE: controller.workload.name}
            metadata = {"name": name, "labels": labels, "creationTimestamp": f"{number:06d}"}
            tree = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": _status(pod)}
            self._server.add("v1", "pods", tree | {"spec": {"nodeName": f"machine-{pod.index}"}})

    def _all(self) -> list[Any]:
        return [each for each in self._server.api.objects.values() if not each.deleted]

    def _live(self, version: str, plural: str) -> Any:
        """Return the only object of a kind; None if there is none."""
        group, _, number = version.rpartition("/")
        wanted = kmock.resource(group, number, plural)
        found = [each for key, each in self._server.api.objects.items() if key[0] == wanted and not each.deleted]
        return found[0] if found else None


def _status(pod: Pod) -> dict[str, Any]:
    code = pod.poll()
    if code is None:
        return {"phase": "Running"}
    ended = {"name": CONTAINER, "state": {"terminated": {"exitCode": code}}}
    return {"phase": "Failed" if code else "Succeeded", "containerStatuses": [ended]}
