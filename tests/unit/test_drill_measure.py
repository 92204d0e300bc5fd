"""The results of drills, from what runs wrote after a fault; recorded from real drills of two ranks."""

import os
from pathlib import Path

import pytest

from tests.disks import mounted
from tests.runs import new_run
from trimaran.app import (
    INJECTIONS,
    KINDS,
    MAX_FILL_BYTES,
    DrillFault,
    DrillResult,
    FaultName,
    Observed,
    RunObserver,
    damage_checkpoint,
    drills_file,
    filled_disk,
    is_complete,
    is_own,
    judge,
    mark_as_own,
    parse_slow,
    refuse_shared_disk,
)
from trimaran.core import Action, Bytes, Cause, Incident, UserError
from trimaran.runs import IncidentLog


def fault(name: FaultName, rank: int | None = 1) -> DrillFault:
    return DrillFault(kind=KINDS[name], rank=rank)


def incident(
    cause: Cause, *suspects: int, action: Action | None = None, step: int = 0, name: str = "i-0001"
) -> Incident:
    return Incident(id=name, cause=cause, time=1000.0, what="it happened", suspects=suspects, action=action, step=step)


def result(fault: DrillFault, seen: Observed, *, can_resume: bool = True) -> DrillResult:
    return judge(fault, seen, time=1000.0, can_resume=can_resume, within=60.0)


def killed() -> Observed:
    """A rank is killed in step 23: the others finish it, the ranks start again from step 22, and repeat step 23."""
    return Observed(
        step_before=22,
        steps=[(0.1, 23), (1.3, 23), (1.4, 24), (1.5, 25)],
        starts=[(1.1, 22)],
        incidents=[
            (0.05, incident("crash", 1, step=23)),
            (0.4, incident("crash", 1, action="restarted", step=23)),
        ],
    )


def test_a_killed_rank_is_detected_named_and_recovered() -> None:
    found = result(fault("kill"), killed())
    assert (found.detected_seconds, found.recovered_seconds, found.lost_steps) == (0.05, 1.4, 1)
    assert (found.named, found.passed, found.incident, found.note) == (True, True, "i-0001", "")
    assert is_complete(fault("kill"), killed(), can_resume=False)


def test_steps_that_are_repeated_are_no_recovery() -> None:
    seen = killed()
    seen.steps = seen.steps[:2]
    assert not is_complete(fault("kill"), seen, can_resume=False)
    found = result(fault("kill"), seen)
    assert (found.recovered_seconds, found.passed, found.note) == (None, False, "no new step within 60 s")


def test_a_hang_is_detected_when_its_rank_is_known() -> None:
    seen = Observed(
        step_before=40,
        steps=[(8.4, 41)],
        starts=[(8.1, 40)],
        incidents=[
            (6.2, incident("hang", step=40)),
            (6.9, incident("hang", 1, step=40)),
            (7.0, incident("hang", 1, action="restarted", step=40)),
        ],
    )
    found = result(fault("stop"), seen)
    assert (found.detected_seconds, found.recovered_seconds, found.lost_steps, found.passed) == (6.9, 8.4, 0, True)


@pytest.mark.parametrize(("cause", "rank"), [("crash", 0), ("hang", 1)])
def test_a_wrong_rank_or_cause_does_not_pass(cause: Cause, rank: int) -> None:
    seen = killed()
    seen.incidents = [(0.05, incident(cause, rank, action="restarted", step=23))]
    found = result(fault("kill"), seen)
    assert (found.named, found.passed) == (False, False)
    assert found.note == f"wrongly attributed: {cause} of rank {rank}: it happened"


def test_a_slow_rank_found_by_the_way_does_not_count() -> None:
    seen = killed()
    seen.incidents.insert(0, (0.01, incident("straggler", 0, action="continued", name="i-0000")))
    assert result(fault("kill"), seen).incident == "i-0001"


def test_a_slow_rank_is_undone_and_must_not_restart_the_run() -> None:
    seen = Observed(
        step_before=50,
        steps=[(0.5, 51), (2.7, 60), (2.8, 61), (2.9, 62)],
        incidents=[(2.5, incident("straggler", 1, action="continued"))],
    )
    assert not is_complete(fault("slow"), seen, can_resume=False)  # the rank is still slow
    seen.undone = 2.6
    assert is_complete(fault("slow"), seen, can_resume=False)
    assert (result(fault("slow"), seen).recovered_seconds, result(fault("slow"), seen).passed) == (2.9, True)
    seen.starts = [(2.65, 50)]
    found = result(fault("slow"), seen)
    assert (found.passed, found.note) == (False, "the ranks were started again, which this fault does not need")


def test_a_fault_that_nobody_notices_does_not_pass() -> None:
    found = result(fault("fill-disk", None), Observed(step_before=5, steps=[(1.0, 6), (2.0, 7), (3.0, 8)]))
    assert (found.named, found.passed, found.note) == (False, False, "not noticed within 60 s")


