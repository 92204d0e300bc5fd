"""What nodes are told and tell each other, and when a network is called slow."""

import argparse
import json

import pytest

from trimaran.core import UserError
from trimaran.launch.network_check import STEPS, below_plan
from trimaran.launch.node import Ended, Lost, News, Silent
from trimaran.launch.node_options import NodeOptions, add_flags, node_options_of
from trimaran.launch.remote_node import news_of, record_of_news
from trimaran.run import Heartbeat


def flags(*words: str) -> NodeOptions | None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return node_options_of(parser.parse_args(words))


def test_without_flags_a_run_has_one_machine() -> None:
    assert flags() is None


def test_all_nodes_are_needed_unless_fewer_are_allowed() -> None:
    asked = flags("--nodes", "4", "--address", "127.0.0.1")
    assert asked == NodeOptions(nodes=4, min_nodes=4, address="127.0.0.1", wait_seconds=300.0)
    fewer = flags("--nodes", "4", "--min-nodes", "2", "--address", "127.0.0.1")
    assert fewer is not None
    assert fewer.min_nodes == 2


@pytest.mark.parametrize("words", [["--min-nodes", "3"], ["--min-nodes", "0"]])
def test_numbers_of_nodes_that_cannot_be_are_refused(words: list[str]) -> None:
    with pytest.raises(UserError, match="S024"):
        flags("--nodes", "2", "--address", "127.0.0.1", *words)


def test_several_nodes_need_an_address() -> None:
    with pytest.raises(UserError, match="S024"):
        flags("--nodes", "2")


def test_the_interface_is_the_one_that_has_the_address() -> None:
    assert NodeOptions(nodes=2, min_nodes=1, address="127.0.0.1").interface == "lo"
    with pytest.raises(UserError, match="S022"):
        _ = NodeOptions(nodes=2, min_nodes=1, address="203.0.113.7").interface


def test_nodes_on_one_machine_have_names_of_their_own_that_are_file_names() -> None:
    names = {
        NodeOptions(nodes=2, min_nodes=1, address=address).name for address in ("127.0.0.1", "127.0.0.2", "fe80::1")
    }
    assert len(names) == 3
    assert not any(set(name) & set("/:% ") for name in names)


@pytest.mark.parametrize(
    "news",
    [
        Ended(rank=3, code=-9, time=90.0),
        Silent(
            rank=1,
            heartbeat=Heartbeat(section="save", step=5, entered=80.0, alive=99.0, answered=2),
            seconds=20.0,
            deadline=6.0,
        ),
        Lost(node="b", what="the process that forks the ranks ended", ranks=(2, 3)),
    ],
)
def test_news_arrive_as_they_were_sent_by_the_clock_of_whoever_hears_them(news: News) -> None:
    letter = json.loads(json.dumps(record_of_news(news, 100.0)))
    assert news_of("b", letter, 100.0) == news
    later = news_of("b", letter, 5000.0)
    if isinstance(news, Ended):
        assert isinstance(later, Ended)
        assert later.time == 4990.0


def test_a_network_is_below_plan_when_steps_are_mostly_unforeseen_waiting() -> None:
    assert below_plan([1.0] * STEPS, [1.2] * STEPS, expected=0.01)
    assert not below_plan([1.0] * (STEPS - 1), [1.2] * (STEPS - 1), expected=0.01)  # too early to tell
    assert not below_plan([0.05] * STEPS, [0.06] * STEPS, expected=0.001)  # nothing that anybody would feel
    assert not below_plan([1.0] * STEPS, [9.0] * STEPS, expected=0.01)  # something else is slower
    assert not below_plan([1.0] * STEPS, [1.2] * STEPS, expected=0.5)  # as foreseen, nearly
    assert not below_plan([0.01] * (STEPS - 1) + [30.0], [1.0] * STEPS, expected=0.01)  # one bad step
