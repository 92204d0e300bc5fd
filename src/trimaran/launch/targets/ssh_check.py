"""The checks of the ssh target: all hosts at the same time, before anything is started."""

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import trimaran
from trimaran.core import Bytes, UserError, show_bytes, templated
from trimaran.launch.supervise.node_options import is_loopback
from trimaran.launch.targets.host_probe import existing, source_digest
from trimaran.launch.targets.ssh_session import HostSession, SshAccess, SshHost
from trimaran.launch.targets.target import LaunchRequest, SiteCheck

T = TypeVar("T")
MAX_THREADS = 256
MIN_FREE_BYTES = 256 << 20
WARN_SKEW_SECONDS, MAX_SKEW_SECONDS = 1.0, 10.0  # as the doctor's H012
ALL_PAIRS_HOSTS = 16  # with more hosts, each connects to its next few neighbours and to the first host
NEIGHBOURS = 4
LINK_BYTES, LINK_SECONDS = 64 << 20, 1.0
SLOW_LINK_FACTOR = 3.0  # slower than the median by so much is named
CLOCK_QUESTIONS = 3


class HostsCheck:
    """Sessions with all hosts, which are asked at the same time."""

    def __init__(self, sessions: Sequence[HostSession], pool: ThreadPoolExecutor) -> None:
        self.sessions, self._pool = sessions, pool
        self.facts: dict[HostSession, dict[str, Any]] = {}

    def ask_all(self, ask: Callable[[HostSession], T]) -> dict[HostSession, T]:
        """Return each host's answer; raise the first error."""
        return dict(zip(self.sessions, self._pool.map(ask, self.sessions), strict=True))

    def connections(self, folder: str) -> list[SiteCheck]:
        """Connect to all hosts, and return one check for each."""

        def first(session: HostSession) -> tuple[dict[str, Any], UserError | None, float]:
            began = time.monotonic()
            try:
                return (
                    session.ask("facts", within=session.first_answer_seconds, folder=folder),
                    None,
                    time.monotonic() - began,
                )
            except UserError as error:
                return {}, error, 0.0

        checks = []
        for session, (found, error, seconds) in zip(self.sessions, self._pool.map(first, self.sessions), strict=True):
            text = f"{found['hostname']}, answers after {seconds:.1f} s" if found else "no answer"
            checks.append(SiteCheck(name=f"ssh {session.host.label}", found=text, error=error))
            self.facts[session] = found
        return checks

    def versions(self) -> SiteCheck:
        """Python, torch and Trimaran are installed, and the same on all hosts; Trimaran also as here."""
        for session, found in self.facts.items():
            missing = [name for name in ("trimaran", "torch") if not found["source" if name == "trimaran" else name]]
            if missing:
                error = UserError(
                    "L027.not-installed",
                    where=session.host.spec,
                    missing=" and ".join(missing),
                    executable=found["executable"],
                )
                return SiteCheck(name="versions", found=f"{missing[0]} is missing", error=error)
        first = self.sessions[0]
        for session in self.sessions[1:]:
            for name, shown in (("python", "Python"), ("torch", "torch"), ("trimaran", "Trimaran"), ("source", "")):
                ours, theirs = _comparable(name, self.facts[first]), _comparable(name, self.facts[session])
                if ours != theirs:
                    what = f"{shown} is {theirs} on {session.host.label} and {ours} on {first.host.label}"
                    if name == "source":
                        what = f"{session.host.label} has other source files of Trimaran than {first.host.label}"
                    error = UserError(
                        "L027",
                        what,
                        where=session.host.spec,
                        fix=templated(
                            "install the same versions on all hosts: pip install torch=={torch}, and the same Trimaran",
                            torch=self.facts[first]["torch"],
                        ),
                    )
                    return SiteCheck(name="versions", found="they differ", error=error)
        found = self.facts[self.sessions[0]]
        text = f"Python {found['python']}, torch {found['torch']}, Trimaran {found['trimaran'] or '?'} on all hosts"
        if found["trimaran"] and found["trimaran"] != trimaran.__version__:
            error = UserError(
                "L027.trimaran-hosts-here",
                where=self.sessions[0].host.spec,
                trimaran=found["trimaran"],
                version=trimaran.__version__,
            )
            return SiteCheck(name="versions", found=text, error=error)
        note = "" if found["source"] == source_digest("trimaran") else "; its source files here are others"
        return SiteCheck(name="versions", found=text + note)

    def clocks(self) -> SiteCheck:
        """The wall clocks of the hosts agree with that of the first host."""

        def offset(session: HostSession) -> tuple[float, float]:
            """Return how long the quickest answer took, and how far the host's clock is ahead of ours."""
            best = (float("inf"), 0.0)
            for _ in range(CLOCK_QUESTIONS):
                before = time.time()
                theirs = session.ask("clock")["time"]
                after = time.time()
                best = min(best, (after - before, theirs - (before + after) / 2))
            return best

        found = self.ask_all(offset)
        took, ahead = found[self.sessions[0]]
        skews = {each: theirs - ahead for each, (_, theirs) in found.items()}
        accuracy = (max(each for each, _ in found.values()) + took) / 2
        worst = max(skews, key=lambda each: abs(skews[each]))
        skew = skews[worst]
        if abs(skew) <= max(WARN_SKEW_SECONDS, accuracy):
            return SiteCheck(name="clocks", found=f"they agree within {max(abs(skew), accuracy) * 1000:.0f} ms")
        direction = "ahead of" if skew > 0 else "behind"
        what = f"{worst.host.label} is {abs(skew):.1f} s {direction} {self.sessions[0].host.label}"
        if abs(skew) <= MAX_SKEW_SECONDS:
            return SiteCheck(name="clocks", found=f"{what}; logs are hard to compare")
        error = UserError(
            "H012.clocks-differ",
            where=worst.host.spec,
            host=worst.host.label,
            skew=abs(skew),
            direction=direction,
            host_label=self.sessions[0].host.label,
        )
        return SiteCheck(name="clocks", found=what, error=error)

    def disk(self, run_dir: Path, kind: str) -> SiteCheck:
        """The run directory can be created, and its disk is shared, or not, as the site's section says."""
        for session, found in self.facts.items():
            if found["free_bytes"] < MIN_FREE_BYTES:
                free = show_bytes(Bytes(found["free_bytes"]))
                error = UserError(
                    "L014.free", where=session.host.spec, free=free, folder=found["folder"], host=session.host.label
                )
                return SiteCheck(name="disk", found=f"{free} free", error=error)
        least = show_bytes(Bytes(min(found["free_bytes"] for found in self.facts.values())))
        error = self._disk_error(run_dir, kind)
        texts = {"shared": "shared by the hosts and us", "hosts": "shared by the hosts", "own": "each host its own"}
        found = f"{least} free for {run_dir}, {texts[kind]}" if error is None else f"{least} free for {run_dir}"
        return SiteCheck(name="disk", found=found, error=error)

    def _disk_error(self, run_dir: Path, kind: str) -> UserError | None:
        name = f".trimaran-check-{secrets.token_hex(8)}"

        def path_of(session: HostSession) -> str:
            return os.path.join(self.facts[session]["folder"], f"{name}-{session.host.label}")

        for session, found in self.facts.items():  # one after another: they may write to the same folder
            if why := session.ask("write", path=path_of(session), text=name).get("error"):
                return UserError(
                    "L014.cannot-write",
                    where=session.host.spec,
                    host=session.host.label,
                    folder=found["folder"],
                    why=why,
                )
            if kind == "shared":
                session.ask("remove", path=path_of(session))
        if kind == "shared":
            folder = Path(existing(str(run_dir.parent)))
            try:
                (folder / name).write_text(name, encoding="utf-8")
            except OSError as error:
                raise UserError("D003.run-directory", where=str(folder), reason=error.strerror) from None
            try:
                return self._unseen(str(folder / name), seen_by="this machine", kind=kind)
            finally:
                (folder / name).unlink(missing_ok=True)
        try:
            first = self.sessions[0]
            return self._unseen(path_of(first), seen_by=first.host.label, kind=kind)
        finally:
            for session in self.sessions:
                session.ask("remove", path=path_of(session))

    def _unseen(self, path: str, *, seen_by: str, kind: str) -> UserError | None:
        """Return the error if hosts do not see a file that others wrote, or see it although each has its own disk."""
        seen = {session: answer["text"] is not None for session, answer in
                self.ask_all(lambda session: session.ask("read", path=path)).items()}  # fmt: skip
        folder, others = os.path.dirname(path), self.sessions[1:] if kind != "shared" else self.sessions
        unseen = [session.host.label for session in others if not seen[session]]
        if kind != "own" and unseen:
            other = "hosts" if kind == "shared" and len(unseen) == len(self.sessions) > 1 else "own"
            return UserError(
                "L014.not-see", where="--run-dir", unseen=", ".join(unseen), folder=folder, seen_by=seen_by, other=other
            )
        shared = [session.host.label for session in others if seen[session]]
        if kind == "own" and shared:
            return UserError(
                "L014.see-but-disk", where="--run-dir", shared=", ".join(shared), folder=folder, seen_by=seen_by
            )
        return None

    def network(self, port: int = 0) -> list[SiteCheck]:
        """Each host finds its address by its routes, and the others reach it there. Also measures the links."""
        names = [session.host.host for session in self.sessions]
        routes = self.ask_all(lambda session: session.ask("route", hosts=names))
        addresses = {session: _own_address(names, answer["own"]) for session, answer in routes.items()}
        for session, address in addresses.items():
            if not address:
                why = "; ".join(routes[session]["unknown"]) or "there is no route to them"
                error = UserError("L013.not-know", where=session.host.spec, host=session.host.label, why=why)
                return [SiteCheck(name="addresses", found="not known", error=error)]
        shown = ", ".join(f"{session.host.label} {address}" for session, address in addresses.items())
        checks = [SiteCheck(name="addresses", found=shown)]
        ports: dict[HostSession, int] = {}
        head = self.sessions[0]
        listening = self.ask_all(
            lambda session: session.ask("listen", address=addresses[session], port=port if session is head else 0)
        )
        for session, answer in listening.items():
            if "error" in answer:
                where = f"{addresses[session]}:{port}" if session is head and port else addresses[session]
                error = UserError(
                    "L013.cannot-listen",
                    where=session.host.spec,
                    host=session.host.label,
                    place=where,
                    error=answer["error"],
                )
                return [*checks, SiteCheck(name="ports", found=where, error=error)]
            ports[session] = answer["port"]
        reached = self._ports(addresses, ports)
        return [*checks, reached] if reached.error else [*checks, reached, self._links(addresses, ports)]

    def _ports(self, addresses: Mapping[HostSession, str], ports: Mapping[HostSession, int]) -> SiteCheck:
        def connect(session: HostSession) -> list[tuple[HostSession, str]]:
            others = _partners(self.sessions, session)
            errors = session.ask("connect", targets=[(addresses[each], ports[each]) for each in others])["errors"]
            return [*zip(others, errors, strict=True)]

        found = self.ask_all(connect)
        for session, answers in found.items():
            for other, why in answers:
                if not why:
                    continue
                where = f"{addresses[other]}:{ports[other]}"
                what = f"{session.host.label} cannot reach {other.host.label} at {where}: {why}"
                error = UserError(
                    "L013.cannot-reach",
                    where=session.host.spec,
                    host=session.host.label,
                    other=other.host.label,
                    place=where,
                    why=why,
                )
                return SiteCheck(name="ports", found=what, error=error)
        total = sum(map(len, found.values()))
        return SiteCheck(name="ports", found=f"all {total} connections that were tried work")

    def _links(self, addresses: Mapping[HostSession, str], ports: Mapping[HostSession, int]) -> SiteCheck:
        pairs = list(pairwise(self.sessions))
        speeds: dict[tuple[HostSession, HostSession], float] = {}

        def send(pair: tuple[HostSession, HostSession]) -> float:
            to = {"address": addresses[pair[1]], "port": ports[pair[1]]}
            answer = pair[0].ask("send", num_bytes=LINK_BYTES, seconds=LINK_SECONDS, **to)
            return answer["bytes"] / answer["seconds"] if "bytes" in answer else 0.0

        for turn in (pairs[::2], pairs[1::2]):  # no host is in two pairs at once
            speeds |= dict(zip(turn, self._pool.map(send, turn), strict=True))
        if not speeds:
            return SiteCheck(name="links", found="one host")
        slowest = min(speeds, key=lambda pair: speeds[pair])
        between = f"{slowest[0].host.label} to {slowest[1].host.label}"
        text = f"{show_bytes(Bytes(int(speeds[slowest])))}/s over TCP, {between}"
        if len(speeds) > 1:
            usual = median(speeds.values())
            is_slow = speeds[slowest] * SLOW_LINK_FACTOR < usual
            text = f"slowest {text}; {'usual' if is_slow else 'median'} {show_bytes(Bytes(int(usual)))}/s"
            text += "; check it with `trimaran doctor --nodes`" if is_slow else ""
        return SiteCheck(name="links", found=text)


