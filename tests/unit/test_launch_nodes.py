"""The options of nodes, the events they send, and when a network is below plan."""

import argparse
import json
import socket
from pathlib import Path

import pytest

from trimaran.core import UserError
from trimaran.launch import (
    NUM_STEPS,
    NodeEvent,
    NodeLost,
    NodeOptions,
    RankEnded,
    RankSilent,
    add_node_flags,
    default_address,
    event_of_record,
    find_own_address,
    interface_addresses,
    is_below_plan,
    parse_node_options,
    record_of_event,
    source_towards,
    with_own_address,
)
from trimaran.runs import Heartbeat, RunDirectory, take_lease


def parse(*arguments: str) -> NodeOptions | None:
    parser = argparse.ArgumentParser()
    add_node_flags(parser)
    return parse_node_options(parser.parse_args(arguments))


def test_without_options_a_run_has_one_machine() -> None:
    assert parse() is None


def test_all_nodes_are_needed_unless_fewer_are_allowed() -> None:
    options = parse("--nodes", "4", "--address", "127.0.0.1")
    assert options == NodeOptions(nodes=4, min_nodes=4, address="127.0.0.1", wait_seconds=300.0)
    fewer = parse("--nodes", "4", "--min-nodes", "2", "--address", "127.0.0.1")
    assert fewer is not None
    assert fewer.min_nodes == 2


def test_a_start_may_need_fewer_nodes_than_take_part_at_most() -> None:
    options = parse("--nodes", "4", "--min-nodes", "1", "--start-nodes", "2", "--address", "127.0.0.1")
    assert options is not None
    assert (options.nodes, options.num_at_start) == (4, 2)
    usual = parse("--nodes", "4", "--address", "127.0.0.1")
    assert usual is not None
    assert usual.num_at_start == 4


@pytest.mark.parametrize(
    "arguments",
    [["--min-nodes", "3"], ["--min-nodes", "0"], ["--start-nodes", "3"], ["--min-nodes", "2", "--start-nodes", "1"]],
)
def test_an_invalid_minimum_of_nodes_is_refused(arguments: list[str]) -> None:
    with pytest.raises(UserError, match="S024"):
        parse("--nodes", "2", "--address", "127.0.0.1", *arguments)


def test_several_nodes_find_their_address(tmp_path: Path) -> None:
    options = parse("--nodes", "2", "--head", "127.0.0.1")
    assert options is not None
    assert options.address == "auto"
    run = RunDirectory(tmp_path)
    assert with_own_address(options, run).address == "127.0.0.1"
    given = parse("--nodes", "2", "--address", "127.0.0.9")
    assert given is not None
    assert with_own_address(given, run) is given


def test_the_address_is_that_of_the_route_to_the_coordinator(tmp_path: Path) -> None:
    options, run = parse("--nodes", "2"), RunDirectory(tmp_path)
    assert options is not None
    with take_lease(run, address="127.0.0.1:4000"):
        assert with_own_address(options, run).address == "127.0.0.1"


def test_a_name_that_leads_to_loopback_is_not_taken_for_an_address_that_others_reach() -> None:
    """Debian lists a machine's own host name as 127.0.1.1."""
    names = {"node-a": ["127.0.1.1"], "node-b": ["127.0.0.1"]}
    found = find_own_address([*names], look_up=lambda host: names[host], default=lambda: "203.0.113.7")
    assert found == "203.0.113.7"


def test_hosts_that_cannot_be_resolved_are_refused() -> None:
    with pytest.raises(UserError, match="L020"):
        find_own_address(["no such host"], wait_seconds=0.0)


def test_without_a_default_route_the_only_interface_is_taken_and_several_are_refused() -> None:
    def with_interfaces(*addresses: str) -> str:
        return default_address((), lambda: [(f"eth{number}", address) for number, address in enumerate(addresses)])

    assert with_interfaces() == "127.0.0.1"
    assert with_interfaces("10.0.0.5") == "10.0.0.5"
    with pytest.raises(UserError, match=r"L020: .*10.0.0.5 \(eth0\), 10.1.0.5 \(eth1\)"):
        with_interfaces("10.0.0.5", "10.1.0.5")


def test_the_interfaces_of_this_machine_are_listed_without_loopback() -> None:
    listed = dict(interface_addresses())
    assert "lo" not in listed
    for name, address in listed.items():
        assert NodeOptions(nodes=2, min_nodes=1, address=address).interface == name


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_a_route_of_ipv6_is_asked_like_one_of_ipv4() -> None:
    assert source_towards("::1") in ("::1", "")
    assert source_towards("127.0.0.5") == "127.0.0.1"
    assert source_towards("fe80::1") == ""


def test_a_node_can_be_named() -> None:
    options = parse("--nodes", "2", "--node-name", "rack 3/node b")
    assert options is not None
    assert options.name == "rack-3-node-b"


def test_the_interface_is_the_one_that_has_the_address() -> None:
    assert NodeOptions(nodes=2, min_nodes=1, address="127.0.0.1").interface == "lo"
    with pytest.raises(UserError, match="S022"):
        _ = NodeOptions(nodes=2, min_nodes=1, address="203.0.113.7").interface


def test_nodes_on_one_machine_have_unique_names_that_are_valid_file_names() -> None:
    names = {
        NodeOptions(nodes=2, min_nodes=1, address=address).name for address in ("127.0.0.1", "127.0.0.2", "fe80::1")
    }
    assert len(names) == 3
    assert not any(set(name) & set("/:% ") for name in names)


@pytest.mark.parametrize(
    "event",
    [
        RankEnded(rank=3, code=-9, time=90.0),
        RankSilent(
            rank=1,
            heartbeat=Heartbeat(section="save", step=5, entered=80.0, alive=99.0, answered=2),
            seconds=20.0,
            deadline=6.0,
        ),
        NodeLost(node="b", what="the fork server exited with code -9", ranks=(2, 3)),
    ],
)
def test_events_survive_a_round_trip_with_times_of_the_receivers_clock(event: NodeEvent) -> None:
    record = json.loads(json.dumps(record_of_event(event, 100.0)))
    assert event_of_record("b", record, 100.0) == event
    later = event_of_record("b", record, 5000.0)
    if isinstance(event, RankEnded):
        assert isinstance(later, RankEnded)
        assert later.time == 4990.0


def test_a_network_is_below_plan_if_communication_dominates_steps_unpredicted() -> None:
    assert is_below_plan([1.0] * NUM_STEPS, [1.2] * NUM_STEPS, expected=0.01)
    assert not is_below_plan([1.0] * (NUM_STEPS - 1), [1.2] * (NUM_STEPS - 1), expected=0.01)  # too few steps
    assert not is_below_plan([0.05] * NUM_STEPS, [0.06] * NUM_STEPS, expected=0.001)  # a small absolute difference
    assert not is_below_plan([1.0] * NUM_STEPS, [9.0] * NUM_STEPS, expected=0.01)  # something else takes longer
    assert not is_below_plan([1.0] * NUM_STEPS, [1.2] * NUM_STEPS, expected=0.5)  # close to the prediction
    assert not is_below_plan([0.01] * (NUM_STEPS - 1) + [30.0], [1.0] * NUM_STEPS, expected=0.01)  # one bad step
