"""Attribution from rank reports, recorded with the scenarios of tests/fault/test_attribution.py."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.runs import new_run
from trimaran.app import main
from trimaran.core import Cause, Incident
from trimaran.launch import (
    Operation,
    RankEnded,
    RankReport,
    ReportMoment,
    Straggler,
    attribute_fault,
    find_stragglers,
    incident_text,
    is_starved,
    read_exit,
    read_rank_reports,
)
from trimaran.machine import count_oom_kills
from trimaran.runs import IncidentLog, RunDirectory
from trimaran.train import find_differing_ranks

RECORDED = Path(__file__).parent / "rank_reports"


def recorded(name: str) -> dict[int, RankReport]:
    ranks = range(len(json.loads((RECORDED / name / "process.json").read_text())))
    return read_rank_reports(RunDirectory(Path("nowhere")), RECORDED / name, ranks)


@pytest.mark.parametrize(
    ("name", "cause", "suspects", "victims"),
    [
        ("dp-missing", "hang", (1,), (0, 2)),
        ("tp-pp", "hang", (3,), (0, 1, 2)),
        ("received-ahead", "hang", (1,), (0,)),
        ("ddp-backward", "hang", (1,), (0,)),
        ("interpreter-held", "hang", (0,), (1,)),
        ("stopped", "hang", (2,), (0, 1)),
        ("mismatch", "mismatch", (2,), (0, 1)),
        ("nccl-mismatch", "mismatch", (1,), (0, 2, 3)),
        ("nccl-missing", "hang", (1,), (0, 2, 3)),
        ("circle", "mismatch", (0, 1), ()),
    ],
)
def test_the_rank_at_fault_is_distinguished_from_its_victims(
    name: str, cause: Cause, suspects: tuple[int, ...], victims: tuple[int, ...]
) -> None:
    attribution = attribute_fault(recorded(name), [], [])
    assert (attribution.cause, attribution.suspects, attribution.victims) == (cause, suspects, victims)
    assert attribution.evidence["facts"]


def test_an_operation_that_all_ranks_are_in_points_to_the_network() -> None:
    stuck = {
        rank: replace(each, operations=(*each.operations[:-1], replace(each.operations[-1], done=False)))
        for rank, each in recorded("stopped").items()
    }
    number = min(each.operations[-1].number for each in stuck.values())
    same = {
        rank: replace(each, state="S", answered=True, operations=(replace(each.operations[-1], number=number),))
        for rank, each in stuck.items()
    }
    attribution = attribute_fault(same, [], [])
    assert (attribution.cause, attribution.suspects) == ("network", ())


def test_without_waits_the_rank_with_the_fewest_steps_is_at_fault() -> None:
    idle = {rank: RankReport(rank=rank, answered=True, step=7 - (rank == 1)) for rank in range(3)}
    assert attribute_fault(idle, [], []).suspects == (1,)


def test_a_rank_that_timed_out_is_a_victim_of_the_one_that_still_hangs() -> None:
    reports = recorded("dp-missing")
    events = [{"kind": "error", "rank": 0, "data": {"type": "RuntimeError", "message": "Timed out waiting 600000ms"}}]
    attribution = attribute_fault(reports, [RankEnded(rank=0, code=1, time=1.0)], events)
    assert (attribution.cause, attribution.suspects, attribution.victims) == ("hang", (1,), (0, 2))


def test_ranks_wait_only_for_members_of_their_group() -> None:
    """Two pairs: rank 2 waits only for the other member of its pair."""
    groups = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    reports = {
        rank: RankReport(
            rank=rank,
            answered=True,
            groups={str(members[0]): members},
            operations=(Operation(group=str(members[0]), number=5 - (rank == 3), op="all_reduce", done=rank != 2),),
        )
        for rank, members in groups.items()
    }
    attribution = attribute_fault(reports, [], [])
    assert attribution.suspects == (3,)


# Ends of logs of ranks on an H200 with NCCL 2.28.9, torch 2.11; the second is NCCL's text, not seen in a run.
NCCL_PEER_KILLED = """\
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketProgress: Connection closed by remote peer localhost<51958>
terminate called after throwing an instance of 'c10::Error'
  what():  NCCL Error 6: remote process exited or there was a network error
