"""The ssh target: one supervisor on each of several hosts, started by a script over OpenSSH.

A person can read the script, `launch.sh`, and run it with bash and OpenSSH alone.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from trimaran.core import UserError
from trimaran.launch.supervise.detached import DetachedProcess
from trimaran.launch.supervise.node_options import HEAD_PORT, RUN_TOKEN
from trimaran.launch.targets.site_file import Variables, variable_names
from trimaran.launch.targets.ssh_check import check_hosts
from trimaran.launch.targets.ssh_session import SshAccess, SshHost, parse_hosts, read_hostfile
from trimaran.launch.targets.target import (
    EXIT_CODES,
    EXIT_UNREACHABLE,
    SHARED_FUNCTIONS,
    JobCommands,
    JobRecord,
    JobState,
    LaunchFiles,
    LaunchRequest,
    SiteCheck,
    commented,
    node_command,
    state_of_code,
)
from trimaran.runs import bad_nodes_file, read_bad_nodes

# Of several values of an option ssh uses the first, so options of the site come before these.
SSH_OPTIONS = (
    "BatchMode=yes",  # never ask: a host that is unknown, or wants a password, is an error
    "StrictHostKeyChecking=yes",
    "ServerAliveInterval=15",
    "ServerAliveCountMax=4",
    "ClearAllForwardings=yes",
    "ForwardAgent=no",
)


def ssh_script(
    *,
    name: str,
    ranks_per_node: int,
    hosts: Sequence[SshHost],
    min_hosts: int,
    ssh: Sequence[str],
    detached: Sequence[str],
    command: Sequence[str],
    folder: Path,
    logs: Path,
    secrets: Sequence[str] = (),
    send_files: bool = False,
    own_disks: bool = False,
) -> str:
    """Return `launch.sh`. What a user has named is quoted, for bash here and for the shell of the node.

    `folder` and `logs` are on the nodes, for files about their supervisors. `command` is the supervisor's, the same
    on every node. `detached` starts a command that outlives the connection. `send_files`: recipe and plan are
    copied to the nodes' `folder`, because they do not see our disk. `own_disks`: the nodes do not share one either,
    so they get the run's token from here.
    """
    calls = (f'    {host.label}) "${{ssh[@]}}" {shlex.join(host.arguments)} "$2" ;;\n' for host in hosts)
    number = f"{len(hosts)} hosts" if len(hosts) > 1 else "1 host"
    names = [*secrets, *([RUN_TOKEN] if own_disks else [])]
    return (
        f"#!/usr/bin/env bash\n"
        f"# Run {commented(name)} on {number} over ssh, with {ranks_per_node} ranks on each.\n"
        f"{USAGE}{EXIT_CODES}\n"
        "set -u -o pipefail\n"
        'cd -- "$(dirname -- "${BASH_SOURCE[0]}")" || exit 1\n\n'
        f"hosts=({' '.join(host.label for host in hosts)})\n"
        f"min_hosts={min_hosts}  # the fewest to start with\n"
        f"secrets=({' '.join(names)})  # variables whose values the nodes get, if they are set here\n"
        f"send_files={'yes' if send_files else 'no'}  # the nodes do not see this disk: send recipe and plan\n"
        f"own_disks={'yes' if own_disks else 'no'}  # the nodes share no disk: send the run's token\n"
        f"ssh=({shlex.join(ssh)})\n"
        "# Commands for the shell of a node.\n"
        f"folder={_twice([str(folder)])}\n"
        f"files={_twice([f'--folder={folder}', f'--logs={logs}'])}\n"
        f"detached={_twice(detached)}\n"
        f"command={_twice(command)}\n\n"
        "# on HOST COMMAND: runs a command on a host\n"
        f"on() {{\n  case $1 in\n{''.join(calls)}  esac\n}}\n"
        f"{SHARED_FUNCTIONS}{BODY}"
    )


def detached_command(python: str, *, folder: str = "", environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the command of a node that starts others so that they outlive the connection (`detached.py`)."""
    given = [f"{name}={value}" for name, value in (environment or {}).items()]
    command = [python, "-m", "trimaran.launch.supervise.detached"]
    command = ["env", *given, *command] if given else command
    # `cd` has to be a command of the shell; the rest of the words are its arguments "$@".
    return ["sh", "-c", 'cd -- "$0" && exec "$@"', folder, *command] if folder else command


def _twice(words: Sequence[str]) -> str:
    """Return words quoted for the shell of a node, and that text quoted for bash here."""
    return shlex.quote(shlex.join(words))