def test_a_replaced_loader_is_detected_from_the_log() -> None:
    line = "WARNING trimaran.data.worker_pool: loader worker 0 was replaced at step 7: killed by SIGKILL"
    seen = Observed(step_before=5, steps=[(1.0, 6), (1.1, 7), (1.2, 8)], log_lines=[(0.3, line)])
    found = result(fault("kill-loader"), seen)
    assert (found.detected_seconds, found.recovered_seconds, found.lost_steps, found.passed) == (0.3, 1.2, 0, True)


def test_a_run_that_is_asked_to_stop_has_to_be_resumed_by_its_user() -> None:
    seen = Observed(step_before=9, incidents=[(0.1, incident("preempted", action="saved", step=11))])
    assert not is_complete(fault("terminate", None), seen, can_resume=False)
    seen.gone, seen.exit_code = 0.8, 75
    found = result(fault("terminate", None), seen, can_resume=False)
    assert (found.passed, found.named, found.recovered_seconds) == (True, True, None)
    assert found.note == "all processes ended after 0.8 s with exit code 75; `trimaran resume` continues the run"
    seen.exit_code = 93
    assert not result(fault("terminate", None), seen, can_resume=False).passed


def test_a_killed_supervisor_is_named_by_the_next_start() -> None:
    seen = Observed(step_before=30, gone=0.2)
    alone = result(fault("kill-supervisor", None), seen, can_resume=False)
    assert (alone.passed, alone.named, alone.note[-17:]) == (True, False, "continues the run")
    seen.starts, seen.steps = [(4.0, 20)], [(4.1, 21), (5.0, 31)]
    seen.incidents = [(3.5, incident("host", action="restarted", step=30))]
    found = result(fault("kill-supervisor", None), seen)
    assert (found.passed, found.named, found.lost_steps, found.recovered_seconds) == (True, True, 10, 5.0)


def test_an_observer_reads_only_what_is_new(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    log = IncidentLog(run)
    old = log.notice("crash", "an earlier fault", suspects=(0,))
    run.metrics.write_text('{"step": 7, "step_seconds": 0.5}\n')
    observer = RunObserver(run)
    log.amend(old, action="restarted")
    new = log.notice("hang", "no progress")
    observer.poll()
    named = log.amend(new, suspects=(1,))
    with run.metrics.open("a") as file:
        file.write('{"step": 8}\n')
    observer.poll()
    assert (observer.seen.step_before, [step for _, step in observer.seen.steps]) == (7, [8])
    assert [each for _, each in observer.seen.incidents] == [new, named]


def test_every_kind_can_be_injected_and_those_that_end_the_run_come_last() -> None:
    assert INJECTIONS.keys() == KINDS.keys()
    ends = [kind.ends_run for kind in KINDS.values()]
    assert ends == sorted(ends)


@pytest.mark.parametrize("text", ["1", "1=", "1=0.5x", "1=1x", "1=99x", "x=2x", "-1=2x", "1=2x3"])
def test_a_slowdown_needs_a_rank_and_a_factor(text: str) -> None:
    with pytest.raises(UserError, match="A001"):
        parse_slow(text)


def test_a_slowdown_is_shown_as_it_was_typed() -> None:
    assert parse_slow("3=2.5x").title == "slow 3=2.5x"
    assert parse_slow("0=2").factor == 2.0


def test_a_disk_is_filled_and_freed_again(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=4m") as disk:
        before = os.statvfs(disk).f_bfree
        with filled_disk(disk) as size:
            assert size >= 3 << 20
            assert os.statvfs(disk).f_bfree == 0
            assert list(disk.iterdir()) == []  # the file has no name: the kernel removes it with this process
            with pytest.raises(OSError, match="No space left"):
                (disk / "one").write_bytes(bytes(4096))
        (disk / "one").unlink()
        assert os.statvfs(disk).f_bfree == before


def test_the_disk_of_the_system_and_large_disks_are_not_filled(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=4m") as disk:
        refuse_shared_disk(disk, allow_root=False)
        with pytest.raises(UserError, match="S033"):
            refuse_shared_disk(disk, allow_root=True, max_bytes=Bytes(1 << 20))
    any_size = Bytes(1 << 60)
    with pytest.raises(UserError, match="the disk of the system"):
        refuse_shared_disk(Path("/"), allow_root=False, max_bytes=any_size)
    refuse_shared_disk(Path("/"), allow_root=True, max_bytes=any_size)
    assert MAX_FILL_BYTES <= 64 << 30


def test_one_bit_of_the_newest_checkpoint_is_flipped_and_shared_files_stay(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    for step in (10, 20):
        folder = run.checkpoints / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    first, second = (run.checkpoints / f"step-{step:08d}" / "rank-00000.safetensors" for step in (10, 20))
    first.write_bytes(bytes(100))
    os.link(first, second)
    assert damage_checkpoint(run) == second
    assert first.read_bytes() == bytes(100)
    assert sum(each.bit_count() for each in second.read_bytes()) == 1


def test_a_run_that_a_drill_has_started_is_known(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    assert not is_own(run)
    drills_file(run).write_text('{"fault":"kill 1"}\n')
    assert not is_own(run)
    mark_as_own(run)
    assert is_own(run)
