"""The ssh target's script: quoting, exit codes, secrets and signals, with a local shell in place of sshd.

`tests/e2e/test_launch_ssh.py` has a real sshd.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cases import slow
from tests.fault.harness import wait_for
from tests.unit.test_launch_core import request
from trimaran.core import UserError
from trimaran.launch import (
    SHARED_FUNCTIONS,
    LaunchRequest,
    SshHost,
    SshSite,
    SshTarget,
    choose_code,
    connection_error,
    detached_command,
    site_section,
    ssh_script,
)
from trimaran.runs import add_observation, observe

HOSTILE = 'it\'s $(touch x) `touch x` "q" \\ ; touch x\n# a b é日'
# As sshd does it: the last argument is a command for the login shell. The host is the argument before it.
SHELL = """#!/bin/bash
host=${@: -2:1}
[ ! -e "$FAKE/down-$host" ] || { echo "ssh: connect to host $host port 22: Connection refused" >&2; exit 255; }
cd / && HOST=$host exec sh -c "${@: -1}"
"""


def ssh_request(run_dir: Path, **site: Any) -> LaunchRequest:
    section = SshSite.model_validate({"python": sys.executable} | site)
    return replace(request(), run_dir=run_dir, site=section, hosts=("gpu-1", "admin@gpu-2:2222"), name=HOSTILE)


class Script:
    """`launch.sh` for a command in place of the supervisor, and what its nodes do."""

    def __init__(self, folder: Path, command: list[str], secrets: tuple[str, ...] = ()) -> None:
        self.folder, self.nodes = folder / HOSTILE, folder / f"nodes {HOSTILE}"
        self.folder.mkdir()
        (folder / "ssh").write_text(SHELL)
        (folder / "ssh").chmod(0o755)
        self.fake = folder
        hosts = (SshHost(host="gpu-1"), SshHost(host="gpu-2", user="admin", port=2222))
        detached = detached_command(sys.executable, folder=str(folder), environment={"GIVEN": HOSTILE})
        self.text = ssh_script(name=HOSTILE, ranks_per_node=2, hosts=hosts, min_hosts=2, ssh=["ssh", "-T"],
                               detached=detached, command=command, folder=self.nodes, logs=self.nodes,
                               secrets=secrets)  # fmt: skip
        self.path = self.folder / "launch.sh"
        self.path.write_text(self.text)

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        ours = {"PATH": f"{self.fake}:{os.environ['PATH']}", "FAKE": str(self.fake)}
        return os.environ | ours | dict(more or {})

    def run(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["bash", str(self.path), *words], capture_output=True, text=True, timeout=60,
                              env=self.environment(more), check=False, stdin=subprocess.DEVNULL)  # fmt: skip

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.fake / "output").open("wb") as output:
            return subprocess.Popen(["bash", str(self.path), *words], stdout=output, stderr=output,
                                    env=self.environment(), stdin=subprocess.DEVNULL, start_new_session=True
                                    )  # fmt: skip


def python(source: str, *words: str) -> list[str]:
    return [sys.executable, "-c", source, *words]


def test_the_rendered_script_is_valid_deterministic_and_runs_one_supervisor_on_each_host() -> None:
    launch = ssh_request(Path("/shared/runs/tiny"), options=["ProxyJump=login"], environment={"NCCL_DEBUG": "INFO"})
    files = SshTarget().render(launch)
    assert files == SshTarget().render(launch)
    assert (files.main, files.submit) == ("launch.sh", [["bash", "launch.sh"]])
    text = files.files["launch.sh"]
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    settings = dict(line.split("=", 1) for line in text.splitlines() if line.startswith(("command=", "ssh=", "hosts=")))
    assert shlex.split(shlex.split(settings["command"])[0]) == [
        sys.executable, "-m", "trimaran.launch", "/shared/runs/tiny", "--nodes=2", "--ranks-per-node=2",
        "--address=auto", "--peers=gpu-1,gpu-2"]  # fmt: skip
    assert settings["hosts"] == "(gpu-1 gpu-2-2222)"
    words = shlex.split(settings["ssh"].strip("()"))
    assert words[:4] == ["ssh", "-T", "-o", "ProxyJump=login"]
    assert {"BatchMode=yes", "StrictHostKeyChecking=yes", "ConnectTimeout=10"} <= set(words)
    assert 'gpu-2-2222) "${ssh[@]}" -p 2222 -l admin -- gpu-2 "$2" ;;' in text


def test_a_hostile_name_reaches_the_command_unchanged_and_runs_nothing(tmp_path: Path) -> None:
    source = "import json,os,sys;print(json.dumps([sys.argv[1:],os.environ['GIVEN'],os.getcwd()]))"
    script = Script(tmp_path, python(source, HOSTILE))
    done = script.run()
    assert done.returncode == 0, done.stderr
    shown = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert shown.keys() == {"[gpu-1]", "[gpu-2-2222]"}
    for answer in shown.values():
        assert json.loads(answer) == [[HOSTILE], HOSTILE, str(tmp_path)]
    assert not list(tmp_path.rglob("x"))
    assert not Path("/x").exists()
    assert {path.name for path in script.nodes.glob("*.log")} == {"node-gpu-1.log", "node-gpu-2-2222.log"}
    copy = script.folder / "node-gpu-1.log"
    assert copy.read_bytes() == (script.nodes / "node-gpu-1.log").read_bytes()


@pytest.mark.parametrize(
    ("codes", "winner"),
    [((0, 0), 0), ((75, 75), 75), ((0, 1), 0), ((75, 2), 2), ((93, 75), 93), ((2, 93), 93), ((1, 75), 75),
     ((7, 1), 7), ((255, 3), 3), ((255, 255), 69)],
)  # fmt: skip
def test_the_code_that_counts_when_nodes_differ(codes: tuple[int, int], winner: int) -> None:
    text = f"{SHARED_FUNCTIONS}\nchoose_code {codes[0]} {codes[1]}\n"
    chosen = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout
    assert int(chosen) == winner
    if 255 not in codes:
        assert choose_code(list(codes)) == winner


def test_the_script_exits_with_the_code_of_the_run(tmp_path: Path) -> None:
    script = Script(tmp_path, python("import os,sys;sys.exit(75 if os.environ['HOST']=='gpu-1' else 93)"))
    assert script.run().returncode == 93
    states = [json.loads(line.partition(" ")[2]) for line in script.run("--state").stdout.splitlines()]
    assert [(each["state"], each["code"]) for each in states] == [("ended", 75), ("ended", 93)]
    assert script.run("--follow").returncode == 93
    assert script.run("--bogus").returncode == 2


def test_a_host_that_cannot_be_reached_starts_nothing_anywhere(tmp_path: Path) -> None:
    """The other host is stopped again if it was started, and one that was running is not."""
    script = Script(tmp_path, python("import time;time.sleep(60)"))
    (tmp_path / "down-gpu-2").touch()
    failed = script.run()
    assert failed.returncode == 69
    assert "[gpu-2-2222] ssh: connect to host gpu-2 port 22: Connection refused" in failed.stderr
    assert "was not started" in failed.stderr
    record = json.loads((script.nodes / "node-gpu-1.json").read_text())
    wait_for(lambda: (script.nodes / "node-gpu-1.exit.json").exists(), 20)
    (tmp_path / "down-gpu-2").unlink()
    assert script.run("--start").returncode == 0
    (tmp_path / "down-gpu-2").touch()
    assert script.run("--start").returncode == 69
    states = script.run("--state").stdout.splitlines()
    assert json.loads(states[0].partition(" ")[2])["state"] == "running"
    assert json.loads(states[0].partition(" ")[2])["pid"] != record["pid"]
    assert "{" not in states[1]
    (tmp_path / "down-gpu-2").unlink()
    assert script.run("--stop").returncode == 0
    assert script.run("--follow").returncode == 128 + signal.SIGTERM


STOPPABLE = """
import signal, sys, time
for number in (signal.SIGTERM, signal.SIGQUIT):
    signal.signal(number, lambda number, frame: (print(signal.Signals(number).name, flush=True), sys.exit(75)))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGINT)])