USAGE = """\
# `trimaran launch --on ssh` wrote this file; it needs bash and OpenSSH here, and Trimaran on the hosts.
#
#   bash launch.sh            start the run, or continue it, and show its output; if it is running, only show it
#   bash launch.sh --follow   show the output of the run
#   bash launch.sh --start    start the run, or continue it, and return
#   bash launch.sh --stop     ask the nodes to stop with a checkpoint
#   bash launch.sh --state    show one line of JSON for each node
#
# Ctrl-C or SIGTERM stops the run with a checkpoint, a second Ctrl-C at once. The nodes go on if a connection, this
# script or the terminal is lost; --follow shows them again. Their output is also in node-HOST.log beside this file.
"""

BODY = r"""
say() { printf '%s\n' "$*" >&2; }

# The values of secrets go through the connection, never into a file or a command line.
secret_values() {
  local name
  for name in ${secrets[@]+"${secrets[@]}"}; do
    if [ -n "${!name+set}" ]; then printf '%s=%s\0' "$name" "${!name}"; fi
  done
}

# Nodes without a shared disk know each other by a token, which is kept in a private file here.
read_token() {
  [ -s token ] || (umask 077; head -c 32 /dev/urandom | base64 | tr -d '+/=\n' >token.new && mv token.new token)
  TRIMARAN_RUN_TOKEN=$(cat token)
}

start_node() {
  local names=${secrets[*]+"${secrets[*]}"}
  if [ "$send_files" = yes ]; then
    tar -cf - recipe.yaml plan.json | on "$1" "mkdir -p $folder && tar -xf - -C $folder" || return
  fi
  secret_values | on "$1" "$detached start node-$1 $files --secrets=${names// /,} -- $command"
}

state_node() { on "$1" "$detached state node-$1 $files" </dev/null; }

stop_node() { on "$1" "$detached stop node-$1 $files --signal=$2" </dev/null; }

stop_new_node() { if grep -q '"new": true' "$work/start_node-$1.out"; then stop_node "$1" TERM; fi; }

# Shows what a node prints until its supervisor has ended. After a lost connection it continues where it was.
follow_node() {
  local copy=node-$1.log code tries=0
  trap '' INT TERM  # Ctrl-C reaches all processes here; the nodes are asked to stop, and this shows how they do
  touch -- "$copy"
  while :; do
    on "$1" "$detached follow node-$1 $files --offset=$(($(wc -c <"$copy")))" </dev/null |
      tee -a -- "$copy" | with_prefix "$1"
    code=${PIPESTATUS[0]}
    # Above 128, either the supervisor or the ssh here was killed.
    if [ "$code" -gt 128 ] && state_node "$1" | grep -q '"state": "running"'; then code=255; fi
    if [ "$code" -ne 255 ]; then touch -- "$work/over"; break; fi
    if [ -e "$work/over" ]; then  # the run has ended on another node
      tries=$((tries + 1))
      if [ "$tries" -gt 3 ]; then break; fi
    fi
    say "[$1] no connection to this host; what runs there goes on. The next try is in 5 s"
    sleep 5
  done
  echo "$code" >"$work/follow-$1"
}

# for_all FUNCTION [ARGUMENT]: calls it for all hosts at once; keeps what it prints and its exit code.
for_all() {
  local host pids=()
  for host in "${hosts[@]}"; do
    { "$1" "$host" "${@:2}" >"$work/$1-$host.out" 2>&1; echo $? >"$work/$1-$host.code"; } &
    pids+=($!)
  done
  wait_for "${pids[@]}"
}

# count_failed FUNCTION: shows on which hosts the function failed, and sets `failed`.
count_failed() {
  local host
  failed=0
  for host in "${hosts[@]}"; do
    if [ "$(cat "$work/$1-$host.code")" -eq 0 ]; then continue; fi
    failed=$((failed + 1))
    with_prefix "$host" <"$work/$1-$host.out" >&2
  done
}

start_all() {
  if [ "$own_disks" = yes ]; then read_token; fi
  for_all start_node
  count_failed start_node
  if [ $((${#hosts[@]} - failed)) -lt "$min_hosts" ]; then
    say "$failed of ${#hosts[@]} hosts could not start their part, so the run was not started"
    for_all stop_new_node
    exit 69
  fi
  if [ "$presses" -gt 0 ]; then for_all stop_node TERM; fi
}

stop_all() {
  for_all stop_node "$1"
  count_failed stop_node
  if [ "$failed" -eq "${#hosts[@]}" ]; then
    say "no host can be reached; what runs there goes on. --follow shows it again"
    kill -KILL ${followers[@]+"${followers[@]}"} 2>/dev/null
    exit 69
  fi
}

on_signal() {
  presses=$((presses + 1))
  if [ "$1" = INT ] && [ "$presses" -gt 1 ]; then say "stopping at once"; stop_all QUIT; return; fi
  say "asking the nodes to stop with a checkpoint"
  stop_all TERM
}

follow_all() {
  local host codes=()
  for host in "${hosts[@]}"; do follow_node "$host" & followers+=($!); done
  wait_for "${followers[@]}"
  for host in "${hosts[@]}"; do codes+=("$(cat "$work/follow-$host" 2>/dev/null || echo 255)"); done
  exit "$(choose_code "${codes[@]}")"
}

show_all() {
  local host
  for host in "${hosts[@]}"; do printf '%s %s\n' "$host" "$(tail -n 1 "$work/$1-$host.out")"; done
}

work=$(mktemp -d) || exit 1
presses=0 failed=0 followers=()
trap 'rm -rf -- "$work"' EXIT
trap 'on_signal INT' INT
trap 'on_signal TERM' TERM
case ${1-} in
  '') start_all; follow_all ;;
  --follow) follow_all ;;
  --start) start_all; show_all start_node ;;
  --stop) for_all stop_node TERM; count_failed stop_node; if [ "$failed" -gt 0 ]; then exit 69; fi ;;
  --state) for_all state_node; count_failed state_node; show_all state_node; if [ "$failed" -gt 0 ]; then exit 69; fi ;;
  *) say "this script has no option $1; its first lines list them"; exit 2 ;;
esac
"""

