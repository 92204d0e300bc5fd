"""The client of Kubernetes against a mock API server: submit, state, stop, resume, logs, and refusals."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cases import slow
from tests.k8s_requests import launch_request
from trimaran.core import UserError
from trimaran.launch import KINDS, JobRecord, KubernetesTarget, LaunchRequest, describe, new_record

kmock: Any = pytest.importorskip("kmock")
pytest.importorskip("kubernetes")
web: Any = pytest.importorskip("aiohttp.web")

RESOURCES = {
    "v1": {"ConfigMap": "configmaps", "Service": "services", "PersistentVolumeClaim": "persistentvolumeclaims",
           "Pod": "pods"},
    "batch/v1": {"Job": "jobs"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
    "jobset.x-k8s.io/v1alpha2": {"JobSet": "jobsets"},
    "trainer.kubeflow.org/v1alpha1": {"TrainJob": "trainjobs", "TrainingRuntime": "trainingruntimes"},
}  # fmt: skip


class Emulator(kmock.KubernetesEmulator):
    """Also knows trials: `dryRun=All` answers as a creation does, and stores nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.deletions: list[Any] = []

    async def _handle(self, request: Any) -> Any:
        if request.method == kmock.method.DELETE:
            self.deletions.append(request)
        if request.params.get("dryRun") == "All":
            key = (request.resource, request.namespace, request.data["metadata"]["name"])
            exists = key in self._objects and not self._objects[key].deleted
            body = {"kind": "Status", "status": "Failure", "code": 409, "message": "exists"} if exists else request.data
            return web.json_response(body, status=409 if exists else 201)
        return await super()._handle(request)

    async def _serve_list(self, request: Any) -> Any:
        """Also says what the list is of, and keeps to a selector of one label."""
        found = await super()._serve_list(request)
        name, _, value = request.params.get("labelSelector", "").partition("=")
        items = [each for each in found["items"] if not name or each["metadata"].get("labels", {}).get(name) == value]
        return found | {"kind": "List", "apiVersion": "v1", "items": items}


