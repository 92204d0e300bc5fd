"""The script of the ssh target: `launch.sh`, which a person can read, and run with bash and OpenSSH alone."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trimaran.launch.targets.hostfile import SshHost
from trimaran.launch.targets.script_text import EXIT_CODES, SHARED_FUNCTIONS, commented

# Of several values of an option ssh uses the first, so options of the site come before these.
SSH_OPTIONS = (
    "BatchMode=yes",  # never ask: a host that is unknown, or wants a password, is an error
    "StrictHostKeyChecking=yes",
    "ServerAliveInterval=15",
    "ServerAliveCountMax=4",
    "ClearAllForwardings=yes",
    "ForwardAgent=no",
)
TOKEN_VARIABLE = "TRIMARAN_RUN_TOKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class SshScript:
    """What `launch.sh` is made from. `folder` and `logs` are on the nodes, for files about their supervisors.

    `command` is the supervisor's, the same on every node. `detached` starts a command that outlives the connection.
    `send_files`: recipe and plan are copied to the nodes' `folder`, because they do not see our disk. `own_disks`: the
    nodes do not share one either, so they get the run's token from here.
    """

    name: str
    ranks_per_node: int
    hosts: Sequence[SshHost]
    min_hosts: int
    ssh: Sequence[str]
    detached: Sequence[str]
    command: Sequence[str]
    folder: Path
    logs: Path
    secrets: Sequence[str] = ()
    send_files: bool = False
    own_disks: bool = False

    def text(self) -> str:
        """Return the script. What a user has named is quoted, for bash here and for the shell of the node."""
        hosts = "\n".join(f"    {host.label}) {_on(host)} ;;" for host in self.hosts)
        number = f"{len(self.hosts)} hosts" if len(self.hosts) > 1 else "1 host"
        files = [f"--folder={self.folder}", f"--logs={self.logs}"]
        secrets = [*self.secrets, *([TOKEN_VARIABLE] if self.own_disks else [])]
        return (
            f"#!/usr/bin/env bash\n"
            f"# Run {commented(self.name)} on {number} over ssh, with {self.ranks_per_node} ranks on each.\n"
            f"{USAGE}{EXIT_CODES}\n"
            "set -u -o pipefail\n"
            'cd -- "$(dirname -- "${BASH_SOURCE[0]}")" || exit 1\n\n'
            f"hosts=({' '.join(host.label for host in self.hosts)})\n"
            f"min_hosts={self.min_hosts}  # the fewest to start with\n"
            f"secrets=({' '.join(secrets)})  # variables whose values the nodes get, if they are set here\n"
            f"send_files={_yes(self.send_files)}  # the nodes do not see this disk: send recipe and plan\n"
            f"own_disks={_yes(self.own_disks)}  # the nodes share no disk: send the run's token\n"
            f"ssh=({shlex.join(self.ssh)})\n"
            "# Commands for the shell of a node.\n"
            f"folder={_twice([str(self.folder)])}\n"
            f"files={_twice(files)}\n"
            f"detached={_twice(self.detached)}\n"
            f"command={_twice(self.command)}\n\n"
            "# on HOST COMMAND: runs a command on a host\n"
            "on() {\n  case $1 in\n"
            f"{hosts}\n"
            "  esac\n}\n"
            f"{SHARED_FUNCTIONS}{BODY}"
        )


def detached_command(python: str, *, folder: str = "", environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the command of a node that starts others so that they outlive the connection (`detached.py`)."""
    given = [f"{name}={value}" for name, value in (environment or {}).items()]
    command = [python, "-m", "trimaran.launch.supervise.detached"]
    command = ["env", *given, *command] if given else command
    # `cd` has to be a command of the shell; the rest of the words are its arguments "$@".
    return ["sh", "-c", 'cd -- "$0" && exec "$@"', folder, *command] if folder else command


def _on(host: SshHost) -> str:
    return f'"${{ssh[@]}}" {shlex.join(host.arguments)} "$2"'


def _yes(value: bool) -> str:
    return "yes" if value else "no"


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
