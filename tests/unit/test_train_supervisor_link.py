"""The section and the progress that a rank reports to its supervisor."""

import pytest

from trimaran.runs import HeartbeatBoard
from trimaran.train import NO_SUPERVISOR, SupervisorLink


@pytest.fixture
def link() -> SupervisorLink:
    board = HeartbeatBoard.make(2)
    board.clear()
    return SupervisorLink(board=board, local_rank=1)


def where(link: SupervisorLink) -> tuple[str, int]:
    assert link.heartbeat is not None
    return link.heartbeat.section, link.heartbeat.step


def test_a_section_that_ends_leaves_the_rank_in_the_section_before(link: SupervisorLink) -> None:
    link.report_section("step", 7)
    with link.section("evaluation", 8):
        assert where(link) == ("evaluation", 8)
        with link.section("data"):
            assert where(link) == ("data", 8)
        assert where(link) == ("evaluation", 8)
    assert where(link) == ("step", 7)


def test_a_section_that_raises_is_left_too(link: SupervisorLink) -> None:
    link.report_section("finish", 8)
    with pytest.raises(ValueError, match="planted"), link.section("sampling", 8):
        raise ValueError("planted")
    assert where(link) == ("finish", 8)


def test_every_unit_and_the_end_of_a_section_are_progress(link: SupervisorLink) -> None:
    entered: list[float] = []

    def note() -> None:
        assert link.heartbeat is not None
        entered.append(link.heartbeat.entered)

    note()
    with link.section("export", 3) as report_progress:
        note()
        report_progress()
        note()
        assert where(link) == ("export", 3)
    note()
    assert entered == sorted(set(entered))


def test_saved_is_reported_by_its_rank_alone_until_new_ranks_start(link: SupervisorLink) -> None:
    assert link.board is not None
    link.report_saved()
    assert [link.board.read(rank).saved for rank in (0, 1)] == [False, True]
    link.report_section("sampling", 8)
    assert link.board.read(1).saved
    link.board.clear()
    assert not link.board.read(1).saved


def test_without_a_supervisor_nothing_is_reported() -> None:
    with NO_SUPERVISOR.section("save", 3) as report_progress:
        report_progress()
    NO_SUPERVISOR.report_saved()
    assert NO_SUPERVISOR.heartbeat is None
