"""Runs the containers of a Kubernetes manifest for real, without a cluster: a kubelet and a Job controller in small.

A pod is a process in its own network, pid, mount, host name and IPC namespaces, with the manifest's command, variables,
volumes, user, capabilities and read-only root file system; this machine's files are the image. Pods reach each other by
address and by the names of the Service. Of seccomp, resources, probes and scheduling nothing is emulated.
"""

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tests.k8s_requests import workload_of

SUBNET = "10.79.0"
ROOT = Path(__file__).parents[1]
SYSTEM = [Path("/") / name for name in ("bin", "lib", "lib64", "sbin", "usr")]
IMAGE = [*SYSTEM, Path(sys.base_prefix), Path(sys.prefix), ROOT / "src", ROOT / "tests"]  # folders, all read-only
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BACKOFF_SECONDS = 0.2  # the Job controller waits 10 s and more before it replaces a pod


def run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True)


def expand(text: str, environ: Mapping[str, str]) -> str:
    """Return a word of a command as the kubelet expands it: `$(NAME)` if it is known, `$$` for `$`."""
    out, at = "", 0
    while at < len(text):
        if text.startswith("$$", at):
            out, at = out + "$", at + 2
        elif text.startswith("$(", at) and (end := text.find(")", at)) > 0 and text[at + 2 : end] in environ:
            out, at = out + environ[text[at + 2 : end]], end + 1
        else:
            out, at = out + text[at], at + 1
    return out


