"""The rendered containers, run for real: two pods of two ranks each, their ends, and what the Job controller does."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.elastic_runs import assert_as_one_size, remove_pause
from tests.fault.harness import ROOT, Supervised, lines, wait_for
from tests.k8s_requests import launch_request
from tests.pod_runner import JobController, JobEnd, PodRunner, can_run_pods
from trimaran.launch import KubernetesTarget, LaunchRequest
from trimaran.runs import RunDirectory, create_run, read_holder, read_incidents

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not can_run_pods(), reason="namespaces need root and iproute2")]
STEPS = 16
SETTINGS = (f"train.steps={STEPS}", "train.deterministic=true", "checkpoint.every=5")
PLUGIN = {"TRIMARAN_TEST_PLUGIN": "tests.fault.plugin", "TRIMARAN_TEST_PAUSE": "0.2"}  # a step takes 0.2 s and more
SLOW = {"plugin": {"TRIMARAN_TEST_PLUGIN": "tests.chaos.plugin", "TRIMARAN_TEST_PAUSE": "1.0"}}  # see `remove_pause`


def pod_request(*settings: str, plugin: dict[str, str] | None = None, **site: Any) -> LaunchRequest:
    environ = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", **(plugin or PLUGIN)}
    return launch_request(*SETTINGS, *settings, python=sys.executable, env=environ, **site)


def documents(request: LaunchRequest) -> list[Any]:
    return list(yaml.safe_load_all(KubernetesTarget().render(request).files["job.yaml"]))


def run_of(runner: PodRunner) -> RunDirectory:
    return RunDirectory(runner.claim("trimaran-runs") / "first")


def last_step(run: RunDirectory) -> int:
    found = lines(run.metrics)
    return found[-1]["step"] if found else 0


def attempts(run: RunDirectory) -> list[int]:
    return [each["world_size"] for each in lines(run.attempts) if "world_size" in each]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the final weights of the same recipe and plan on this machine, without an interruption."""
    request = pod_request()
    run = create_run(tmp_path_factory.mktemp("alone") / "run", request.recipe, request.plan)
    with Supervised.again(run) as alone:
        assert alone.wait(240) == 0
    return (run.model / "model.safetensors").read_bytes()