SCRIPT = "launch.sh"
FOLLOWER = "launch"  # the name of the detached `launch.sh --follow`, which collects the nodes' output
SCRIPT_SECONDS = 600.0  # for a call of the script that starts, stops or asks the nodes
OPTION = re.compile(r"(?P<name>[A-Za-z0-9]+)=(?P<value>[^\0\n]+)")
CODES_IN_ORDER = (0, 93, 2, 75)


def _options(options: tuple[str, ...]) -> tuple[str, ...]:
    for option in options:
        match = OPTION.fullmatch(option)
        if match is None:
            raise ValueError(f"'{option}' is not an option of ssh: write NAME=VALUE, as in ssh_config")
        name, value = match["name"].casefold(), match["value"].strip().casefold()
        unchecked = name == "stricthostkeychecking" and value not in ("yes", "accept-new", "ask")
        if unchecked or (name in ("userknownhostsfile", "globalknownhostsfile") and value == "/dev/null"):
            raise ValueError(f"'{option}' would not check the hosts' keys; add them: ssh-keyscan HOST, then compare")
    return options


class SshSite(BaseModel):
    """The site's section for ssh. What is not here belongs to ~/.ssh/config: users, ports, jump hosts, keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hosts: tuple[str, ...] = Field(default=(), description="hosts as [USER@]HOST[:PORT]; --hosts wins")
    hostfile: str = Field(default="", description="a file with one host on each line, as Open MPI reads it")
    user: str = Field(
        default="", pattern=r"^$|^[A-Za-z0-9_][A-Za-z0-9_.+-]*$", description="the user on hosts that name none"
    )
    config_file: str = Field(default="", description="a configuration file of ssh in place of ~/.ssh/config")
    options: Annotated[tuple[str, ...], AfterValidator(_options)] = Field(
        default=(), description="options of ssh as NAME=VALUE, such as ProxyJump=login"
    )
    connect_timeout_seconds: int = Field(default=10, ge=1, le=600, description="how long a host may take to answer")
    python: str = Field(default="", description="the Python on the hosts that has Trimaran; the same path as here")
    folder: str = Field(default="", description="the folder on the hosts to start in; the home folder")
    environment: Variables = Field(
        default_factory=dict, description="variables of the supervisors and ranks, such as NCCL_SOCKET_IFNAME"
    )
    secrets: Annotated[tuple[str, ...], AfterValidator(variable_names)] = Field(
        default=(), description="names of variables here whose values the hosts get through the connection"
    )
    runs: str = Field(default="", description="the folder of new run directories, as the hosts see it")
    disk: Literal["shared", "hosts", "own"] = Field(
        default="shared",
        description="whose disk runs are on: all hosts and this machine (shared), hosts, each its own (own)",
    )

    @property
    def shared_disk(self) -> bool:
        """Whether the run directory is created here, because the hosts see it."""
        return self.disk == "shared"


class SshTarget:
    """Hosts that are reached over ssh, without a scheduler. The nodes' supervisors outlive the connection."""

    name = "ssh"
    site_model = SshSite
    shares_disk = True

    def check(self, request: LaunchRequest | None, site: SshSite) -> list[SiteCheck]:
        """Look at all hosts at the same time, in one connection to each."""
        hosts = given_hosts(request, site)
        if request is None:
            if hosts:
                return check_hosts(ssh_access(site), hosts, None)
            return [SiteCheck(name="hosts", found="none in the site file: name them with --hosts")]
        used = used_hosts(request, hosts)
        named = f"{', '.join(host.label for host in used)}"
        named += f" of {len(hosts)}" if len(hosts) > len(used) else ""
        bad = ", ".join(host.label for host in _bad_hosts(hosts))
        named += f"; bad: {bad}, see `trimaran doctor --bad-nodes`" if bad else ""
        checks = [SiteCheck(name="hosts", found=named)]
        port = HEAD_PORT if site.disk == "own" else 0
        return [*checks, *check_hosts(ssh_access(site), used, request, disk=site.disk, port=port)]

    def render(self, request: LaunchRequest) -> LaunchFiles:
        site: SshSite = request.site
        hosts = used_hosts(request, given_hosts(request, site))
        run = request.run_dir  # beside it, if it is not yet created, are the files about the nodes' supervisors
        folder = run / "launch" / "nodes" if request.run_exists else run.with_name(f"{run.name}.launch")
        python = site.python or sys.executable
        created = "" if request.run_exists else str(folder)
        command = node_command(request, python=python, launch_folder=created, nodes=len(hosts))
        if len(hosts) > 1:
            command.append(f"--peers={','.join(host.host for host in hosts)}")
        if site.disk == "own" and len(hosts) > 1:
            head = f"[{hosts[0].host}]" if ":" in hosts[0].host else hosts[0].host
            command += ["--own-disk", f"--head={head}:{HEAD_PORT}"]
        script = ssh_script(
            name=request.name,
            ranks_per_node=request.ranks_per_node,
            hosts=hosts,
            min_hosts=min(request.min_nodes, len(hosts)),
            ssh=ssh_access(site).ssh,
            detached=detached_command(python, folder=site.folder, environment=site.environment),
            command=command,
            folder=folder,
            logs=request.run_dir / "logs" if request.run_exists else folder,
            secrets=tuple(dict.fromkeys((*request.secrets, *site.secrets))),
            send_files=not request.run_exists,
            own_disks=site.disk == "own" and len(hosts) > 1,
        )
        submit = [["bash", SCRIPT]]
        return LaunchFiles(files={SCRIPT: script}, main=SCRIPT, submit=submit, executable=frozenset({SCRIPT}))

    def submit(self, request: LaunchRequest, folder: Path) -> tuple[str, dict[str, Any]]:
        return _start(folder)

    def submit_again(self, job: JobRecord) -> tuple[str, dict[str, Any]]:
        return _start(Path(job.folder))

    def state(self, job: JobRecord) -> JobState:
        """Ask all hosts. If none can be reached, the state is what was collected here before."""
        nodes = _states(_call(Path(job.folder), "--state").stdout)
        states = [node.get("state") for node in nodes.values()]
        running = tuple(name for name, node in nodes.items() if node.get("state") == "running")
        lost = tuple(name for name, node in nodes.items() if node.get("state") in (None, "lost"))
        reason = f"{', '.join(lost)} cannot be reached or was lost" if lost else ""
        if running:
            native = f"{len(running)} of {len(nodes)} nodes"
            return JobState(state="running", native=native, reason=reason, nodes=running)
        codes = [int(node["code"]) for node in nodes.values() if node.get("state") == "ended"]
        if codes:
            return state_of_code(choose_code(codes), reason=reason, nodes=tuple(nodes))
        collected = DetachedProcess(Path(job.folder), FOLLOWER).state()
        if set(states) == {None} and collected.get("state") == "ended" and collected["code"] != EXIT_UNREACHABLE:
            return state_of_code(int(collected["code"]), reason=reason)
        return JobState(state="unknown" if None in states else "failed", reason=reason or "it was not started")

    def stop(self, job: JobRecord) -> None:
        answer = _call(Path(job.folder), "--stop")
        if answer.returncode:
            raise _failed(Path(job.folder), "--stop", answer)

    def commands(self, job: JobRecord) -> JobCommands:
        script = str(Path(job.folder, SCRIPT))
        return JobCommands(
            follow=["bash", script, "--follow"], stop=["bash", script, "--stop"], resume=["bash", script]
        )