class PodNetwork:
    """A bridge in a namespace of its own; each pod gets an address on it and a default route."""

    def __init__(self) -> None:
        self.name = f"tmk{os.getpid()}"
        self._last = 1

    def open(self) -> None:
        run("ip", "netns", "add", self.name)
        run("ip", "-n", self.name, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", self.name, "addr", "add", f"{SUBNET}.1/24", "dev", "br0")
        run("ip", "-n", self.name, "link", "set", "br0", "up")

    def add_pod(self) -> tuple[str, str]:
        """Return the namespace and the address of a new pod. No address is used twice."""
        self._last += 1
        pod, port, address = f"{self.name}p{self._last}", f"p{self._last}", f"{SUBNET}.{self._last}"
        run("ip", "netns", "add", pod)
        run("ip", "-n", pod, "link", "set", "lo", "up")
        run("ip", "-n", self.name, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", pod)
        run("ip", "-n", self.name, "link", "set", port, "master", "br0", "up")
        run("ip", "-n", pod, "addr", "add", f"{address}/24", "dev", "eth0")
        run("ip", "-n", pod, "link", "set", "eth0", "up")
        run("ip", "-n", pod, "route", "add", "default", "via", f"{SUBNET}.1")
        return pod, address

    def close(self) -> None:
        for at in range(2, self._last + 1):
            subprocess.run(["ip", "netns", "delete", f"{self.name}p{at}"], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "delete", self.name], check=False, capture_output=True)


@dataclass
class Pod:
    """A pod that was started. `conditions` are set from outside, as by the eviction API."""

    index: int
    host: str
    address: str
    process: subprocess.Popen[bytes]
    log: Path
    grace_seconds: float
    conditions: list[dict[str, str]] = field(default_factory=list)
    deadline: float | None = None
    was_killed: bool = False

    def terminate(self) -> None:
        """Send SIGTERM to the container's first process, and SIGKILL when the grace period is over."""
        self.deadline = time.monotonic() + self.grace_seconds
        for each in self.first():
            each.terminate()

    def evict(self) -> None:
        """Terminate it as a preemption, a drained node or a taint does."""
        self.conditions.append({"type": "DisruptionTarget", "status": "True"})
        self.terminate()

    def kill(self) -> None:
        """End it without notice, as the OOM killer does."""
        self.was_killed = True
        for each in self.first():
            each.kill()

    def first(self) -> list[psutil.Process]:
        """Return the container's first process; none if it has ended."""
        try:
            return psutil.Process(self.process.pid).children()[:1]
        except psutil.NoSuchProcess:
            return []

    def poll(self) -> int | None:
        """Return the exit code of the container; None while it runs. `unshare` does not pass on a signal."""
        if self.deadline is not None and time.monotonic() > self.deadline:
            self.kill()
        code = self.process.poll()
        return code if code is None or not self.was_killed else 128 + signal.SIGKILL


class PodRunner:
    """The kubelet: starts pods of a manifest. `folder` holds volumes and logs; `secrets` are Secrets by name."""

    def __init__(
        self, documents: Sequence[Any], folder: Path, *, secret_values: Mapping[str, Mapping[str, str]] | None = None
    ) -> None:
        self.workload = workload_of(documents)
        self.folder, self.network = folder, PodNetwork()
        self._secrets = secret_values or {}
        self._maps = {each["metadata"]["name"]: each["data"] for each in documents if each["kind"] == "ConfigMap"}
        self._names: dict[str, str] = {}  # addresses of pods, by host name
        self.pods: list[Pod] = []

    def __enter__(self) -> Self:
        self.network.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pod in self.pods:
            pod.process.kill()  # and with it everything in its pid namespace
            pod.process.wait()
        self.network.close()

    @property
    def prefix(self) -> str:
        """The host name of a pod without its index."""
        name = self.workload.name
        return name if self.workload.kind == "Job" else f"{name}-node-0"

    def claim(self, name: str) -> Path:
        """Return the folder of a volume claim."""
        path = self.folder / "claims" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def start(self, index: int) -> Pod:
        """Start the pod of an index."""
        pod = self.workload.pod
        (container,) = pod["containers"]
        namespace, address = self.network.add_pod()
        host = f"{self.prefix}-{index}"
        root = self.folder / f"{namespace}-{secrets.token_hex(2)}"
        environ = self._environment(container, host, index)
        command = [expand(word, environ) for name in ("command", "args") for word in container.get(name, [])]
        self._publish(host, address)
        script = root.with_suffix(".sh")
        script.write_text(self._script(root, host, container, command))
        log = root.with_suffix(".log")
        inner = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "bash", str(script)]
        with log.open("wb") as out:
            # Values of Secrets are only in the environment: a command line or a file would show them.
            process = subprocess.Popen(["ip", "netns", "exec", namespace, *inner], stdout=out, stderr=out, env=environ)
        started = Pod(index=index, host=host, address=address, process=process, log=log,
                      grace_seconds=pod["terminationGracePeriodSeconds"])  # fmt: skip
        self.pods.append(started)
        return started

    def _publish(self, host: str, address: str) -> None:
        """Update the names of the Service. Pods see the file, which is replaced in place."""
        self._names[host] = address
        service = self.workload.pod.get("subdomain", self.workload.name)
        lines = ["127.0.0.1 localhost"]
        lines += [f"{each} {name}.{service} {name} {service}" for name, each in self._names.items()]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")

    def _environment(self, container: Mapping[str, Any], host: str, index: int) -> dict[str, str]:
        environ = {"PATH": PATH, "HOSTNAME": host, "JOB_COMPLETION_INDEX": str(index)}
        for each in container.get("env", []):
            if "value" in each:
                environ[each["name"]] = expand(each["value"], environ)
                continue
            reference = each["valueFrom"]["secretKeyRef"]
            value = self._secrets.get(reference["name"], {}).get(reference["key"])
            assert value is not None or reference.get("optional"), f"no Secret for {each['name']}"
            environ |= {} if value is None else {each["name"]: value}
        return environ

    def _script(self, root: Path, host: str, container: Mapping[str, Any], command: Sequence[str]) -> str:
        """Return the script that builds the pod's file system in its mount namespace and becomes the container."""
        pod, security = self.workload.pod, container["securityContext"]
        user = pod["securityContext"]["runAsUser"]
        assert security["readOnlyRootFilesystem"]
        lines = ["set -e", "mount --make-rprivate /", f"hostname {shlex.quote(host)}", f"mkdir -p {q(root)}"]
        lines += [f"mount -t tmpfs -o mode=755 root {q(root)}"]
        volumes = [each["mountPath"] for each in container["volumeMounts"]]
        inside = [source for source in IMAGE if any(source.is_relative_to(each) for each in volumes)]
        lines += _image_mounts(root, [source for source in IMAGE if source not in inside])
        lines += [f"cp -a /etc {q(root / 'etc')}", f"mkdir {q(root / 'proc')} {q(root / 'dev')} {q(root / 'sys')}"]
        lines += [f"mount -t proc proc {q(root / 'proc')}", f"mount --rbind /sys {q(root / 'sys')}"]
        for name in DEVICES:
            lines.append(f"touch {q(root / 'dev' / name)}; mount --bind /dev/{name} {q(root / 'dev' / name)}")
        lines += [f"mount --bind {q(self.folder / 'hosts')} {q(root / 'etc/hosts')}"]
        lines += [*self._mounts(root, container), *_image_mounts(root, inside)]  # a checkout in /tmp is in a volume
        lines += [f"mount -o remount,ro {q(root)}", f"cd {q(root)}"]
        drop = "--bounding-set=-all" if "ALL" in security["capabilities"]["drop"] else ""
        become = f"setpriv --reuid={user} --regid={user} --groups={pod['securityContext']['fsGroup']} {drop}"
        become += "" if security["allowPrivilegeEscalation"] else " --no-new-privs"
        lines += [f"exec chroot {q(root)} env -u PWD -u OLDPWD -u SHLVL {become} -- {shlex.join(command)}"]
        return "\n".join(lines) + "\n"

    def _mounts(self, root: Path, container: Mapping[str, Any]) -> list[str]:
        """Return the commands that mount the container's volumes, as the kubelet does."""
        volumes, group = {each["name"]: each for each in self.workload.pod["volumes"]}, self._group
        lines: list[str] = []
        for mount in container["volumeMounts"]:
            volume, place = volumes[mount["name"]], root / mount["mountPath"].lstrip("/")
            if "emptyDir" in volume:
                lines += [f"mkdir -p {q(place)}", f"mount -t tmpfs -o mode=1777 {mount['name']} {q(place)}"]
            elif "persistentVolumeClaim" in volume:
                source = self.claim(volume["persistentVolumeClaim"]["claimName"])
                lines += [f"chgrp {group} {q(source)}", f"chmod 2775 {q(source)}"]
                lines += [f"mkdir -p {q(place)}", f"mount --bind {q(source)} {q(place)}"]
            else:
                source = self._config_file(volume["configMap"]["name"], mount["subPath"])
                lines += [f"mkdir -p {q(place.parent)}", f"touch {q(place)}", f"mount --bind {q(source)} {q(place)}"]
                lines += [f"mount -o remount,bind,ro {q(place)}"] if mount.get("readOnly") else []
        return lines

    @property
    def _group(self) -> int:
        return int(self.workload.pod["securityContext"]["fsGroup"])

    def _config_file(self, name: str, key: str) -> Path:
        """Return the file of a key. The volume has links, as the kubelet's: `KEY` -> `..data/KEY` -> `..NUMBER/KEY`."""
        folder = self.folder / "config" / name
        if not folder.exists():
            (folder / "..1").mkdir(parents=True)
            (folder / "..data").symlink_to("..1")
            for each, text in self._maps[name].items():
                (folder / "..1" / each).write_text(text)
                (folder / each).symlink_to(f"..data/{each}")
        return (folder / key).resolve()  # subPath mounts the file itself