"""
NCCL_TRUNCATED = """\
NET/Socket : peer 127.0.0.1<5> message truncated : receiving 40 bytes instead of 28. If you believe your socket \
network is in a healthy state, there may be a mismatch in collective sizes or environment settings between ranks
"""
CUDA_FAULT_SEEN_BY_WATCHDOG = """\
Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered
"""
DEATHS: list[tuple[int, dict[str, object] | None, str, bool, Cause, bool]] = [
    # exit code, data of the error event, end of the log, killed by the OOM killer; cause, primary
    (-9, None, "", False, "crash", True),
    (-9, None, "", True, "oom", True),
    (-11, None, "Fatal Python error: Segmentation fault", False, "crash", True),
    (-6, None, "what():  std::bad_alloc", False, "oom", True),
    (-6, None, "Is there a distributed collective mismatch in your code?", False, "mismatch", True),
    (-6, None, NCCL_PEER_KILLED, False, "network", False),
    (-6, None, NCCL_TRUNCATED, False, "mismatch", True),
    (-6, None, CUDA_FAULT_SEEN_BY_WATCHDOG, False, "crash", True),
    (0, None, "", False, "exit", True),
    (75, None, "", False, "preempted", False),
    (2, {"code": "M001", "what": "no such preset", "where": "model.preset", "fix": "-"}, "", False, "user", True),
    (1, {"type": "OutOfMemoryError", "message": "CUDA out of memory."}, "", False, "oom", True),
    (1, {"type": "RuntimeError", "message": "DefaultCPUAllocator: can't allocate memory"}, "", False, "oom", True),
    (1, {"type": "LoaderFault", "message": "x", "cause": "data", "sample_ids": [7]}, "", False, "data", True),
    (1, {"type": "ReplicasDiffer", "message": "x", "cause": "numeric"}, "", False, "numeric", True),
    (1, {"type": "OSError", "message": "[Errno 28] No space left on device: '/x'"}, "", False, "storage", True),
    (1, {"type": "RuntimeError", "message": "Connection closed by peer [127.0.0.1]:1"}, "", False, "network", False),
    (1, {"type": "RuntimeError", "message": "Connection reset by peer"}, "", False, "network", False),
    (1, {"type": "DistBackendError", "message": "NCCL communicator was aborted"}, "", False, "network", False),
    (1, {"type": "ZeroDivisionError", "message": "division by zero"}, "", False, "crash", True),
]


@pytest.mark.parametrize(("code", "error", "log_tail", "killed", "cause", "primary"), DEATHS)
def test_each_exit_has_its_cause(
    code: int, error: dict[str, object] | None, log_tail: str, killed: bool, cause: Cause, primary: bool
) -> None:
    fault = read_exit(code, error, log_tail, oom_killed=killed)
    assert (fault.cause, fault.primary) == (cause, primary)


def test_a_rank_that_failed_is_at_fault_even_if_others_ended_first() -> None:
    lost = {"type": "RuntimeError", "message": "Connection closed by peer"}
    events = [{"kind": "error", "rank": rank, "data": lost} for rank in (0, 2)]
    deaths = [
        RankEnded(rank=0, code=1, time=1.0),
        RankEnded(rank=2, code=1, time=1.1),
        RankEnded(rank=1, code=-9, time=1.2),
    ]
    attribution = attribute_fault({}, deaths, events)
    assert (attribution.cause, attribution.suspects, attribution.victims) == ("crash", (1,), (0, 2))
    assert attribution.what == "rank 1 was killed by SIGKILL"


def test_no_rank_is_blamed_for_a_full_disk_at_the_last_checkpoint() -> None:
    what = "the last checkpoint could not be written: rank 1: No space left on device"
    data = {"code": "K043", "what": what, "where": "checkpoints", "fix": "free space", "cause": "storage"}
    events = [{"kind": "error", "rank": rank, "data": data} for rank in range(2)]
    deaths = [RankEnded(rank=rank, code=75, time=float(rank)) for rank in range(2)]
    attribution = attribute_fault({}, deaths, events)
    assert (attribution.cause, attribution.what) == ("storage", what)
    assert (attribution.suspects, attribution.victims) == ((), ())
    assert attribution.evidence["code"] == "K043"
    events[1] = events[1] | {"data": {"code": "D006", "what": "wrong", "where": "here", "fix": "no"}}
    assert attribute_fault({}, deaths, events).cause == "user"


def test_two_killed_ranks_are_both_at_fault() -> None:
    deaths = [RankEnded(rank=3, code=-9, time=1.0), RankEnded(rank=1, code=-9, time=1.3)]
    attribution = attribute_fault({rank: RankReport(rank=rank, state="S") for rank in range(4)}, deaths, [])
    assert (attribution.suspects, attribution.victims) == ((1, 3), (0, 2))


def test_bad_samples_are_in_the_evidence() -> None:
    data = {"type": "LoaderFault", "message": "bad", "cause": "data", "sample_ids": [41, 7]}
    attribution = attribute_fault(
        {}, [RankEnded(rank=0, code=1, time=0.0)], [{"kind": "error", "rank": 0, "data": data}]
    )
    assert (attribution.cause, attribution.evidence["sample_ids"]) == ("data", [7, 41])


def test_ranks_that_all_lost_their_connections_point_to_the_network() -> None:
    lost = {"type": "RuntimeError", "message": "Connection closed by peer"}
    events = [{"kind": "error", "rank": rank, "data": lost} for rank in (0, 1)]
    attribution = attribute_fault({}, [RankEnded(rank=rank, code=1, time=0.0) for rank in (0, 1)], events)
    assert (attribution.cause, attribution.suspects) == ("network", ())


@pytest.mark.parametrize("damage", [lambda text: text[: len(text) // 2], lambda _: "", lambda _: "[]", lambda _: "{}",
                                   lambda _: '{"section": 3, "frames": 7}'])  # fmt: skip
def test_a_damaged_report_counts_as_missing(tmp_path: Path, damage: Callable[[str], str]) -> None:
    shutil.copytree(RECORDED / "dp-missing", tmp_path / "folder")
    path = tmp_path / "folder" / "rank-1.json"
    path.write_text(damage(path.read_text()))
    reports = read_rank_reports(RunDirectory(tmp_path), tmp_path / "folder", range(3))
    assert [each.answered for each in reports.values()] == [True, False, True]
    assert reports[1].state == "S"


def test_without_reports_the_cause_is_unknown(tmp_path: Path) -> None:
    reports = read_rank_reports(RunDirectory(tmp_path), tmp_path / "none", range(2))
    assert attribute_fault(reports, [], []).cause == "unknown"


def test_oom_kills_are_read_from_both_versions_of_control_groups(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "memory.events").write_text("low 0\noom 4\noom_kill 3\noom_group_kill 9\n")
    (tmp_path / "cgroup").write_text("0::/job\n")
    assert count_oom_kills(tmp_path, tmp_path / "cgroup") == 3
    assert count_oom_kills(tmp_path / "none", tmp_path / "cgroup") == 0
    (tmp_path / "memory" / "box").mkdir(parents=True)
    (tmp_path / "memory" / "box" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    (tmp_path / "older").write_text("4:memory:/box\n1:cpu:/\n0::/\n")
    assert count_oom_kills(tmp_path, tmp_path / "older") == 2


# ---- incident text


def hang() -> Incident:
    facts = ["rank 1 is at net.py:3 in forward: sleep(9)", "a", "b", "c"]
    evidence = {"facts": facts, "files": ["rank-1.stacks.txt"], "why": "from the newest state"}
    what = "rank 1 did not reach the operation that the others wait in"
    return Incident(id="i-0002", cause="hang", time=0.0, what=what, step=12,
                    suspects=(1,), victims=(0, 2), evidence=evidence, action="restarted",
                    cost={"seconds_to_detect": 6.21, "seconds_to_recover": 8.04, "lost_steps": 1.0})  # fmt: skip


def test_the_cost_of_an_incident_is_shown_beside_what_the_run_had_stated() -> None:
    bounded = replace(hang(), cost=hang().cost | {"max_lost_steps": 3, "max_lost_seconds": 0.272})
    assert incident_text(bounded).splitlines()[-1].endswith("1 step repeated (at most 3, about 272 ms)")


def test_the_text_of_an_incident_has_ranks_evidence_action_and_cost() -> None:
    assert incident_text(hang()).splitlines() == [
        "i-0002  hang after step 12: rank 1 did not reach the operation that the others wait in",
        "  ranks:    rank 1 is at fault; ranks 0 and 2 are affected",
        "  evidence: rank 1 is at net.py:3 in forward: sleep(9)",
        "            a",
        "            b",
        "            and 1 more fact",
        "            see incidents/i-0002/rank-1.stacks.txt",
        "  action:   restarted from the newest state",
        "  cost:     detected in 6.2 s, first new step after 8.0 s, 1 step repeated",
    ]


def test_the_text_of_a_new_incident_is_short() -> None:
    text = incident_text(Incident(id="i-0001", cause="network", time=0.0, what="lost node b"))
    assert text.splitlines() == [
        "i-0001  network: lost node b",
        "  ranks:    no rank is at fault",
        "  action:   none yet",
    ]


def test_the_command_shows_every_incident(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = new_run(tmp_path / "run")
    assert main(["incidents", str(run.path)]) == 0
    assert capsys.readouterr().out == "no incidents in this run\n"
    log = IncidentLog(run)
    log.amend(log.notice("exit", "rank 0 exited early", suspects=(0,)), action="stopped")
    log.notice("straggler", "rank 1 is slow", suspects=(1,), action="continued", cost={"slowdown": 2.5})
    assert main(["incidents", str(run.path)]) == 0
    shown = capsys.readouterr().out
    assert "i-0001  exit: rank 0 exited early" in shown
    assert "each step takes 2.5 times as long" in shown
    assert main(["incidents", str(run.path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [(each["cause"], each["action"]) for each in answer] == [("exit", "stopped"), ("straggler", "continued")]
    assert answer[0]["verdict"].startswith("i-0001  exit")


# ---- stragglers


def simulated(slow: dict[int, float], *, ranks: int = 4, steps: int = 20, seed: int = 0) -> dict[int, RankReport]:
    """Return reports of a data-parallel run: per step four overlapping all-reduces of gradients, then one of the loss.

    Computing takes 10 ms +- 20 % before each, times the factor in `slow` on some ranks; an all-reduce takes 1 ms.
    """
    generator = random.Random(seed)
    now, numbers = dict.fromkeys(range(ranks), 0.0), 0
    operations: dict[int, list[Operation]] = {rank: [] for rank in range(ranks)}
    members = tuple(range(ranks))

    def arrive(size: int) -> float:
        nonlocal numbers
        numbers += 1
        for rank in range(ranks):
            now[rank] += 0.010 * slow.get(rank, 1.0) * generator.uniform(0.8, 1.2)
            operations[rank].append(
                Operation(group="0", number=numbers, op="all_reduce", sizes=((size,),), done=True, time=now[rank])
            )
        return max(now.values()) + 0.001

    for _ in range(steps):
        complete = max(arrive(100 + bucket) for bucket in range(4))
        now.update(dict.fromkeys(now, complete))
        complete = arrive(1)
        now.update(dict.fromkeys(now, complete))
    return {
        rank: RankReport(
            rank=rank, answered=True, moment=ReportMoment(host="a"), groups={"0": members}, operations=tuple(each)
        )
        for rank, each in operations.items()
    }


@pytest.mark.parametrize(("ranks", "factor"), [(2, 2.5), (4, 2.5), (8, 1.6), (3, 4.0)])
def test_a_slow_rank_is_found_in_twenty_steps_with_its_slowdown(ranks: int, factor: float) -> None:
    (found,) = find_stragglers(simulated({1: factor}, ranks=ranks))
    assert found.rank == 1
    usual = simulated({}, ranks=ranks)[0].operations[-1].time
    truth = simulated({1: factor}, ranks=ranks)[0].operations[-1].time / usual
    assert found.slowdown == pytest.approx(truth, rel=0.2)


def test_ten_runs_without_a_slow_rank_have_no_straggler() -> None:
    for seed in range(10):
        for ranks in (2, 3, 8):
            assert find_stragglers(simulated({}, ranks=ranks, seed=seed)) == []


def test_a_single_pause_does_not_make_a_straggler() -> None:
    reports = simulated({}, ranks=2)
    late = reports[0].operations[70].time

    def delayed(operation: Operation, rank: int, index: int) -> Operation:
        after = index > 70 or (rank == 1 and index == 70)
        return replace(operation, time=operation.time + (late if after else 0.0))

    paused = {
        rank: replace(each, operations=tuple(delayed(op, rank, index) for index, op in enumerate(each.operations)))
        for rank, each in reports.items()
    }
    assert find_stragglers(paused) == []


def report(rank: int, *, time: float, starved: float) -> RankReport:
    return RankReport(rank=rank, answered=True, moment=ReportMoment(host="a", time=time, starved=starved))


@pytest.mark.parametrize(("starved", "expected"), [((1.0, 6.0), True), ((1.0, 1.5), False), ((5.0, 6.0), False)])
def test_a_rank_that_gets_fewer_cores_than_others_is_starved(starved: tuple[float, float], expected: bool) -> None:
    found = Straggler(rank=1, slowdown=2.0, waiting=0.5)
    before = {rank: report(rank, time=100.0, starved=7.0) for rank in range(2)}
    after = {rank: report(rank, time=110.0, starved=7.0 + seconds) for rank, seconds in enumerate(starved)}
    assert is_starved(found, before, after) == expected


def test_ranks_of_different_machines_are_not_compared() -> None:
    reports = {
        rank: replace(each, moment=ReportMoment(host=f"host {rank}"))
        for rank, each in simulated({1: 2.5}, ranks=2).items()
    }
    assert find_stragglers(reports) == []


# ---- replicas


def test_a_differing_replica_is_found_by_majority() -> None:
    table = np.array([[[5, 10], [6, 20]], [[5, 10], [6, 21]], [[5, 10], [6, 20]]])
    assert find_differing_ranks(table) == ((1,), True, frozenset({6}))


def test_of_two_differing_replicas_both_are_suspects() -> None:
    assert find_differing_ranks(np.array([[[5, 10]], [[5, 11]]])) == ((0, 1), False, frozenset({5}))


def test_shards_of_one_rank_and_padding_are_not_compared() -> None:
    assert find_differing_ranks(np.array([[[5, 10], [0, 0]], [[7, 11], [0, 3]]])) == ((), True, frozenset())
