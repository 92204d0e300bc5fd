"""Seconds of a collective, worked by hand."""

from dataclasses import replace

import pytest

from trimaran.core import Seconds
from trimaran.cost import (
    NETWORK_EFFICIENCY,
    NETWORK_GATHER_EFFICIENCY,
    REDUCE_HOP_FACTOR,
    RING_EFFICIENCY,
    Ring,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    ring_of,
    send_seconds,
)
from trimaran.machine import Link, parse_cluster

FOUR = Ring(
    4,
    "wire",
    Seconds(1.0),
    reduce_bandwidth=100.0,
    gather_bandwidth=50.0,
    exchange_bandwidth=25.0,
    send_bandwidth=10.0,
)


def test_an_all_reduce_goes_round_the_ring_twice() -> None:
    assert all_reduce_seconds(400, FOUR) == 2 * 3 * (REDUCE_HOP_FACTOR * 1.0 + 100 / 100)


def test_an_all_reduce_of_many_ranks_uses_a_tree() -> None:
    many = FOUR._replace(num_ranks=1024, tree_bandwidth=20.0)
    assert all_reduce_seconds(400, many) == 2 * (10 * 1.0 + 400 / 20)


def test_an_all_gather_uses_each_link_once_with_a_hop_per_other_rank() -> None:
    assert all_gather_seconds(400, FOUR) == 3 * 1.0 + 3 / 4 * 400 / 50


def test_an_all_to_all_sends_all_but_its_own_part_and_a_send_everything() -> None:
    assert all_to_all_seconds(400, FOUR) == 3 * 1.0 + 3 / 4 * 400 / 25
    assert send_seconds(400, FOUR) == 1.0 + 400 / 10


def test_traffic_inside_a_node_does_not_wait_for_the_network() -> None:
    two_nodes = FOUR._replace(inside=2, near_bandwidth=5.0)
    assert all_to_all_seconds(400, two_nodes) == 3 * 1.0 + max(400 / 2 / 25, 400 / 2 / 5)
    assert all_to_all_seconds(400, two_nodes, crossing=0.25) == 2 * 1.0 + 0.25 * 400 / 2 / 25 + 400 / 2 / 5


def test_one_rank_does_not_communicate() -> None:
    alone = FOUR._replace(num_ranks=1)
    functions = (all_reduce_seconds, all_gather_seconds, all_to_all_seconds, send_seconds)
    assert [function(400, alone) for function in functions] == [0, 0, 0, 0]


def test_sharded_parameters_move_one_and_a_half_times_what_replicas_move() -> None:
    even = Ring(8, "wire", Seconds(0.0), 100.0, 100.0, 100.0, 100.0)
    assert 3 * all_gather_seconds(800, even) == pytest.approx(1.5 * all_reduce_seconds(800, even))


def test_a_ring_inside_a_node_uses_its_links() -> None:
    ring = ring_of(parse_cluster("2x8xA100").levels, 8, 1)
    assert ring.link == "NVLink"
    assert ring.gather_bandwidth == ring.reduce_bandwidth == pytest.approx(RING_EFFICIENCY * 300e9)


def test_nvlink_switches_make_all_reduce_faster_than_all_gather() -> None:
    ring = ring_of(parse_cluster("8xH100").levels, 8, 1)
    assert ring.reduce_bandwidth / 1e9 == pytest.approx(436, rel=0.02)  # nccl_busbw_ultrascale.csv
    assert ring.gather_bandwidth < ring.reduce_bandwidth


def test_a_ring_across_nodes_uses_the_network_card_of_each_rank() -> None:
    levels = parse_cluster("4x8xA100").levels
    replicas, pairs, everyone = ring_of(levels, 4, 8), ring_of(levels, 8, 4), ring_of(levels, 32, 1)
    assert replicas.link == pairs.link == everyone.link == "InfiniBand"
    assert replicas.gather_bandwidth == pytest.approx(NETWORK_GATHER_EFFICIENCY * 25e9)
    assert pairs.gather_bandwidth == pytest.approx(NETWORK_GATHER_EFFICIENCY * 2 * 25e9)
    assert everyone.gather_bandwidth == pytest.approx(NETWORK_GATHER_EFFICIENCY * 8 * 25e9)
    assert replicas.latency > ring_of(levels, 8, 1).latency


def test_a_message_to_one_rank_uses_one_card() -> None:
    ring = ring_of(parse_cluster("4x8xA100").levels, 4, 8)
    assert ring.send_bandwidth == pytest.approx(NETWORK_EFFICIENCY * 25e9)


def test_a_ring_crosses_no_more_link_levels_than_it_must() -> None:
    links = [("pairs", 2, 400e9), ("sockets", 8, 50e9), ("network", 16, 10e9)]
    levels = tuple(Link(name=name, devices=num, bandwidth=rate, latency=Seconds(1e-5)) for name, num, rate in links)
    assert [ring_of(levels, num, 1).link for num in (2, 4, 8, 16)] == ["pairs", "sockets", "sockets", "network"]
    assert ring_of(levels, 4, 2).link == "sockets"


def test_measured_bandwidth_replaces_the_default() -> None:
    near, far = parse_cluster("2x8xH100").levels
    measured = (near, replace(far, reached={"all_reduce": 123e9, "all_to_all": 45e9}))
    assert ring_of(measured, 16, 1).reduce_bandwidth == 123e9
    assert ring_of(measured, 4, 4).reduce_bandwidth == pytest.approx(123e9 / 4)  # two of the eight cards of a node
    assert ring_of(measured, 4, 4).exchange_bandwidth == 45e9  # per rank
    assert ring_of(measured, 16, 1).gather_bandwidth == ring_of((near, far), 16, 1).gather_bandwidth


# Bus bandwidths of 256 MB on nodes of 8 H100, GB/s (nccl_busbw_ultrascale.csv).
@pytest.mark.parametrize(("nodes", "summed", "gathered"), [(4, 160, 119), (8, 100, 69), (16, 85, 55), (32, 65, 28)])
def test_collectives_reach_about_the_published_bandwidth(nodes: int, summed: float, gathered: float) -> None:
    ring, size = ring_of(parse_cluster(f"{nodes}x8xH100").levels, 8 * nodes, 1), 256e6
    passed = (ring.num_ranks - 1) / ring.num_ranks * size / 1e9
    assert 2 * passed / all_reduce_seconds(size, ring) == pytest.approx(summed, rel=0.3)
    assert passed / all_gather_seconds(size, ring) == pytest.approx(gathered, rel=0.4)


def test_a_hop_inside_a_node_may_take_as_long_as_its_own_link() -> None:
    near, far = parse_cluster("64x8xH100").levels
    every, own = (ring_of((near, far), 512, 1, hops) for hops in ("network", "own"))
    assert own.latency == pytest.approx((7 * near.latency + far.latency) / 8)
    assert every.latency > 4 * own.latency
    assert every[3:] == own[3:], "the bandwidths are the same"
    assert ring_of((near, far), 8, 1, "own") == ring_of((near, far), 8, 1)
