"""Seconds of a collective, worked by hand."""

import math

import pytest

from trimaran.cost.collective import Ring, all_gather_seconds, all_reduce_seconds, reduce_scatter_seconds, ring_of
from trimaran.hardware import parse_cluster

FOUR = Ring(num_ranks=4, bandwidth=100.0, gather_bandwidth=50.0, latency=1.0)


def test_an_all_reduce_passes_each_link_twice_less_a_share() -> None:
    assert all_reduce_seconds(400, FOUR) == 2 * (2 * 1.0 + 3 / 4 * 400 / 100)


def test_a_gather_and_a_scatter_pass_each_link_once() -> None:
    assert all_gather_seconds(400, FOUR) == reduce_scatter_seconds(400, FOUR) == 2 * 1.0 + 3 / 4 * 400 / 50


def test_one_rank_talks_to_nobody() -> None:
    alone = Ring(num_ranks=1, bandwidth=100.0, gather_bandwidth=50.0, latency=1.0)
    assert all_reduce_seconds(400, alone) == all_gather_seconds(400, alone) == 0


def test_sharded_parameters_move_one_and_a_half_times_what_replicas_move() -> None:
    even = Ring(num_ranks=8, bandwidth=100.0, gather_bandwidth=100.0, latency=0.0)
    sharded = 2 * all_gather_seconds(800, even) + reduce_scatter_seconds(800, even)
    assert sharded == pytest.approx(1.5 * all_reduce_seconds(800, even))


def test_a_ring_inside_a_node_uses_its_links() -> None:
    ring = ring_of(parse_cluster("2x8xH100"), num_ranks=8, stride=1)
    assert ring.bandwidth == pytest.approx(0.85 * 450e9)


def test_a_ring_across_nodes_shares_their_network_cards() -> None:
    cluster = parse_cluster("4x8xH100")
    flat = ring_of(cluster, num_ranks=32, stride=1)  # eight ranks a node, eight cards
    replicas = ring_of(cluster, num_ranks=4, stride=8)  # one rank a node, its own card
    assert flat.bandwidth == pytest.approx(0.85 * 8 * 50e9 / math.sqrt(4))
    assert replicas.bandwidth == pytest.approx(0.85 * 50e9 / math.sqrt(4))
    assert flat.latency == replicas.latency > ring_of(cluster, num_ranks=8, stride=1).latency


@pytest.mark.parametrize(("nodes", "all_reduce", "gather"), [(1, 436, 250), (4, 160, 119), (8, 100, 69), (16, 85, 55)])
def test_rings_reach_about_what_was_published_for_h100_nodes(nodes: int, all_reduce: float, gather: float) -> None:
    ring = ring_of(parse_cluster(f"{nodes}x8xH100"), num_ranks=8 * nodes, stride=1)
    assert ring.bandwidth / 1e9 == pytest.approx(all_reduce, rel=0.25)
    assert ring.gather_bandwidth / 1e9 == pytest.approx(gather, rel=0.25)
