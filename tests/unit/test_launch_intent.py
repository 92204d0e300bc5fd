"""What the supervisor intends after each fact, for all pairs of an intent and a fact."""

import pytest

from trimaran.launch import (
    AllStopped,
    Continue,
    HandOver,
    Intent,
    IntentFacts,
    LeaveOut,
    NodeChanges,
    Resize,
    Restart,
    Stop,
    StopRequests,
    next_intent,
)

CONTINUE, HAND_OVER = Continue(), HandOver()
RESIZE, LEAVE_OUT = Resize(size=4), LeaveOut(nodes=("b",))
STOP = Stop(cause="preempted", what="the run was asked to stop by the stop file")
OWN_STOP = Stop(cause="preempted", what="the run was asked to stop by SIGTERM", is_own=True)
MOVED = Stop(cause="storage", what="the run directory was moved")
B_STOPS = Stop(cause="preempted", what="b, c was asked to stop, and all ranks stopped")
RANK_STOPS = Stop(cause="preempted", what="a rank was asked to stop, and all ranks stopped")

INTENTS: tuple[Intent, ...] = (CONTINUE, RESIZE, LEAVE_OUT, STOP, OWN_STOP, HAND_OVER)
FACTS: dict[str, IntentFacts] = {
    "nobody asks for the end": StopRequests(),
    "a signal comes": StopRequests(signal="SIGTERM"),
    "the stop file is there": StopRequests(stop_file=True),
    "a signal comes and the stop file is there": StopRequests(signal="SIGTERM", stop_file=True),
    "the directory was moved": StopRequests(moved="the run directory was moved", signal="SIGTERM"),
    "the nodes stay": NodeChanges(),
    "nodes leave": NodeChanges(leaving=("b", "c"), size=8),
    "another size is wanted": NodeChanges(size=8),
    "all stopped": AllStopped(),
    "all stopped and no node leaves": AllStopped(enough_stay=True),
    "all stopped, nodes leave and enough stay": AllStopped(leaving=("b", "c"), enough_stay=True),
    "all stopped, nodes leave and too few stay": AllStopped(leaving=("b", "c")),
    "all stopped and another node can coordinate": AllStopped(can_hand_over=True),
    "the ranks start again": Restart(),
}
# What a fact changes, for the intents in the order of `INTENTS`. Nothing else changes an intent.
CHANGES: dict[str, dict[Intent, Intent]] = {
    "a signal comes": {CONTINUE: OWN_STOP, RESIZE: OWN_STOP, LEAVE_OUT: OWN_STOP},
    "the stop file is there": {CONTINUE: STOP},
    "a signal comes and the stop file is there": {
        CONTINUE: Stop(cause="preempted", what=OWN_STOP.what),
        RESIZE: OWN_STOP,
        LEAVE_OUT: OWN_STOP,
    },
    "the directory was moved": {CONTINUE: MOVED, RESIZE: MOVED, LEAVE_OUT: MOVED},
    "nodes leave": {CONTINUE: LeaveOut(nodes=("b", "c"))},
    "another size is wanted": {CONTINUE: Resize(size=8)},
    "all stopped": {CONTINUE: RANK_STOPS, LEAVE_OUT: RANK_STOPS},
    "all stopped and no node leaves": {CONTINUE: RANK_STOPS, LEAVE_OUT: RANK_STOPS},
    "all stopped, nodes leave and enough stay": {
        CONTINUE: LeaveOut(nodes=("b", "c")),
        LEAVE_OUT: LeaveOut(nodes=("b", "c")),
    },
    "all stopped, nodes leave and too few stay": {CONTINUE: B_STOPS, LEAVE_OUT: B_STOPS},
    "all stopped and another node can coordinate": {CONTINUE: RANK_STOPS, LEAVE_OUT: RANK_STOPS, OWN_STOP: HAND_OVER},
    "the ranks start again": {RESIZE: CONTINUE, LEAVE_OUT: CONTINUE},
}


@pytest.mark.parametrize("fact", FACTS)
@pytest.mark.parametrize("intent", INTENTS, ids=lambda intent: type(intent).__name__)
def test_each_pair_of_an_intent_and_a_fact_has_one_answer(intent: Intent, fact: str) -> None:
    assert next_intent(intent, FACTS[fact]) == CHANGES.get(fact, {}).get(intent, intent)


def after(*facts: IntentFacts) -> Intent:
    """Return the intent after these facts, one after the other."""
    intent: Intent = CONTINUE
    for each in facts:
        intent = next_intent(intent, each)
    return intent


def test_a_stop_outlasts_a_fault_and_whatever_the_nodes_do() -> None:
    signal, file = StopRequests(signal="SIGTERM"), StopRequests(stop_file=True)
    assert after(signal, Restart(), NodeChanges(leaving=("b",), size=8), AllStopped(leaving=("b",))) == OWN_STOP
    assert after(file, signal, AllStopped(can_hand_over=True)) == STOP


def test_a_stop_that_interrupts_a_resize_ends_the_run() -> None:
    assert after(NodeChanges(size=8), StopRequests(signal="SIGTERM"), AllStopped()) == OWN_STOP


def test_our_own_stop_file_ends_no_resize_but_one_that_is_left_ends_the_run() -> None:
    ours = StopRequests(stop_file=True)
    assert after(NodeChanges(size=8), ours, AllStopped()) == Resize(size=8)
    assert after(NodeChanges(size=8), ours, Restart(), ours) == STOP


def test_nodes_that_leave_while_the_run_is_resized_do_not_end_it() -> None:
    leave = AllStopped(leaving=("b",))
    assert after(NodeChanges(size=8), leave) == Resize(size=8)
    assert after(NodeChanges(leaving=("b",)), leave) == Stop(
        cause="preempted", what="b was asked to stop, and all ranks stopped"
    )


def test_only_the_node_that_was_asked_by_a_signal_hands_over() -> None:
    stopped = AllStopped(can_hand_over=True)
    assert after(StopRequests(signal="SIGTERM"), stopped, Restart(), StopRequests(signal="SIGINT")) == HandOver()
    assert after(StopRequests(moved="the run directory was moved"), stopped) == MOVED