def q(path: Path | str) -> str:
    return shlex.quote(str(path))


@dataclass
class JobEnd:
    """How a Job ended: `Complete`, or `Failed` and its reason."""

    condition: str
    reason: str = ""


class JobController:
    """Keeps one pod for each index, and applies the rules of the Job's spec to pods that end."""

    def __init__(self, runner: PodRunner) -> None:
        self.runner, self.workload = runner, runner.workload
        spec = self.workload.spec
        assert spec["completionMode"] == "Indexed"
        assert spec["podReplacementPolicy"] == "Failed"  # a pod is replaced when it has ended, not before
        assert self.workload.pod["restartPolicy"] == "Never"
        self.active: dict[int, Pod] = {}
        self.succeeded: set[int] = set()
        self.ends: list[tuple[int, int, str]] = []  # index, exit code, action
        self.failures = 0
        self.suspended = False
        self.max_pods = self.workload.spec["completions"]  # that find room; the others wait

    def reconcile(self) -> JobEnd | None:
        """Do what the controller would do now; return the end of the Job when it has one."""
        for index, pod in list(self.active.items()):
            code = pod.poll()
            if code is not None:
                del self.active[index]
                if (end := self._pod_ended(pod, code)) is not None:
                    return self._end(end)
        if self._is_complete():
            return self._end(JobEnd("Complete"))
        if not self.suspended:
            for index in range(self.workload.spec["completions"]):
                has_room = len(self.active) < self.max_pods
                if has_room and index not in self.active and index not in self.succeeded:
                    self.active[index] = self.runner.start(index)
        return None

    def suspend(self) -> None:
        """Stop all pods with their grace period, and start none."""
        self.suspended = True
        for pod in self.active.values():
            pod.terminate()

    def run_until(self, condition: Callable[[], Any], seconds: float = 120.0) -> Any:
        """Reconcile until `condition` is true, and return it; the Job must not end before."""
        until = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < until, f"waited too long\n{self.logs()}"
            end = self.reconcile()
            assert end is None, f"{end}\n{self.logs()}"
            time.sleep(BACKOFF_SECONDS)
        return found

    def run_to_end(self, seconds: float = 240.0) -> JobEnd:
        """Reconcile until the Job ends."""
        until = time.monotonic() + seconds
        while (end := self.reconcile()) is None:
            assert time.monotonic() < until, f"waited too long\n{self.logs()}"
            time.sleep(BACKOFF_SECONDS)
        return end

    def logs(self) -> str:
        return "\n".join(f"--- {pod.host} {pod.address}\n{pod.log.read_text()[-3000:]}" for pod in self.runner.pods)

    def _pod_ended(self, pod: Pod, code: int) -> JobEnd | None:
        if code == 0:
            self.succeeded.add(pod.index)
            self.ends.append((pod.index, code, "Succeeded"))
            return None
        action = self._action(pod, code)
        self.ends.append((pod.index, code, action))
        if action == "FailJob":
            return JobEnd("Failed", "PodFailurePolicy")
        self.failures += action == "Count"
        return JobEnd("Failed", "BackoffLimitExceeded") if self.failures > self.workload.spec["backoffLimit"] else None

    def _action(self, pod: Pod, code: int) -> str:
        """Return the action of the first rule of the pod failure policy that fits."""
        for rule in self.workload.spec["podFailurePolicy"]["rules"]:
            if "onExitCodes" in rule:
                is_in = code in rule["onExitCodes"]["values"]
                if is_in == (rule["onExitCodes"]["operator"] == "In"):
                    return rule["action"]
            elif any(each in pod.conditions for each in rule["onPodConditions"]):
                return rule["action"]
        return "Count"

    def _is_complete(self) -> bool:
        needed = self.workload.spec["completions"]
        for rule in self.workload.spec.get("successPolicy", {}).get("rules", []):
            needed = min(needed, rule.get("succeededCount", needed))
        return len(self.succeeded) >= needed

    def _end(self, end: JobEnd) -> JobEnd:
        """End the pods that are left, with their grace period."""
        for pod in self.active.values():
            pod.terminate()
        for pod in self.active.values():
            while pod.poll() is None:
                time.sleep(BACKOFF_SECONDS)
        self.active.clear()
        return end


def _image_mounts(root: Path, sources: Sequence[Path]) -> Iterator[str]:
    """Yield the commands that mount folders of this machine read-only, as the image's."""
    for source in sources:
        place = root / str(source).lstrip("/")
        if source.is_symlink():
            yield f"ln -s {q(os.readlink(source))} {q(place)}"
        elif source.is_dir():
            yield from (f"mkdir -p {q(place)}", f"mount --bind {q(source)} {q(place)}")
            yield f"mount -o remount,bind,ro {q(place)}"


def can_run_pods() -> bool:
    """Return whether this user may create namespaces, and has the tools."""
    return os.geteuid() == 0 and all(shutil.which(each) for each in ("ip", "unshare", "setpriv", "chroot"))