def check_hosts(
    access: SshAccess, hosts: Sequence[SshHost], request: LaunchRequest | None, *, disk: str = "shared", port: int = 0
) -> list[SiteCheck]:
    """Return what was found on the hosts, up to the first kind of check that fails.

    `disk` says where the run directory is: on a disk that the hosts and this machine share (`shared`), that only the
    hosts share (`hosts`), or on each host's own (`own`). The first host will listen on `port`; 0 for any.
    """
    folder = str(request.run_dir.parent) if request else ""
    with ThreadPoolExecutor(min(len(hosts), MAX_THREADS)) as pool:
        sessions = [HostSession(access, host) for host in hosts]
        try:
            check = HostsCheck(sessions, pool)
            checks = check.connections(folder)
            if any(each.error for each in checks):
                return checks
            for ask in (
                check.versions,
                check.clocks,
                *([partial(check.disk, request.run_dir, disk)] if request else []),
            ):
                checks.append(ask())
                if checks[-1].error:
                    return checks
            return [*checks, *check.network(port)]
        finally:
            list(pool.map(HostSession.close, sessions))


def _comparable(name: str, found: Mapping[str, Any]) -> str:
    value = str(found[name])
    return ".".join(value.split(".")[:2]) if name == "python" else value


def _own_address(hosts: Sequence[str], own: Mapping[str, str]) -> str:
    """Return the address that a node's supervisor will find: see `find_own_address`."""
    for host in hosts:
        if is_loopback(host):
            return own.get(host, host)
    return next((own[host] for host in hosts if host in own and not is_loopback(own[host])), "")


def _partners(sessions: Sequence[HostSession], session: HostSession) -> list[HostSession]:
    """Return the hosts that a host tries to connect to: all others, or the first and the next ones if they are many."""
    if len(sessions) <= ALL_PAIRS_HOSTS:
        return [each for each in sessions if each is not session]
    index = sessions.index(session)
    chosen = [sessions[0], *(sessions[(index + step) % len(sessions)] for step in range(1, NEIGHBOURS + 1))]
    return [each for each in dict.fromkeys(chosen) if each is not session]
