"""Who did it, from rank report that real ranks gave (recorded with the scenarios of tests/fault/test_blame.py)."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.runs import new_run
from trimaran.app.main import main
from trimaran.core import Cause, Incident
from trimaran.launch.attribution import attribute_fault
from trimaran.launch.exit_cause import count_oom_kills, read_end
from trimaran.launch.find_stragglers import Straggler, find_stragglers, is_starved
from trimaran.launch.incident_text import incident_text
from trimaran.launch.node import Ended
from trimaran.launch.rank_report import Operation, ReportMoment, read_rank_reports
from trimaran.launch.rank_report import RankReport as Account  # pytest would take RankReport for a test
from trimaran.run import IncidentLog, RunDirectory
from trimaran.train.health.replica_check import find_odd

RECORDED = Path(__file__).parent / "testimonies"


def recorded(name: str) -> dict[int, Account]:
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
        ("circle", "mismatch", (0, 1), ()),
    ],
)
def test_the_culprit_is_told_from_the_victims(
    name: str, cause: Cause, suspects: tuple[int, ...], victims: tuple[int, ...]
) -> None:
    judgement = attribute_fault(recorded(name), [], [])
    assert (judgement.cause, judgement.suspects, judgement.victims) == (cause, suspects, victims)
    assert judgement.evidence["facts"]


def test_an_operation_that_all_have_begun_and_none_ends_is_nobodys_fault() -> None:
    stuck = {
        rank: replace(each, operations=(*each.operations[:-1], replace(each.operations[-1], done=False)))
        for rank, each in recorded("stopped").items()
    }
    number = min(each.operations[-1].number for each in stuck.values())
    alike = {
        rank: replace(each, state="S", answered=True, operations=(replace(each.operations[-1], number=number),))
        for rank, each in stuck.items()
    }
    judgement = attribute_fault(alike, [], [])
    assert (judgement.cause, judgement.suspects) == ("network", ())


def test_ranks_that_wait_for_nobody_are_judged_by_how_far_they_came() -> None:
    idle = {rank: Account(rank=rank, answered=True, step=7 - (rank == 1)) for rank in range(3)}
    assert attribute_fault(idle, [], []).suspects == (1,)


def test_a_rank_that_timed_out_is_a_victim_of_the_one_that_still_hangs() -> None:
    reports = recorded("dp-missing")
    events = [{"kind": "error", "rank": 0, "data": {"type": "RuntimeError", "message": "Timed out waiting 600000ms"}}]
    judgement = attribute_fault(reports, [Ended(rank=0, code=1, time=1.0)], events)
    assert (judgement.cause, judgement.suspects, judgement.victims) == ("hang", (1,), (0, 2))


def test_the_operation_that_a_rank_of_another_group_never_heard_of_does_not_matter() -> None:
    """Two pairs; one pair waits for its own member only."""
    groups = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    reports = {
        rank: Account(
            rank=rank,
            answered=True,
            groups={str(members[0]): members},
            operations=(Operation(group=str(members[0]), number=5 - (rank == 3), op="all_reduce", done=rank != 2),),
        )
        for rank, members in groups.items()
    }
    judgement = attribute_fault(reports, [], [])
    assert judgement.suspects == (3,)


DEATHS: list[tuple[int, dict[str, object] | None, str, bool, Cause, bool]] = [
    # exit code, data of the error event, last words, the kernel killed for memory; cause, of itself
    (-9, None, "", False, "crash", True),
    (-9, None, "", True, "oom", True),
    (-11, None, "Fatal Python error: Segmentation fault", False, "crash", True),
    (-6, None, "what():  std::bad_alloc", False, "oom", True),
    (-6, None, "Is there a distributed collective mismatch in your code?", False, "mismatch", True),
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


@pytest.mark.parametrize(("code", "error", "words", "killed", "cause", "own"), DEATHS)
def test_each_end_has_its_cause(
    code: int, error: dict[str, object] | None, words: str, killed: bool, cause: Cause, own: bool
) -> None:
    fault = read_end(code, error, words, oom_killed=killed)
    assert (fault.cause, fault.own) == (cause, own)


def test_who_failed_comes_before_who_lost_it_whoever_ended_first() -> None:
    lost = {"type": "RuntimeError", "message": "Connection closed by peer"}
    events = [{"kind": "error", "rank": rank, "data": lost} for rank in (0, 2)]
    deaths = [Ended(rank=0, code=1, time=1.0), Ended(rank=2, code=1, time=1.1), Ended(rank=1, code=-9, time=1.2)]
    judgement = attribute_fault({}, deaths, events)
    assert (judgement.cause, judgement.suspects, judgement.victims) == ("crash", (1,), (0, 2))
    assert judgement.what == "rank 1 was killed by SIGKILL"


def test_two_that_were_killed_are_both_named() -> None:
    deaths = [Ended(rank=3, code=-9, time=1.0), Ended(rank=1, code=-9, time=1.3)]
    judgement = attribute_fault({rank: Account(rank=rank, state="S") for rank in range(4)}, deaths, [])
    assert (judgement.suspects, judgement.victims) == ((1, 3), (0, 2))


def test_samples_that_cannot_be_loaded_are_evidence() -> None:
    data = {"type": "LoaderFault", "message": "bad", "cause": "data", "sample_ids": [41, 7]}
    judgement = attribute_fault({}, [Ended(rank=0, code=1, time=0.0)], [{"kind": "error", "rank": 0, "data": data}])
    assert (judgement.cause, judgement.evidence["sample_ids"]) == ("data", [7, 41])


def test_ranks_that_all_lost_each_other_blame_the_network() -> None:
    lost = {"type": "RuntimeError", "message": "Connection closed by peer"}
    events = [{"kind": "error", "rank": rank, "data": lost} for rank in (0, 1)]
    judgement = attribute_fault({}, [Ended(rank=rank, code=1, time=0.0) for rank in (0, 1)], events)
    assert (judgement.cause, judgement.suspects) == ("network", ())


@pytest.mark.parametrize("spoil", [lambda text: text[: len(text) // 2], lambda _: "", lambda _: "[]", lambda _: "{}",
                                   lambda _: '{"section": 3, "frames": 7}'])  # fmt: skip
def test_a_spoilt_testimony_is_silence(tmp_path: Path, spoil: Callable[[str], str]) -> None:
    shutil.copytree(RECORDED / "dp-missing", tmp_path / "folder")
    path = tmp_path / "folder" / "rank-1.json"
    path.write_text(spoil(path.read_text()))
    reports = read_rank_reports(RunDirectory(tmp_path), tmp_path / "folder", range(3))
    assert [each.answered for each in reports.values()] == [True, False, True]
    assert reports[1].state == "S"


def test_nothing_at_all_is_known_of_ranks_that_left_no_file(tmp_path: Path) -> None:
    reports = read_rank_reports(RunDirectory(tmp_path), tmp_path / "none", range(2))
    assert attribute_fault(reports, [], []).cause == "unknown"


def test_kills_for_want_of_memory_are_counted_where_the_kernel_counts_them(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "memory.events").write_text("low 0\noom 4\noom_kill 3\noom_group_kill 9\n")
    (tmp_path / "cgroup").write_text("0::/job\n")
    assert count_oom_kills(tmp_path, tmp_path / "cgroup") == 3
    assert count_oom_kills(tmp_path / "none", tmp_path / "cgroup") == 0
    (tmp_path / "memory" / "box").mkdir(parents=True)
    (tmp_path / "memory" / "box" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    (tmp_path / "older").write_text("4:memory:/box\n1:cpu:/\n0::/\n")
    assert count_oom_kills(tmp_path, tmp_path / "older") == 2


# ---- verdicts


def hang() -> Incident:
    facts = ["rank 1 stands at net.py:3 in forward: sleep(9)", "a", "b", "c"]
    evidence = {"facts": facts, "files": ["rank-1.stacks.txt"], "why": "from the newest state"}
    return Incident(id="i-0002", cause="hang", time=0.0, what="rank 1 did not come to where the others wait", step=12,
                    suspects=(1,), victims=(0, 2), evidence=evidence, action="restarted",
                    cost={"seconds_to_detect": 6.21, "seconds_to_recover": 8.04, "lost_steps": 1.0})  # fmt: skip


def test_a_verdict_says_what_who_why_what_was_done_and_what_it_cost() -> None:
    assert incident_text(hang()).splitlines() == [
        "i-0002  hang after step 12: rank 1 did not come to where the others wait",
        "  who:      rank 1 did it; ranks 0 and 2 only suffered from it",
        "  evidence: rank 1 stands at net.py:3 in forward: sleep(9)",
        "            a",
        "            b",
        "            and 1 fact more",
        "            see incidents/i-0002/rank-1.stacks.txt",
        "  done:     started again from the newest state",
        "  cost:     noticed in 6.2 s, the next new step after 8.0 s, 1 step done again",
    ]


def test_a_verdict_of_which_little_is_known_yet_is_short() -> None:
    text = incident_text(Incident(id="i-0001", cause="network", time=0.0, what="lost node b"))
    assert text.splitlines() == [
        "i-0001  network: lost node b",
        "  who:      no rank is to blame",
        "  done:     nothing yet",
    ]


def test_the_verb_shows_every_incident(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = new_run(tmp_path / "run")
    assert main(["incidents", str(run.path)]) == 0
    assert capsys.readouterr().out == "nothing went wrong in this run\n"
    log = IncidentLog(run)
    log.amend(log.notice("exit", "rank 0 left early", suspects=(0,)), action="stopped")
    log.notice("straggler", "rank 1 is slow", suspects=(1,), action="continued", cost={"slowdown": 2.5})
    assert main(["incidents", str(run.path)]) == 0
    shown = capsys.readouterr().out
    assert "i-0001  exit: rank 0 left early" in shown
    assert "every step takes 2.5 times as long" in shown
    assert main(["incidents", str(run.path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [(each["cause"], each["action"]) for each in answer] == [("exit", "stopped"), ("straggler", "continued")]
    assert answer[0]["incident_text"].startswith("i-0001  exit")


# ---- stragglers


def simulated(slow: dict[int, float], *, ranks: int = 4, steps: int = 20, seed: int = 0) -> dict[int, Account]:
    """Steps of a data-parallel run: four gradient sums that nobody waits for until the last, then the loss's.

    Computing takes 10 ms before each of them, give or take a fifth, `slow` times as long on some ranks; 1 ms to sum.
    """
    dice = random.Random(seed)
    now, numbers = dict.fromkeys(range(ranks), 0.0), 0
    operations: dict[int, list[Operation]] = {rank: [] for rank in range(ranks)}
    members = tuple(range(ranks))

    def arrive(size: int) -> float:
        nonlocal numbers
        numbers += 1
        for rank in range(ranks):
            now[rank] += 0.010 * slow.get(rank, 1.0) * dice.uniform(0.8, 1.2)
            operations[rank].append(
                Operation(group="0", number=numbers, op="all_reduce", sizes=((size,),), done=True, time=now[rank])
            )
        return max(now.values()) + 0.001

    for _ in range(steps):
        over = max(arrive(100 + bucket) for bucket in range(4))
        now.update(dict.fromkeys(now, over))
        over = arrive(1)
        now.update(dict.fromkeys(now, over))
    return {
        rank: Account(
            rank=rank, answered=True, moment=ReportMoment(host="a"), groups={"0": members}, operations=tuple(each)
        )
        for rank, each in operations.items()
    }


@pytest.mark.parametrize(("ranks", "factor"), [(2, 2.5), (4, 2.5), (8, 1.6), (3, 4.0)])
def test_a_slow_rank_is_found_in_twenty_steps_and_its_price_is_known(ranks: int, factor: float) -> None:
    (found,) = find_stragglers(simulated({1: factor}, ranks=ranks))
    assert found.rank == 1
    usual = simulated({}, ranks=ranks)[0].operations[-1].time
    truth = simulated({1: factor}, ranks=ranks)[0].operations[-1].time / usual
    assert found.slowdown == pytest.approx(truth, rel=0.2)


def test_no_rank_of_ten_clean_runs_is_called_slow() -> None:
    for seed in range(10):
        for ranks in (2, 3, 8):
            assert find_stragglers(simulated({}, ranks=ranks, seed=seed)) == []


def test_a_single_pause_is_no_slowness() -> None:
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


def told(rank: int, *, time: float, starved: float) -> Account:
    return Account(rank=rank, answered=True, moment=ReportMoment(host="a", time=time, starved=starved))


@pytest.mark.parametrize(("starved", "expected"), [((1.0, 6.0), True), ((1.0, 1.5), False), ((5.0, 6.0), False)])
def test_a_rank_that_gets_less_of_busy_cores_is_not_to_blame(starved: tuple[float, float], expected: bool) -> None:
    found = Straggler(rank=1, slowdown=2.0, waiting=0.5)
    before = {rank: told(rank, time=100.0, starved=7.0) for rank in range(2)}
    after = {rank: told(rank, time=110.0, starved=7.0 + seconds) for rank, seconds in enumerate(starved)}
    assert is_starved(found, before, after) == expected


def test_ranks_of_other_machines_have_other_clocks_and_are_not_compared() -> None:
    apart = {
        rank: replace(each, moment=ReportMoment(host=f"host {rank}"))
        for rank, each in simulated({1: 2.5}, ranks=2).items()
    }
    assert find_stragglers(apart) == []


# ---- replicas


def test_the_rank_whose_replica_differs_is_found_by_majority() -> None:
    table = np.array([[[5, 10], [6, 20]], [[5, 10], [6, 21]], [[5, 10], [6, 20]]])
    assert find_odd(table) == ((1,), True, frozenset({6}))


def test_of_two_replicas_that_differ_both_are_named() -> None:
    assert find_odd(np.array([[[5, 10]], [[5, 11]]])) == ((0, 1), False, frozenset({5}))


def test_pieces_that_one_rank_holds_alone_are_not_compared_and_neither_is_padding() -> None:
    assert find_odd(np.array([[[5, 10], [0, 0]], [[7, 11], [0, 3]]])) == ((), True, frozenset())