def given_hosts(request: LaunchRequest | None, site: SshSite) -> tuple[SshHost, ...]:
    """Return the hosts of `--hosts`, else those of the site's section."""
    if request is not None and request.hosts:
        return parse_hosts(request.hosts)
    specs = site.hosts or (read_hostfile(Path(site.hostfile).expanduser()) if site.hostfile else ())
    return parse_hosts(specs, where="ssh.hosts")


def _bad_hosts(hosts: Sequence[SshHost]) -> list[SshHost]:
    """Return the hosts that the bad-node memory has. It has host names, with or without the domain."""
    names = read_bad_nodes(bad_nodes_file(os.environ))
    return [each for each in hosts if each.host in names or each.host.partition(".")[0] in names]


def used_hosts(request: LaunchRequest, hosts: tuple[SshHost, ...]) -> tuple[SshHost, ...]:
    """Return as many hosts as the run has nodes, in the given order; raise UserError if too few, or one too small."""
    # Hosts of the bad-node memory are used only where the others are too few.
    bad = _bad_hosts(hosts)
    good = [host for host in hosts if host not in bad][: request.max_nodes]
    chosen = {*good, *bad[: max(request.num_nodes - len(good), 0)]}
    used = tuple(host for host in hosts if host in chosen)
    if len(used) < request.num_nodes:
        raise UserError("L011.hosts-named-hosts", where="--hosts", num_used=len(used), num_nodes=request.num_nodes)
    small = [host for host in used if host.slots and host.slots < request.ranks_per_node]
    if small:
        raise UserError(
            "L011.slots-but-ranks",
            where="--hosts",
            small_label=small[0].label,
            slots=small[0].slots,
            ranks_per_node=request.ranks_per_node,
        )
    return used