def assert_bit_equal(run: RunDirectory, weights: bytes) -> None:
    assert [each["step"] for each in lines(run.metrics)] == [*range(1, STEPS + 1)]
    assert (run.model / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_a_job_goes_on_bit_equal_after_an_eviction(kind: str, tmp_path: Path, undisturbed: bytes) -> None:
    """Pod 1 gets SIGTERM and the condition DisruptionTarget; both pods save and end with 75, and are replaced."""
    with PodRunner(documents(pod_request(kind=kind)), tmp_path) as runner:
        job, run = JobController(runner), run_of(runner)
        job.run_until(lambda: last_step(run) >= 6)
        job.active[1].evict()
        assert job.run_to_end() == JobEnd("Complete"), job.logs()
    assert job.ends[:2] in ([(0, 75, "Ignore"), (1, 75, "Ignore")], [(1, 75, "Ignore"), (0, 75, "Ignore")])
    assert job.failures == 0
    assert attempts(run) == [4, 4]
    assert [(each.cause, each.action) for each in read_incidents(run)] == [("preempted", "saved")]
    assert_bit_equal(run, undisturbed)


ELASTIC = ("train.global_batch=6", "train.steps=100", "checkpoint.every=50")


def wait_for_sizes(job: JobController, run: RunDirectory, *expected: int) -> None:
    """Return when the run has started with each number of ranks, and has made a step with the last one."""
    job.run_until(lambda: attempts(run) == [*expected], 240)
    before = last_step(run)
    job.run_until(lambda: last_step(run) > before, 120)


def pod_that_coordinates(job: JobController, run: RunDirectory) -> int:
    holder = read_holder(run)
    assert holder is not None
    return next(index for index, pod in job.active.items() if holder.address.startswith(f"{pod.address}:"))


@pytest.mark.parametrize("who", ["coordinator", "other"])
def test_an_evicted_pod_that_finds_no_room_shrinks_the_run_and_its_replacement_grows_it(
    who: str, tmp_path: Path
) -> None:
    """Pods for three nodes, of which two find room; the run starts with these, as its cluster says."""
    request = pod_request(*ELASTIC, "faults.ranks=[1, 3]", cluster="2x1xcpu", **SLOW)
    with PodRunner(documents(request), tmp_path) as runner:
        job, run = JobController(runner), run_of(runner)
        job.max_pods = 2
        wait_for_sizes(job, run, 2)
        first = pod_that_coordinates(job, run)
        (other,) = job.active.keys() - {first}
        job.max_pods = 1
        job.active[first if who == "coordinator" else other].evict()
        wait_for_sizes(job, run, 2, 1)
        assert job.ends == [(first if who == "coordinator" else other, 75, "Ignore")]
        assert pod_that_coordinates(job, run) == (other if who == "coordinator" else first)
        job.max_pods = 2
        wait_for_sizes(job, run, 2, 1, 2)
        remove_pause(run)
        assert job.run_to_end() == JobEnd("Complete"), job.logs()
    assert job.failures == 0
    assert_as_one_size(run, tmp_path / "alone")


def test_a_pod_that_is_killed_is_replaced_and_counted(tmp_path: Path, undisturbed: bytes) -> None:
    with PodRunner(documents(pod_request()), tmp_path) as runner:
        job, run = JobController(runner), run_of(runner)
        job.run_until(lambda: last_step(run) >= 7)
        job.active[0].kill()
        assert job.run_to_end() == JobEnd("Complete"), job.logs()
    assert (0, 137, "Count") in job.ends
    assert job.failures == 1
    assert_bit_equal(run, undisturbed)


def test_a_suspended_job_saves_and_goes_on_later(tmp_path: Path, undisturbed: bytes) -> None:
    """What `trimaran jobs --stop` and `--resume` do."""
    trees = documents(pod_request())
    with PodRunner(trees, tmp_path) as runner:
        job, run = JobController(runner), run_of(runner)
        job.run_until(lambda: last_step(run) >= 6)
        job.suspend()
        job.run_until(lambda: not job.active)
        assert {code for _, code, _ in job.ends} == {75}
        saved = last_step(run)
        assert saved < STEPS
    with PodRunner(trees, tmp_path) as runner:
        assert JobController(runner).run_to_end() == JobEnd("Complete")
    assert_bit_equal(run, undisturbed)


def test_a_mistake_fails_the_job_at_once(tmp_path: Path) -> None:
    """The volume holds another run of this name: exit code 2, and no pod is started again."""
    request = pod_request()
    other = launch_request(
        "train.steps=3", "model.preset=null", "model.shape={layers: 1, hidden: 32, heads: 2, ffn: 64}"
    )
    with PodRunner(documents(request), tmp_path) as runner:
        path = runner.claim("trimaran-runs") / "first"
        create_run(path, other.recipe, other.plan)
        for each in [path, *path.rglob("*")]:
            os.chown(each, request.site.user, request.site.user)
        job = JobController(runner)
        assert job.run_to_end() == JobEnd("Failed", "PodFailurePolicy"), job.logs()
        assert len(runner.pods) == 2
        assert "L021" in job.logs()


def test_pods_have_names_index_secrets_and_no_privileges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the runner gives to a container is what the manifest says."""
    trees = documents(pod_request())
    probe = (
        "import os, socket, pathlib; "
        "print(socket.gethostname(), os.getuid(), os.environ['JOB_COMPLETION_INDEX'], os.environ['HF_TOKEN'], "
        "socket.gethostbyname('first-0.first'), 'CANARY' in os.environ, pathlib.Path('/etc/trimaran/launch').is_dir());"
        "status = pathlib.Path('/proc/self/status').read_text(); print(status); "
        "pathlib.Path('/runs/x').touch(); pathlib.Path('/tmp/x').touch(); pathlib.Path('/dev/shm/x').touch(); "
        "[pathlib.Path(each).touch() for each in ['/usr/x']]"
    )
    trees[-1]["spec"]["template"]["spec"]["containers"][0]["command"] = [sys.executable, "-c", probe]
    monkeypatch.setenv("CANARY", "1")
    with PodRunner(trees, tmp_path, secret_values={"trimaran-secrets": {"HF_TOKEN": "hf_value"}}) as runner:
        pod = runner.start(0)
        code = wait_for(lambda: pod.poll() is not None) and pod.poll()
        text = pod.log.read_text()
    assert f"first-0 1000 0 hf_value {pod.address} False True" in text.splitlines()
    assert "CapBnd:\t0000000000000000" in text
    assert "NoNewPrivs:\t1" in text
    assert code == 1
    assert "Read-only file system: '/usr/x'" in text