def test_a_signal_to_the_script_stops_all_nodes_and_shows_how_they_end(tmp_path: Path, number: signal.Signals) -> None:
    script = Script(tmp_path, python(STOPPABLE))
    process = script.start()
    output = tmp_path / "output"
    wait_for(lambda: output.read_text().count("ready") == 2, 30)
    process.send_signal(number)
    assert process.wait(30) == 75
    assert "[gpu-1] SIGTERM" in output.read_text()
    assert "[gpu-2-2222] SIGTERM" in output.read_text()


def test_a_lost_script_or_connection_does_not_end_the_nodes(tmp_path: Path) -> None:
    script = Script(tmp_path, python(STOPPABLE))
    process = script.start()
    output = tmp_path / "output"
    wait_for(lambda: output.read_text().count("ready") == 2, 30)
    os.killpg(process.pid, signal.SIGKILL)  # the script, its connections, and what they run at this end
    process.wait()
    states = [json.loads(line.partition(" ")[2]) for line in script.run("--state").stdout.splitlines()]
    assert [each["state"] for each in states] == ["running", "running"]
    again = script.start("--follow")  # shows only what is new
    assert script.run("--stop").returncode == 0
    assert again.wait(30) == 75
    assert sorted(output.read_text().splitlines()) == ["[gpu-1] SIGTERM", "[gpu-2-2222] SIGTERM"]
    assert (script.folder / "node-gpu-1.log").read_text() == "ready\nSIGTERM\n"


