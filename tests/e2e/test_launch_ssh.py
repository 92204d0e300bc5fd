"""`trimaran launch --on ssh` with a real sshd, on machines that are namespaces; and `--on local` as two nodes."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.numpy import load_file

from tests.elastic_runs import assert_as_one_size, remove_pause, sizes
from tests.fault.harness import ROOT, TINY, lines, wait_for
from tests.ssh_machines import MISSING, SshMachines, make_key
from trimaran.runs import RunDirectory, create_run, open_run, read_incidents

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
HOSTILE = 'it\'s $(touch x) "q" \\ é日'
STEPS = 12


def settings(*more: str, cluster: str = "2x2xcpu") -> list[str]:
    values = (*TINY, f"cluster={cluster}", f"train.steps={STEPS}", "checkpoint.every=4", *more)
    return [f"--set={value}" for value in values]


def calm_weights(run: RunDirectory, folder: Path) -> dict[str, Any]:
    """Return the weights of an undisturbed run on this machine with the same recipe and plan."""
    calm = create_run(folder, run.read_recipe(), run.read_plan())
    command = [sys.executable, "-m", "trimaran.launch", str(calm.path), "--no-check"]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0
    return weights(calm)


def weights(run: RunDirectory) -> dict[str, Any]:
    return {name: array.tobytes() for name, array in load_file(run.model / "model.safetensors").items()}


def steps(run: RunDirectory) -> int:
    found = lines(run.metrics)
    return found[-1]["step"] if found else 0


def trimaran(machines: SshMachines, *words: str) -> subprocess.CompletedProcess[str]:
    return machines.run([sys.executable, "-m", "trimaran", *words])


def the_job(machines: SshMachines) -> dict[str, Any]:
    (job,) = json.loads(trimaran(machines, "jobs", "--json").stdout)["jobs"]
    return job


def test_a_run_over_ssh_has_the_same_weights_as_on_one_machine_and_its_logs_come_back(tmp_path: Path) -> None:
    path = tmp_path / HOSTILE
    with SshMachines(tmp_path / "machines") as machines:
        done = machines.launch(path, "--wait", *settings())
        assert done.returncode == 0, done.stdout + done.stderr
        job = the_job(machines)
        assert (job["state"]["state"], job["state"]["exit_code"], job["step"]) == ("done", 0, STEPS)
    run = open_run(path)
    assert weights(run) == calm_weights(run, tmp_path / "calm")
    assert [each["world_size"] for each in lines(run.attempts) if "world_size" in each] == [4]
    names = {line["data"]["host"] for rank in range(4) for line in lines(run.events(rank)) if line["kind"] == "start"}
    assert len(names) == 2, "ranks ran on both machines"
    log = (path / "launch" / "launch.log").read_text()
    assert any(f"[{host}] " in log and "2 of 2 nodes" in log for host in machines.hosts), log
    assert all((path / "logs" / f"node-{host}.log").is_file() for host in machines.hosts)
    assert not list(tmp_path.rglob("x"))


def test_a_stopped_run_is_resumed_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    path = tmp_path / "run"
    pause = f"TRIMARAN_TEST_PLUGIN: tests.fault.plugin, TRIMARAN_TEST_PAUSE: '1', PYTHONPATH: '{ROOT}'"
    slow = f"--site=environment={{OMP_NUM_THREADS: '1', {pause}}}"
    with SshMachines(tmp_path / "machines") as machines:
        begun = machines.launch(path, slow, *settings())
        assert begun.returncode == 0, begun.stdout + begun.stderr
        run, job = open_run(path), the_job(machines)
        assert job["state"]["state"] == "running", job["state"]
        wait_for(lambda: steps(run) >= 3, 90)
        assert trimaran(machines, "jobs", job["id"], "--stop").returncode == 0
        stopped = trimaran(machines, "jobs", job["id"], "--wait")
        assert stopped.returncode == 75, stopped.stdout + stopped.stderr
        assert the_job(machines)["state"]["state"] == "stopped"
        assert 3 <= steps(run) < STEPS
        resumed = trimaran(machines, "jobs", job["id"], "--resume", "--wait")
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert weights(run) == calm_weights(run, tmp_path / "calm")
    assert [line["step"] for line in lines(run.metrics)] == list(range(1, STEPS + 1))


def test_a_lost_connection_does_not_disturb_the_run(tmp_path: Path) -> None:
    path, output = tmp_path / "run", tmp_path / "output"
    with SshMachines(tmp_path / "machines") as machines:
        prepared = machines.launch(path, "--dry-run", f"--out={tmp_path / 'files'}", *settings())
        assert prepared.returncode == 0, prepared.stderr
        launch = tmp_path / "files"
        recipe = RunDirectory(launch)
        run = create_run(path, recipe.read_recipe(), recipe.read_plan())
        process = machines.start(["bash", str(launch / "launch.sh")], output)  # by hand, without `trimaran launch`
        wait_for(lambda: "2 of 2 nodes" in output.read_text(), 90)
        for each in psutil.Process(process.pid).children(recursive=True):
            if each.name() == "ssh":
                each.kill()
        wait_for(lambda: "what runs there goes on" in output.read_text(), 30)
        assert process.wait(120) == 0, output.read_text()
    copies = "".join((launch / f"node-{host}.log").read_text() for host in machines.hosts)
    assert copies.count("2 of 2 nodes") == 1
    assert "all steps are done" in copies
    assert [each["world_size"] for each in lines(run.attempts) if "world_size" in each] == [4]


def wait_for_sizes(run: RunDirectory, *expected: int, seconds: float = 120.0) -> None:
    """Return when the run has started with each number of ranks, and has made a step with the last one."""
    wait_for(lambda: sizes(run) == [*expected], seconds)
    before = steps(run)
    wait_for(lambda: steps(run) > before, seconds)


def test_a_run_over_ssh_shrinks_when_a_machine_is_lost_and_grows_when_it_is_back(tmp_path: Path) -> None:
    path, output = tmp_path / "run", tmp_path / "output"
    more = ("faults.ranks=[2, 4]", "train.steps=120", "plan.mesh.dp_replicate=4", "checkpoint.every=50")
    pause = f"TRIMARAN_TEST_PLUGIN: tests.chaos.plugin, TRIMARAN_TEST_PAUSE: '1.0', PYTHONPATH: '{ROOT}'"
    slow = f"--site=environment={{OMP_NUM_THREADS: '1', {pause}}}"
    with SshMachines(tmp_path / "machines") as machines:
        begun = machines.launch(path, slow, *settings(*more))
        assert begun.returncode == 0, begun.stdout + begun.stderr
        run, script = open_run(path), str(path / "launch" / "launch.sh")
        wait_for_sizes(run, 4)
        machines.lose(machines.hosts[1])
        wait_for_sizes(run, 4, 2)
        machines.boot(machines.hosts[1])
        wait_for(lambda: machines.ssh(machines.hosts[1], "true").returncode == 0)
        again = machines.run(["bash", script, "--start"])
        assert again.returncode == 0, again.stdout + again.stderr
        wait_for_sizes(run, 4, 2, 4)
        remove_pause(run)
        process = machines.start(["bash", script, "--follow"], output)
        assert process.wait(180) == 0, output.read_text()
        assert the_job(machines)["state"]["state"] == "done"
    assert [(each.cause, each.action) for each in read_incidents(run) if each.cause == "host"] == [("host", "resized")]
    assert_as_one_size(run, tmp_path / "calm")


def test_machines_without_a_shared_disk_run_with_the_same_weights_and_the_token_is_in_no_command_line(
    tmp_path: Path,
) -> None:
    disk, launch = tmp_path / "disk", tmp_path / "files"
    disk.mkdir()
    with SshMachines(tmp_path / "machines", own_disks=disk) as machines:
        words = ["--site=disk=own", f"--out={launch}"]
        begun = machines.launch(disk / "run", *words, *settings())
        assert begun.returncode == 0, begun.stdout + begun.stderr
        token = (launch / "token").read_text()
        assert (launch / "token").stat().st_mode & 0o077 == 0
        assert token not in "".join(machines.ssh(host, "ps axww").stdout for host in machines.hosts)
        assert machines.run(["bash", str(launch / "launch.sh"), "--follow"]).returncode == 0
        shown = machines.ssh(machines.hosts[0], f"base64 {disk}/run/model/model.safetensors").stdout
    assert not [file for file in launch.iterdir() if file.name != "token" and token in file.read_text()]
    (tmp_path / "model.safetensors").write_bytes(base64.b64decode(shown))
    ours = {name: array.tobytes() for name, array in load_file(tmp_path / "model.safetensors").items()}
    assert ours == calm_weights(RunDirectory(launch), tmp_path / "calm")


def refused(machines: SshMachines, path: Path, *words: str, hosts: str = "") -> str:
    """Return what a launch says that is refused before anything was started."""
    answer = machines.launch(path, *settings(), *words, hosts=hosts)
    assert answer.returncode == 2, answer.stdout + answer.stderr
    assert not path.exists()
    for host in machines.hosts:
        assert "trimaran.launch" not in machines.ssh(host, "ps ax").stdout
    return answer.stderr


def test_nothing_is_started_if_a_host_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with SshMachines(tmp_path / "machines") as machines:
        first, second = machines.hosts
        down = refused(machines, path, "--site=connect_timeout_seconds=2", hosts=f"{first},10.81.0.9")
        assert down.startswith("L026: 10.81.0.9 cannot be reached"), down
        login = refused(machines, path, hosts=f"nobody@{first},{second}")
        assert f"L026: {first} cannot be reached: it refuses the login\n  where: nobody@{first}\n" in login, login
        python = refused(machines, path, "--site=python=/usr/bin/no-python")
        assert f"L027: Python does not run on {first}" in python, python
        make_key(machines.folder / "host_key-other")
        machines.know_hosts({second: "other"})
        changed = refused(machines, path)
        assert f"L026: {second} cannot be reached: its key is not the one that is known here" in changed, changed
        assert "ssh-keygen -R" in changed
        machines.know_hosts()
        subprocess.run(["ip", "-n", machines.namespace(second), "route", "add", "blackhole", f"{first}/32"], check=True)
        apart = refused(machines, path)
        assert apart.startswith("L013: "), apart
        assert f"{second} " in apart


def test_a_host_with_another_torch_or_another_disk_is_refused(tmp_path: Path) -> None:
    disk, path = tmp_path / "disk", tmp_path / "disk" / "run"
    disk.mkdir()
    (metadata,) = [Path(str(file.locate())) for file in distribution("torch").files or () if file.name == "METADATA"]
    other = tmp_path / "METADATA"
    other.write_text(metadata.read_text().replace("\nVersion: 2.", "\nVersion: 1.", 1))
    with SshMachines(tmp_path / "machines", own_disks=disk) as machines:
        apart = refused(machines, path)
        assert f"L014: {', '.join(machines.hosts)} do not see {disk} of this machine" in apart, apart
        assert "--site disk=" in apart
        own = refused(machines, path, "--site=disk=hosts")
        assert f"L014: {machines.hosts[1]} do not see {disk} of {machines.hosts[0]}" in own, own
        inside = machines.inside(machines.hosts[1], ["mount", "--bind", str(other), str(metadata)])
        assert inside.returncode == 0, inside.stderr
        torch = refused(machines, tmp_path / "run")
        assert "L027: torch is 1." in torch, torch
        assert f"where: {machines.hosts[1]}" in torch


def launch_local(path: Path, *words: str, state: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return call_local("launch", "--on", "local", "--run-dir", str(path), *words, state=state, **variables)


def call_local(*words: str, state: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trimaran", *words]
    known = environment(state) | variables
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, env=known)


def environment(state: Path) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(state), "XDG_CONFIG_HOME": str(state)}


def test_two_nodes_on_this_machine_are_two_supervisors_with_their_own_addresses(tmp_path: Path) -> None:
    path = tmp_path / HOSTILE
    done = launch_local(path, "--wait", *settings(), state=tmp_path / "state")
    assert done.returncode == 0, done.stdout + done.stderr
    run = open_run(path)
    assert weights(run) == calm_weights(run, tmp_path / "calm")
    logs = {file.name for file in (path / "logs").glob("node-*.log")}
    assert logs == {"node-127.0.0.2.log", "node-127.0.0.3.log"}
    term = json.loads(next(run.lease.glob("term-*.json")).read_text())
    assert term["address"].partition(":")[0] in ("127.0.0.2", "127.0.0.3")
    assert "[127.0.0." in (path / "logs" / "launch.log").read_text()
    assert not list(tmp_path.rglob("x"))


def test_a_local_job_shrinks_when_a_node_is_lost_and_grows_when_it_is_started_again(tmp_path: Path) -> None:
    path, state = tmp_path / "run", tmp_path / "state"
    more = ("faults.ranks=[2, 4]", "train.steps=120", "plan.mesh.dp_replicate=4", "checkpoint.every=50")
    plugin = {"TRIMARAN_TEST_PLUGIN": "tests.chaos.plugin", "TRIMARAN_TEST_PAUSE": "1.0", "PYTHONPATH": str(ROOT)}
    begun = launch_local(path, "--no-check", *settings(*more), state=state, **plugin)
    assert begun.returncode == 0, begun.stdout + begun.stderr
    run = open_run(path)
    wait_for_sizes(run, 4)
    (supervisor,) = [
        each for each in psutil.process_iter(["cmdline"])
        if str(path) in (each.info["cmdline"] or ()) and "--address=127.0.0.3" in each.info["cmdline"]
    ]  # fmt: skip
    command = supervisor.cmdline()
    supervisor.kill()
    wait_for_sizes(run, 4, 2)
    with (tmp_path / "node.log").open("wb") as log:
        again = subprocess.Popen(command, env=environment(state) | plugin, stdout=log, stderr=log)
    try:
        wait_for_sizes(run, 4, 2, 4)
        remove_pause(run)
        assert again.wait(180) == 0
    finally:
        again.kill()
        again.wait()
    (job,) = json.loads(call_local("jobs", "--json", state=state).stdout)["jobs"]
    ended = call_local("jobs", job["id"], "--wait", state=state)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [(each.cause, each.action) for each in read_incidents(run) if each.cause == "host"] == [("host", "resized")]
    assert_as_one_size(run, tmp_path / "calm")


def test_a_local_job_is_stopped_with_a_checkpoint_and_resumed(tmp_path: Path) -> None:
    path, state = tmp_path / "run", tmp_path / "state"
    begun = launch_local(
        path, "--json", *settings("train.steps=400", "checkpoint.every=50", cluster="2xcpu"), state=state
    )
    assert begun.returncode == 0, begun.stdout + begun.stderr
    job, run = json.loads(begun.stdout), open_run(path)
    assert job["state"]["state"] == "running"
    wait_for(lambda: steps(run) >= 5, 90)

    def jobs(*words: str) -> subprocess.CompletedProcess[str]:
        command: Sequence[str] = [sys.executable, "-m", "trimaran", "jobs", job["id"], *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, env=environment(state))

    assert jobs("--stop").returncode == 0
    stopped = jobs("--wait", "--json")
    assert stopped.returncode == 75, stopped.stdout + stopped.stderr
    reached = steps(run)
    assert 5 <= reached < 400
    resumed = jobs("--resume", "--wait")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [line["step"] for line in lines(run.metrics)] == list(range(1, 401))
