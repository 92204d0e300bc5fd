"""The lease of a run: one holder at a time, by terms and counters, without comparing clocks."""

import json
import multiprocessing
import os
import stat
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from trimaran.core import UserError
from trimaran.runs import (
    EXPIRY_SECONDS,
    FENCED_SECONDS,
    RENEW_SECONDS,
    LeaseHolder,
    LeaseWatch,
    RunDirectory,
    claim_term,
    newest_term,
    read_holder,
    run_token,
    take_lease,
)

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when the condition holds; fail after much longer than it takes on a busy machine."""
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def rewrite_holder(run: RunDirectory, **changes: Any) -> None:
    """Make the newest term look as if another machine or process had claimed it."""
    holder = read_holder(run)
    assert holder is not None
    path = run.lease / f"term-{holder.term:06d}.json"
    path.write_text(json.dumps(asdict(replace(holder, **changes))))


def died(run: RunDirectory) -> None:
    """Let a process take the lease and end without releasing it."""
    holder = FORK.Process(target=lambda: (take_lease(run), os._exit(0)))
    holder.start()
    holder.join()


def test_the_first_term_is_one_and_a_released_lease_is_free_at_once(run: RunDirectory) -> None:
    with take_lease(run, address="127.0.0.1:1") as first:
        assert (first.term, first.holds(), newest_term(run)) == (1, True, 1)
        assert read_holder(run) == first.holder
    assert not first.holds()
    with take_lease(run) as second:
        assert second.term == 2


def test_a_second_process_gets_the_name_of_the_live_holder(run: RunDirectory) -> None:
    with take_lease(run), pytest.raises(UserError) as refused:
        take_lease(run)
    assert refused.value.code == "S020"
    assert f"process {os.getpid()} on" in refused.value.what
    assert newest_term(run) == 1


def test_a_holder_whose_process_is_gone_is_replaced_at_once(run: RunDirectory) -> None:
    died(run)
    assert LeaseWatch(run).poll() == 2, "it does not wait for the counter to stop"
    with take_lease(run) as second:
        assert second.term == 2


def test_a_reused_pid_is_not_the_holder(run: RunDirectory) -> None:
    first = take_lease(run)
    rewrite_holder(run, started=first.holder.started + 1)
    assert LeaseWatch(run).poll() == 2


def test_a_higher_term_ends_a_lease(run: RunDirectory) -> None:
    first = take_lease(run)
    second = claim_term(run, 2)
    assert second is not None
    wait_until(lambda: not first.holds())
    assert second.holds()
    assert claim_term(run, 2) is None
    first.release()
    second.release()


def test_one_of_six_contenders_wins(run: RunDirectory) -> None:
    """All see the same dead holder and start at the same moment."""
    died(run)
    go, answers = FORK.Barrier(6), FORK.Queue()

    def contend() -> None:
        go.wait()
        try:
            answers.put(take_lease(run).term)
        except UserError as refused:
            answers.put(refused.code)
        time.sleep(30.0)  # the winner stays alive while the others poll

    contenders = [FORK.Process(target=contend) for _ in range(6)]
    for each in contenders:
        each.start()
    results = sorted(str(answers.get(timeout=20.0)) for _ in contenders)
    for each in contenders:
        each.kill()
        each.join()
    assert results == ["2"] + ["S020"] * 5


def test_a_holder_elsewhere_that_renews_is_alive_whatever_its_clock_says(run: RunDirectory) -> None:
    first = take_lease(run)
    rewrite_holder(run, machine="elsewhere", created=time.time() - 1e6)
    with pytest.raises(UserError, match="S020"):
        take_lease(run)
    first.release()


def test_a_holder_elsewhere_is_dead_when_its_counter_stops(run: RunDirectory) -> None:
    died(run)
    rewrite_holder(run, machine="elsewhere", created=time.time() + 1e6)
    now = 0.0
    watch = LeaseWatch(run, clock=lambda: now)
    alive = read_holder(run)
    assert (watch.poll(), watch.certain) == (alive, False)
    now = EXPIRY_SECONDS - 0.1
    (run.lease / "beat-000001").write_text("99")
    assert (watch.poll(), watch.certain) == (alive, True), "its counter has changed"
    now += EXPIRY_SECONDS - 0.1
    assert watch.poll() == alive
    now += 0.2
    assert watch.poll() == 2
    with claim_term(run, 2) or pytest.fail("nobody else has claimed it") as second:
        assert second.term == 2


def test_a_shared_lease_that_cannot_renew_fences_itself(run: RunDirectory) -> None:
    """Its directory is unreachable, as when a network disk is gone: to others it soon looks dead."""
    now = 0.0
    run_token(run)
    shared = claim_term(run, 1, shared=True, clock=lambda: now)
    assert shared is not None
    assert claim_term(run, 1) is None
    wait_until(lambda: (run.lease / "beat-000001").exists())
    run.lease.rename(run.path / "away")
    now = FENCED_SECONDS + 0.1
    wait_until(lambda: not shared.holds())
    (run.path / "away").rename(run.lease)
    now += RENEW_SECONDS
    wait_until(shared.holds)
    shared.release()


def test_an_incomplete_term_file_expires_by_its_counter(run: RunDirectory) -> None:
    run_token(run)
    (run.lease / "term-000007.json").write_text('{"term": 7, "ho')
    now = 0.0
    watch = LeaseWatch(run, clock=lambda: now)
    holder = watch.poll()
    assert isinstance(holder, LeaseHolder)
    assert holder.term == 7
    now = EXPIRY_SECONDS
    assert watch.poll() == 8


def test_the_token_is_created_once_and_private(run: RunDirectory) -> None:
    token = run_token(run)
    assert len(token) >= 40
    assert run_token(run) == token
    assert stat.S_IMODE((run.lease / "token").stat().st_mode) == 0o600
    assert stat.S_IMODE(run.lease.stat().st_mode) == 0o700
    with take_lease(run) as held:
        text = (run.lease / "term-000001.json").read_text()
        assert token not in text
        assert token not in str(held.holder)


def test_a_token_that_other_users_can_read_is_refused(run: RunDirectory) -> None:
    run_token(run)
    (run.lease / "token").chmod(0o644)
    with pytest.raises(UserError, match="S021"):
        run_token(run)


def test_a_token_behind_a_link_is_refused(run: RunDirectory, tmp_path: Path) -> None:
    run.lease.mkdir(mode=0o700)
    (tmp_path / "elsewhere").write_text("public")
    (run.lease / "token").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="S021"):
        take_lease(run)