def ssh_access(site: SshSite) -> SshAccess:
    """Return how hosts are reached: the ssh command without the host, and the Python there."""
    command = ["ssh", "-T"]
    if site.config_file:
        command += ["-F", str(Path(site.config_file).expanduser())]
    user = [f"User={site.user}"] if site.user else []
    options = (*site.options, *user, *SSH_OPTIONS, f"ConnectTimeout={site.connect_timeout_seconds}")
    ssh = [*command, *(word for option in options for word in ("-o", option))]
    python = detached_command(site.python or sys.executable, folder=site.folder, environment=site.environment)
    return SshAccess(ssh=ssh, python=python[:-2], connect_seconds=site.connect_timeout_seconds)


def choose_code(codes: list[int]) -> int:
    """Return the exit code of a run from those of its nodes, as `choose_code` of the scripts does."""
    return next((code for code in CODES_IN_ORDER if code in codes), codes[0])


def _start(folder: Path) -> tuple[str, dict[str, Any]]:
    """Start the nodes, and collect their output in `folder` from now on; return the job's id and details."""
    answer = _call(folder, "--start")
    if answer.returncode:
        raise _failed(folder, "--start", answer)
    nodes = _states(answer.stdout)
    DetachedProcess(folder, FOLLOWER).start(["bash", str(folder / SCRIPT), "--follow"])
    first, process = next(iter(nodes.items()))
    return f"{first}-{process.get('pid', 0)}-{process.get('started', 0)}", {"nodes": nodes}


def _call(folder: Path, option: str) -> subprocess.CompletedProcess[str]:
    script = folder / SCRIPT
    if not script.is_file():
        raise UserError("L028.script-job-gone", where=str(script))
    try:
        return subprocess.run(["bash", str(script), option], stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, errors="replace", timeout=SCRIPT_SECONDS, check=False)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError("L028.script-did", where=f"bash {script} {option}", error=error) from None


def _failed(folder: Path, option: str, answer: subprocess.CompletedProcess[str]) -> UserError:
    said = " / ".join(answer.stderr.strip().splitlines()[-3:]) or f"exit code {answer.returncode}"
    return UserError("L028.hosts-could", where=shlex.join(["bash", str(folder / SCRIPT), option]), said=said)


def _states(text: str) -> dict[str, dict[str, Any]]:
    """Return what the script printed about each host; an empty object for a host that did not answer."""
    found: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        host, _, answer = line.partition(" ")
        try:
            state = json.loads(answer)
        except ValueError:
            state = {}
        found[host] = state if isinstance(state, dict) else {}
    return found