class Server:
    """The mock API server in a thread of its own."""

    def __init__(self) -> None:
        self.loop, self.ready = asyncio.new_event_loop(), threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self.ready.wait(20)

    def _run(self) -> None:
        self.loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self.stop = asyncio.Event()
        async with Emulator() as self.api, kmock.Server(self.api):
            for version, kinds in RESOURCES.items():
                group, _, number = version.rpartition("/")
                for kind, plural in kinds.items():
                    self.api.resources[group, number, plural] = {"kind": kind, "namespaced": True, "verbs": ["get"]}
            self.url = str(self.api.url)
            self.ready.set()
            await self.stop.wait()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(20)

    def object(self, version: str, plural: str, name: str) -> dict[str, Any]:
        group, _, number = version.rpartition("/")
        return dict(self.api.objects[kmock.resource(group, number, plural), "llm", name].raw)

    def add(self, version: str, plural: str, tree: dict[str, Any]) -> None:
        group, _, number = version.rpartition("/")
        self.api.objects[kmock.resource(group, number, plural), "llm", tree["metadata"]["name"]] = tree

    def names(self) -> list[str]:
        """Return the kinds of the objects that exist."""
        return sorted(each.raw["kind"] for each in self.api.objects.values() if not each.deleted)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A mock API server, and a kubeconfig that leads to it."""
    found = Server()
    context = {"cluster": "c", "user": "u", "namespace": "llm"}
    tree = {"apiVersion": "v1", "kind": "Config", "current-context": "lab",
            "clusters": [{"name": "c", "cluster": {"server": found.url.rstrip("/")}}],
            "users": [{"name": "u", "user": {"token": "canary"}}],
            "contexts": [{"name": "lab", "context": context}]}  # fmt: skip
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(tree))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    yield found
    found.close()


def submitted(request: LaunchRequest, folder: Path) -> JobRecord:
    """Write the files of a request, submit them, and return the record."""
    target = KubernetesTarget()
    folder.mkdir(exist_ok=True)
    for name, text in target.render(request).files.items():
        (folder / name).write_text(text)
    native_id, details = target.submit(request, folder)
    return new_record(request, "k8s", folder, native_id, details)


def pod(name: str, phase: str, **status: Any) -> dict[str, Any]:
    labels = {"app.kubernetes.io/instance": "first"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels, "creationTimestamp": name},
            "spec": {"nodeName": f"node-{name}"}, "status": {"phase": phase, **status}}  # fmt: skip


def ended(code: int) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "node", "state": {"terminated": {"exitCode": code}}}]}


@pytest.mark.parametrize(
    ("kind", "plural"), [("job", "jobs"), slow(("jobset", "jobsets")), slow(("trainjob", "trainjobs"))]
)
def test_a_job_is_submitted_followed_stopped_and_resumed(
    kind: str, plural: str, server: Server, tmp_path: Path
) -> None:
    target, request, version = KubernetesTarget(), launch_request(kind=kind), KINDS[kind].version
    job = submitted(request, tmp_path / "files")
    assert (job.native_id, job.id) == ("llm/first", "k8s-llm-first")
    written = [each["kind"] for each in yaml.safe_load_all((tmp_path / "files" / "job.yaml").read_text())]
    assert server.names() == sorted(written)
    assert target.state(job).state == "queued"
    server.add("v1", "pods", pod("first-0", "Running"))
    assert (target.state(job).state, target.state(job).nodes) == ("running", ("node-first-0",))
    with pytest.raises(UserError, match="L043"):
        target.submit_again(job)
    target.stop(job)
    assert server.object(version, plural, "first")["spec"]["suspend"] is True
    server.api.objects[kmock.resource("", "v1", "pods"), "llm", "first-0"].delete()
    assert target.state(job).state == "stopped"
    target.submit_again(job)
    assert server.object(version, plural, "first")["spec"]["suspend"] is False
    with pytest.raises(UserError, match="L043"):
        submitted(request, tmp_path / "again")


def test_a_job_in_a_queue_is_deleted_to_stop_it(server: Server, tmp_path: Path) -> None:
    target = KubernetesTarget()
    job = submitted(launch_request(kind="job", queue="research"), tmp_path / "files")
    assert target.state(job).state == "queued"
    target.stop(job)
    assert "Job" not in server.names()
    assert (target.state(job).state, target.state(job).native) == ("stopped", "NotFound")
    (deletion,) = server.api.deletions
    assert deletion.params["propagationPolicy"] == "Foreground"
    assert "gracePeriodSeconds" not in deletion.params  # the pods' own, which is longer than a save


def test_nothing_is_left_of_a_job_that_the_cluster_cannot_run(server: Server, tmp_path: Path) -> None:
    settings = ("telemetry.prometheus.port=9101", "telemetry.prometheus.host=0.0.0.0")
    with pytest.raises(UserError, match="PodMonitor") as caught:
        submitted(launch_request(*settings), tmp_path / "files")
    assert caught.value.code == "L059"
    assert "pod_monitor=false" in caught.value.fix
    assert server.names() == []


def test_the_check_asks_the_cluster(server: Server) -> None:
    target, request = KubernetesTarget(), launch_request()

    def codes() -> list[str]:
        return [each.error.code for each in target.check(request, request.site) if each.error]

    assert codes() == ["L059"]  # no volume claim
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "trimaran-runs"}}
    server.add("v1", "persistentvolumeclaims", claim | {"spec": {"accessModes": ["ReadWriteOnce"]}})
    assert codes() == ["L059"]
    server.add("v1", "persistentvolumeclaims", claim | {"spec": {"accessModes": ["ReadWriteMany"]}})
    assert codes() == []
    assert server.names() == ["PersistentVolumeClaim"]  # a check creates nothing


def test_a_cluster_that_does_not_answer_is_an_error_of_submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    request = launch_request()
    assert [each for each in KubernetesTarget().check(request, request.site) if each.error] == []
    with pytest.raises(UserError, match="L042"):
        submitted(request, tmp_path / "files")


def test_states_say_why() -> None:
    def state(conditions: list[dict[str, str]], pods: list[dict[str, Any]]) -> Any:
        return describe({"status": {"conditions": conditions}}, pods, KINDS["job"])

    failed = {"type": "Failed", "status": "True", "reason": "PodFailurePolicy", "message": "exit code 93"}
    found = state([failed], [pod("a", "Failed", **ended(75)), pod("b", "Failed", **ended(93)), pod("c", "Failed")])
    assert (found.state, found.exit_code, found.reason) == ("failed", 93, "PodFailurePolicy: exit code 93")
    done = state([{"type": "Complete", "status": "True"}], [pod("a", "Succeeded", **ended(0))])
    assert (done.state, done.exit_code) == ("done", 0)
    waiting = {"containerStatuses": [{"name": "node", "state": {"waiting": {"reason": "ImagePullBackOff"}}}]}
    assert state([], [pod("a", "Pending", **waiting)]).reason == "ImagePullBackOff"
    unscheduled = {
        "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "x"}]
    }
    assert state([], [pod("a", "Pending", **unscheduled)]).reason == "Unschedulable: x"


def test_commands_are_those_of_kubectl(server: Server, tmp_path: Path) -> None:
    job = submitted(launch_request(kind="job"), tmp_path / "files")
    commands = KubernetesTarget().commands(job)
    assert commands.follow[:4] == ["kubectl", "--namespace", "llm", "logs"]
    assert commands.stop[3:5] == ["patch", "job.batch/first"]
    assert commands.resume == ["trimaran", "jobs", "k8s-llm-first", "--resume"]
    assert "canary" not in str(job)