def test_the_value_of_a_secret_is_in_no_file_log_or_command_line(tmp_path: Path) -> None:
    canary = "canary-4711"
    source = "import os;print(len(os.environ['HF_TOKEN']), open('/proc/self/cmdline').read().count('can' + 'ary'))"
    script = Script(tmp_path, python(source), secrets=("HF_TOKEN", "WANDB_API_KEY"))
    done = script.run(HF_TOKEN=canary)
    assert done.stdout.splitlines()[0].endswith("] 11 0"), done.stdout + done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if canary.encode() in path.read_bytes()]
    assert canary not in done.stdout + done.stderr
    launch = replace(ssh_request(Path("/shared/runs/tiny")), secrets=("HF_TOKEN",))
    assert "secrets=(HF_TOKEN)" in SshTarget().render(launch).files["launch.sh"]


@pytest.mark.parametrize(
    "setting",
    ["options=[StrictHostKeyChecking=no]", "options=[stricthostkeychecking=off]", "options=[-oX]",
     "options=[UserKnownHostsFile=/dev/null]", "environment={MY_TOKEN: x}", "environment={'a b': x}",
     "secrets=['a;b']", "disk=nobody", "connect_timeout_seconds=0"],
)  # fmt: skip
def test_an_unsafe_or_wrong_field_of_the_site_is_refused(setting: str) -> None:
    with pytest.raises(UserError) as refusal:
        site_section({}, "ssh", SshSite, [setting], where="targets.yaml")
    assert refusal.value.code == "L003"


def test_hosts_of_the_bad_node_memory_are_used_only_where_others_are_too_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMARAN_BAD_NODES", str(tmp_path / "bad.jsonl"))
    add_observation(tmp_path / "bad.jsonl", observe("a", "hardware", "H003: the GPU is broken"))
    launch, target = ssh_request(tmp_path / "run"), SshTarget()
    for hosts, used in ((("a.site", "b", "c"), "(b c)"), (("a", "b"), "(a b)"), (("b", "a", "c"), "(b c)")):
        assert f"hosts={used}" in target.render(replace(launch, hosts=hosts)).files["launch.sh"]


def test_the_hosts_must_be_enough_and_hold_the_ranks(tmp_path: Path) -> None:
    launch, target = ssh_request(tmp_path / "run"), SshTarget()
    for hosts, words in ((("a",), "named: 1; .* needs: 2"), (("a=2", "b=1"), "b has 1 slots"), ((), "named: 0")):
        with pytest.raises(UserError, match=words) as refusal:
            target.render(replace(launch, hosts=hosts))
        assert refusal.value.code == "L011"
    text = target.render(replace(launch, hosts=("a", "b", "c"))).files["launch.sh"]
    assert "hosts=(a b)" in text
    hostfile = tmp_path / "hosts"
    hostfile.write_text("x slots=2\ny\n")
    site = SshSite(hostfile=str(hostfile))
    assert "hosts=(x y)" in target.render(replace(launch, hosts=(), site=site)).files["launch.sh"]


@pytest.mark.parametrize(
    ("said", "what", "fix"),
    [
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!\nHost key verification failed.", "not the one", "-R"),
        ("No ED25519 host key is known.\nHost key verification failed.", "not known here", "fingerprint"),
        ("root@a: Permission denied (publickey).", "refuses the login", "ssh-copy-id"),
        ("ssh: Could not resolve hostname a: Name or service not known", "name is unknown", "correct the name"),
        ("ssh: connect to host a port 22: Connection timed out", "does not answer", "ssh -v"),
        ("kex_exchange_identification: read: reset", "kex_exchange", "ssh -v"),
    ],
)
def test_what_ssh_says_is_explained(said: str, what: str, fix: str) -> None:
    error = connection_error(SshHost(host="a"), said)
    assert (error.code, error.where) == ("L026", "a")
    assert what in error.what
    assert fix in error.fix
